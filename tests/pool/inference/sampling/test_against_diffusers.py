"""Every sampler follows diffusers' scheduler of the same method, step by step, at equal noise levels.

diffusers keeps most states variance-preserving and its coefficients in float32; its levels are overwritten with ours,
in float64, so that the method is left.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.samplers import FLOW_FUNCTIONS, FUNCTIONS, Noise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from tests.each_case import each_case
from tests.pool.inference.sampling import toy

# diffusers hands torch tensors to numpy in a way that numpy 2 frowns upon
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TABLE = sd1_sigma_table()
SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def assert_agree(state: Tensor, oracle_state: Tensor) -> None:
    torch.testing.assert_close(state.to(oracle_state.dtype), oracle_state, rtol=1e-5, atol=1e-5)


def start(sigma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x * sigma).to(dtype)


def ours(
    sampler: str, x_BCHW: Tensor, sigmas: Tensor, noise: Noise = toy.no_noise, eta: float | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The result, and the state at which the model was asked in each step."""
    states: list[Tensor] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        states.append(x)
        return toy.denoise(x, sigma)

    return FUNCTIONS[sampler](denoise, x_BCHW, sigmas, noise, toy.unheard, settings=SamplerSettings(eta=eta)), states


def predict_noise(x_BCHW: Tensor, sigma: Tensor) -> Tensor:
    return (x_BCHW - toy.denoise(x_BCHW, float(sigma))) / sigma


