"""Runs that begin at noise alone (zero terminal SNR) end near images, with every sampler and few steps."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.sampling_facts import PLAIN_NOISE, NoiseFacts, NoiseKind
from tests.pool.inference.sampling import toy

#: of the published UNets, and of CogVideoX and CogView
NOISES = (NoiseFacts(NoiseKind.ZERO_TERMINAL), NoiseFacts(NoiseKind.ZERO_TERMINAL, sigma_max=1e5))
#: numbers of images of the toy model are below 2; some samplers leave that range with few steps from any level
RANGE = 4.5
#: its steps are equal in log(sigma), so few of them are long, from any level
OWN_STEPS = "dpm_fast"


def ending(sampler: str, noise: NoiseFacts, schedule: str, steps: int, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest number of the latents at the end of a run from pure noise."""
    table, generator = sigma_table(noise), torch.Generator().manual_seed(steps)
    sigmas, model = make_sigmas(schedule, steps, table), toy.Recorded(toy.denoise)
    settings = SamplerSettings(table=table, unconditional=model.last)

    def fresh() -> torch.Tensor:
        return torch.randn((1, 1, 16, 16), generator=generator, dtype=torch.float64).to(dtype)

    start = fresh() * float(sigmas[0])
    return float(FUNCTIONS[sampler](model, start, sigmas, fresh, toy.unheard, settings=settings).abs().max())


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_no_sampler_leaves_the_range_of_images(steps: int) -> None:
    """More than with other models. Heun, DPM2 and Restart combined slopes, which differ by an image over a small level:
    times the length of the first step, that is thousands of images."""
    wild = {}
    for sampler in FUNCTIONS.keys() - {OWN_STEPS}:
        for schedule in ("trailing", "normal", "karras"):
            most = max(RANGE, 1.2 * ending(sampler, PLAIN_NOISE, schedule, steps))
            found = {noise.sigma_max: ending(sampler, noise, schedule, steps) for noise in NOISES}
            wild |= {(sampler, schedule, level): each for level, each in found.items() if not each < most}
    assert not wild


def test_methods_of_second_order_are_so_from_noise_alone() -> None:
    """In the reciprocal of the level, in which the first step is no longer than others."""
    start = torch.linspace(-1.5, 1.5, 33, dtype=torch.float64)[None, None, None] * 4000.0
    settings = SamplerSettings(table=sigma_table(NOISES[0]))
    for sampler in ("heun", "dpm_2"):
        errors = []
        for steps in (40, 80):
            sigmas = 1 / torch.linspace(1 / 4000.0, 1.0, steps + 1, dtype=torch.float64)
            found = FUNCTIONS[sampler](toy.denoise, start, sigmas, toy.no_noise, toy.unheard, settings=settings)
            errors.append(float((found - toy.exact(start, 4000.0, 1.0)).abs().max()))
        assert errors[0] > 3 * errors[1], (sampler, errors)


def test_single_precision_is_enough_from_noise_alone() -> None:
    """Noise of a level of 100,000 leaves no digit for an image, if an image is what remains of its difference."""
    for sampler in ("heun", "dpm_2"):
        low = ending(sampler, NOISES[1], "trailing", 4, torch.float32)
        assert low == pytest.approx(ending(sampler, NOISES[1], "trailing", 4), abs=0.02)
