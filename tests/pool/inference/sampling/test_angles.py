"""Noise that a model is told as an angle, as Stable Audio is."""

from __future__ import annotations

import math

import pytest
from diffusers import EDMEulerScheduler
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind

NOISE = NoiseFacts(NoiseKind.ANGLE, sigma_min=0.3, sigma_max=500.0)
TABLE = sigma_table(NOISE)


@given(st.floats(0.01, 0.999))
def test_the_model_is_told_the_angle_in_right_angles(share: float) -> None:
    assert TABLE.time_input(math.tan(share * math.pi / 2)) == pytest.approx(share)


@pytest.mark.parametrize("steps", [2, 10, 100])
def test_its_usual_levels_are_those_of_diffusers(steps: int) -> None:
    other = EDMEulerScheduler(0.3, 500.0, 1.0, sigma_schedule="exponential", prediction_type="v_prediction")
    other.set_timesteps(steps)
    assert make_sigmas("exponential", steps, TABLE).tolist() == pytest.approx(other.sigmas.tolist(), rel=1e-5)


def test_its_ends_are_those_of_the_family() -> None:
    assert (TABLE.sigma_min, TABLE.sigma_max) == pytest.approx((0.3, 500.0))
