"""What a model's answer says of the clean latent is what diffusers makes of it, at any deviation of clean latents."""

from __future__ import annotations

import pytest
import torch
from diffusers import EDMEulerScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.inference.sampling.predictions import clean_latent, input_scale
from modelpool.pool.values.core.sampling_facts import Prediction

SIGMAS = st.floats(0.002, 120.0)
SIGMA_DATA = st.sampled_from((0.25, 0.5, 1.0))
PREDICTIONS = {Prediction.EDM: "epsilon", Prediction.VELOCITY: "v_prediction"}


@settings(deadline=None)
@given(SIGMAS, SIGMA_DATA, st.sampled_from(sorted(PREDICTIONS, key=str)))
def test_scales_are_those_of_diffusers(sigma: float, sigma_data: float, prediction: Prediction) -> None:
    x, answer = torch.linspace(-3.0, 2.0, 8, dtype=torch.float64), torch.linspace(1.0, -0.5, 8, dtype=torch.float64)
    oracle = EDMEulerScheduler(sigma_data=sigma_data, prediction_type=PREDICTIONS[prediction])
    torch.testing.assert_close(x * input_scale(sigma, sigma_data), oracle.precondition_inputs(x, sigma))
    expected = oracle.precondition_outputs(x, answer, sigma)
    torch.testing.assert_close(clean_latent(prediction, x, answer, sigma, sigma_data), expected)


@settings(deadline=None)
@given(SIGMAS)
def test_true_noise_and_true_velocity_mean_the_same_clean_latent(sigma: float) -> None:
    clean, noise = torch.linspace(-1.0, 1.5, 8, dtype=torch.float64), torch.linspace(2.0, -2.0, 8, dtype=torch.float64)
    x, alpha = clean + sigma * noise, input_scale(sigma)
    velocity = noise * alpha - clean * (sigma * alpha)
    for prediction, answer in ((Prediction.NOISE, noise), (Prediction.VELOCITY, velocity), (Prediction.EDM, -velocity)):
        torch.testing.assert_close(clean_latent(prediction, x, answer, sigma), clean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_a_noisy_latent_is_shown_at_unit_variance(sigma_data: float) -> None:
    assert (3.0**2 + sigma_data**2) * input_scale(3.0, sigma_data) ** 2 == pytest.approx(1.0)