@pytest.mark.parametrize("karras", [False, True])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_euler(steps: int, karras: bool) -> None:
    sigmas = make_sigmas("karras" if karras else "normal", steps, TABLE)
    oracle = EulerDiscreteScheduler(**SD1, use_karras_sigmas=karras)
    oracle.set_timesteps(steps)
    oracle.sigmas = sigmas
    x = start(float(sigmas[0]))
    result, states = ours("euler", x, sigmas)
    for state, sigma, timestep in zip(states, sigmas[:-1], oracle.timesteps, strict=True):
        assert_agree(state, x)
        oracle.scale_model_input(x, timestep)
        x = oracle.step(predict_noise(x, sigma), timestep, x).prev_sample
    assert_agree(result, x)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_euler_ancestral_with_the_same_noise(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas = make_sigmas("normal", steps, TABLE)
    noises = torch.randn(steps, 2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    oracle = EulerAncestralDiscreteScheduler(**SD1)
    oracle.set_timesteps(steps)
    oracle.sigmas = sigmas
    feed = iter(noises)
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_euler_ancestral_discrete.randn_tensor", lambda *args, **kwargs: next(feed)
    )
    x = start(float(sigmas[0]))
    result, states = ours("euler_ancestral", x, sigmas, iter(noises).__next__)
    for state, sigma, timestep in zip(states, sigmas[:-1], oracle.timesteps, strict=True):
        assert_agree(state, x)
        oracle.scale_model_input(x, timestep)
        x = oracle.step(predict_noise(x, sigma), timestep, x).prev_sample
    assert_agree(result, x)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("steps", [1, 5, 20, 50])
def test_ddim(steps: int, eta: float) -> None:
    """Also at its own timesteps: "leading" with an offset of 1 is what `ddim_uniform` means."""
    sigmas = make_sigmas("ddim_uniform", steps, TABLE)
    oracle = DDIMScheduler(**SD1, clip_sample=False, set_alpha_to_one=True, steps_offset=1, timestep_spacing="leading")
    oracle.set_timesteps(steps)
    assert [TABLE.timestep(s) for s in sigmas[:-1].tolist()] == pytest.approx(oracle.timesteps.tolist(), abs=1e-4)
    oracle.alphas_cumprod = 1.0 / (1.0 + torch.tensor(TABLE.sigmas, dtype=torch.float64) ** 2)
    x = start(float(sigmas[0]))
    noises = torch.randn(steps, *x.shape, generator=torch.Generator().manual_seed(2))
    result, states = ours("ddim", x, sigmas, iter(noises).__next__ if eta else toy.no_noise, eta)
    x = x.double()
    for i, timestep in enumerate(oracle.timesteps):
        assert_agree(states[i], x)
        scale, scale_next = (1.0 + sigmas[i : i + 2].double() ** 2).sqrt()
        predicted, fresh = predict_noise(x, sigmas[i]), noises[i].double() if eta and i < steps - 1 else None
        # the last step of ours ends at the clean latent: diffusers would add noise of variance 0
        of_step = eta if fresh is not None else 0.0
        x = oracle.step(predicted, timestep, x / scale, eta=of_step, variance_noise=fresh).prev_sample * scale_next
    assert_agree(result, x)


Multistep: TypeAlias = DPMSolverMultistepScheduler | UniPCMultistepScheduler


def follow_multistep(sampler: str, oracle: Multistep, sigmas: Tensor) -> None:
    """Compare the states at which the model is asked, and the result, with an oracle that is run in float64."""
    steps = len(sigmas) - 1
    oracle.set_timesteps(steps)
    oracle.sigmas = sigmas.double()
    x = start(float(sigmas[0]))
    result, states = ours(sampler, x, sigmas)
    x = x.double()
    scales = (1.0 + oracle.sigmas**2).sqrt()
    for i in range(steps):
        assert_agree(states[i], x)
        eps = predict_noise(x, oracle.sigmas[i])
        x = oracle.step(eps, oracle.timesteps[i], x / scales[i]).prev_sample * scales[i + 1]
    assert_agree(result, x)


@pytest.mark.parametrize("schedule", ["karras", "normal"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 25])
def test_dpmpp_2m(steps: int, schedule: str) -> None:
    oracle = DPMSolverMultistepScheduler(
        **SD1,
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        use_karras_sigmas=schedule == "karras",
        final_sigmas_type="zero",
    )
    follow_multistep("dpmpp_2m", oracle, make_sigmas(schedule, steps, TABLE))


@each_case("schedule", ["normal", "karras", "simple"])
@each_case("steps", [1, 2, 3, 4, 5, 6, 10, 25])
def test_uni_pc(steps: int, schedule: str) -> None:
    """The levels end above 0: diffusers' "bh1" divides infinity by itself in a step to 0."""
    oracle = UniPCMultistepScheduler(**SD1, solver_order=3, solver_type="bh1", lower_order_final=True)
    sigmas = make_sigmas(schedule, steps, TABLE)
    sigmas[-1] = sigmas[-2] / 2
    follow_multistep("uni_pc", oracle, sigmas)


@pytest.mark.parametrize("schedule", ["normal", "karras", "simple"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 25])
def test_uni_pc_2(steps: int, schedule: str) -> None:
    """As diffusers' scheduler is where nothing is said."""
    follow_multistep("uni_pc_2", UniPCMultistepScheduler(**SD1), make_sigmas(schedule, steps, TABLE))


@pytest.mark.parametrize("shift", [3.0, 12.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 25])
def test_uni_pc_2_of_flows(steps: int, shift: float) -> None:
    """As Wan was published with it, at its own levels; but for the last bit of where it begins."""
    oracle = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    oracle.set_timesteps(steps)
    sigmas = oracle.sigmas.clone()
    oracle.sigmas = sigmas.double()
    x = start(float(sigmas[0]))
    states: list[Tensor] = []

    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        states.append(noisy)
        return toy.denoise(noisy, sigma)

    result = FLOW_FUNCTIONS["uni_pc_2"](denoise, x, sigmas, toy.no_noise, toy.unheard)
    x = x.double()
    for i in range(steps):
        assert_agree(states[i], x)
        x = oracle.step(predict_noise(x, oracle.sigmas[i]), oracle.timesteps[i], x).prev_sample
    assert_agree(result, x)


def test_uni_pc_to_0_is_the_limit_of_uni_pc_to_nearly_0() -> None:
    sigmas = make_sigmas("karras", 8, TABLE)
    nearly = sigmas.clone()
    nearly[-1] = 1e-6
    x = start(float(sigmas[0]))
    torch.testing.assert_close(ours("uni_pc", x, sigmas)[0], ours("uni_pc", x, nearly)[0], rtol=0, atol=1e-4)
