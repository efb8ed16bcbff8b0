"""Models that predict the flow: their levels are the levels of diffusers' scheduler, and every sampler gets them right.

Proves: levels with a fixed shift, with one by size, and with a last share equal FlowMatchEulerDiscreteScheduler's;
samplers turn the flow of one known image into that image; the ancestral one keeps the spread that training saw.
"""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.inference.sampling.noise_path import flow_path
from modelpool.pool.inference.sampling.predictions import clean_latent, input_scale, noised
from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.samplers import FLOW_FUNCTIONS, FUNCTIONS, sample_euler_ancestral
from modelpool.pool.inference.sampling.schedules import FlowTable, flow_table, make_sigmas, sigma_table
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction, ShiftBySize
from tests.each_case import each_case

#: Flux's: `base_shift` and `max_shift` at `base_image_seq_len` and `max_image_seq_len` of its scheduler
BY_SIZE = ShiftBySize((256, 4096), (0.5, 1.15))


def test_levels_with_a_fixed_shift_are_those_of_diffusers() -> None:
    for shift in (1.0, 3.0, 6.0):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        for steps in (1, 4, 28):
            scheduler.set_timesteps(steps)
            torch.testing.assert_close(
                make_sigmas("normal", steps, flow_table(shift)), scheduler.sigmas, rtol=2e-6, atol=0
            )


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 16384])
def test_levels_by_size_are_those_of_diffusers(tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
    table = sigma_table(NoiseFacts(NoiseKind.FLOW, shift_by_size=BY_SIZE), tokens)
    for steps in (4, 28, 50):
        scheduler.set_timesteps(sigmas=[1.0 - i / steps for i in range(steps)], mu=mu)
        torch.testing.assert_close(make_sigmas("simple", steps, table), scheduler.sigmas, rtol=2e-6, atol=0)


@pytest.mark.parametrize("exponents", [(0.5, 1.15), (-20.0, 20.0), (20.0, -20.0)])
@pytest.mark.parametrize("tokens", [1, 1 << 26, 1 << 40])
def test_levels_of_the_largest_latents_stay_numbers(exponents: tuple[float, float], tokens: int) -> None:
    """The line of the shift's logarithm goes on for ever, what floats hold does not."""
    for few in (2, 256):
        noise = NoiseFacts(NoiseKind.FLOW, shift_by_size=ShiftBySize((few - 1, few), exponents), last_share=0.1)
        levels = make_sigmas("simple", 20, sigma_table(noise, tokens))
        assert bool(torch.isfinite(levels).all())
        assert bool((levels[:-1] >= levels[1:]).all())
        assert float(levels[-2]) == pytest.approx(0.1)


def test_the_last_share_of_noise_is_as_the_model_wants_it() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    scheduler.set_timesteps(sigmas=[1.0 - i / 20 for i in range(20)], mu=0.7)
    levels = make_sigmas("simple", 20, flow_table(math.exp(0.7), last_share=0.02))
    torch.testing.assert_close(levels, scheduler.sigmas, rtol=2e-6, atol=0)
    assert float(levels[-2]) == pytest.approx(0.02)
    assert make_sigmas("simple", 1, flow_table(2.0, last_share=0.02)).tolist() == [1.0, 0.0]


def test_a_table_goes_both_ways() -> None:
    table = flow_table(2.5)
    for sigma in (0.003, 0.2, 0.77, 1.0):
        assert table.sigma(table.timestep(sigma)) == pytest.approx(sigma)
        assert table.time_input(sigma) == sigma
    assert table.sigma_at_percent(0.0) == 1.0
    assert table.sigma_at_percent(1.0) == 0.0
    assert isinstance(sigma_table(NoiseFacts(NoiseKind.FLOW, shift=2.5)), FlowTable)


def test_a_model_sees_its_input_as_it_is_and_its_answer_tells_the_clean_latent() -> None:
    clean, noise = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3)
    for sigma in (0.1, 0.9, 1.0):
        x = noised(Prediction.FLOW, clean, noise, sigma)
        torch.testing.assert_close(x, clean * (1 - sigma) + noise * sigma)
        torch.testing.assert_close(clean_latent(Prediction.FLOW, x, noise - clean, sigma), clean)
        assert input_scale(sigma, 1.0, Prediction.FLOW) == 1.0


@each_case("name", FUNCTIONS)
@each_case("schedule", ["normal", "simple", "sgm_uniform", "karras"])
def test_every_sampler_finds_the_image_that_the_flow_points_at(name: str, schedule: str) -> None:
    clean = torch.linspace(-2, 2, 48).reshape(1, 3, 4, 4)
    sigmas = make_sigmas(schedule, 6, flow_table(3.0))
    generator = torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(clean.shape, generator=generator)

    sampler = {**FUNCTIONS, **FLOW_FUNCTIONS}[name]
    table = flow_table(3.0)
    settings = SamplerSettings(path=flow_path(table), table=table, unconditional=lambda: clean)
    start = draw() * float(sigmas[0])
    found = sampler(lambda x, sigma: clean, start, sigmas, draw, lambda done, steps: None, settings=settings)
    # two end at the lowest level of the training, where a little noise is left
    left = 0.02 if name in ("dpm_fast", "dpm_adaptive") else 1e-5
    torch.testing.assert_close(found, clean, rtol=1e-4, atol=left)


def test_fresh_noise_leaves_the_spread_that_training_saw() -> None:
    """Of latents that are all `clean`, each step leaves share * noise and (1 - share) * clean."""
    clean = torch.full((1, 1, 200, 200), 1.5)
    generator = torch.Generator().manual_seed(3)
    for end in (0.9, 0.5, 0.1):
        sigmas = torch.tensor([1.0, 0.95, end])
        x = sample_euler_ancestral(
            lambda x, sigma: clean,
            torch.randn(clean.shape, generator=generator),
            sigmas,
            lambda: torch.randn(clean.shape, generator=generator),
            lambda done, steps: None,
            settings=SamplerSettings(path=flow_path(flow_table(3.0))),
        )
        assert float(x.mean()) == pytest.approx(1.5 * (1 - end), abs=0.02)
        assert float(x.std()) == pytest.approx(end, rel=0.02)
