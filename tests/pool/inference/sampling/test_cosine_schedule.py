"""Noise along a cosine: the levels, the numbers and the steps of diffusers' scheduler, whatever the number of steps."""

from __future__ import annotations

from itertools import pairwise

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.guidance.guided_steps import ModelCall, PredictNoise
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling import cosine_schedule as cosine
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS, SAMPLERS, SCHEDULES
from modelpool.pool.inference.sampling.schedules import SigmaTable, cosine_table, make_sigmas, sigma_table
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from tests.each_case import each_case

QUIET = RunHooks(lambda done, steps: None, lambda: False)
SHAPE = (4, 3, 5)


def scheduler(steps: int) -> diffusers.DDPMWuerstchenScheduler:
    found = diffusers.DDPMWuerstchenScheduler()
    found.set_timesteps(steps)
    return found


@pytest.mark.parametrize("steps", [1, 2, 10, 20, 60, 150])
def test_levels_and_what_a_model_is_told_of_them_are_the_schedulers(steps: int) -> None:
    """Even steps along the way: the first is told as 1, all noise. Beyond 157 steps the scheduler's first levels are
    equal, and ours are not."""
    theirs = scheduler(steps)
    way = theirs.timesteps[:-1]
    share = theirs._alpha_cumprod(way.double(), torch.device("cpu"))
    table = cosine_table()
    sigmas = make_sigmas("simple", steps, table)[:-1]
    torch.testing.assert_close(1 / (1 + sigmas.double() ** 2), share, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor([table.time_input(s) for s in sigmas.tolist()]), way, rtol=0, atol=1e-7)
    assert table.time_input(float(sigmas[0])) == 1.0


@each_case("shift", [0.5, 1.0, 2.0])
@each_case("name", sorted(SCHEDULES.keys() - {"ays_svd"}))
@each_case("steps", [1, 2, 3, 157, 442, MAX_STEPS])
def test_the_levels_of_every_schedule_fall(name: str, steps: int, shift: float) -> None:
    """At both ends of the way the share of noise stands still."""
    sigmas = make_sigmas(name, steps, cosine_table(shift)).tolist()
    assert len(sigmas) == steps + 1
    assert all(above > below for above, below in pairwise(sigmas))
    assert sigmas[-1] == 0.0


@given(st.floats(0.0, 1.0))
def test_the_way_to_the_noise_of_a_way_is_that_way(way: float) -> None:
    level = cosine.sigma(way)
    assert cosine.SIGMA_MIN <= level <= cosine.SIGMA_MAX
    assert cosine.position(level) == pytest.approx(way, abs=1e-9)


@given(st.floats(0.0, 1.0), st.floats(1.01, 4.0))
def test_a_shift_is_more_noise_at_the_same_way_and_no_other_number_for_it(way: float, shift: float) -> None:
    """What a model is told of a level is what it was trained to be told."""
    assert cosine.sigma(way, shift) >= cosine.sigma(way)
    level = cosine.sigma(way, shift)
    assert cosine_table(shift).time_input(level) == pytest.approx(cosine.position(level))


def denoised(predict: PredictNoise, work: SampleParams, table: SigmaTable) -> torch.Tensor:
    """The latent that a run of one image makes of noise, without guidance."""
    images, prompts = ImagesToDenoise(work, [3], SHAPE), Prompts(Condition(torch.zeros(1, 1, 1)))
    guider, call = ClassifierFreeGuidance(1.0), ModelCall(predict, table)
    return denoise_images(images, prompts, call, guider, torch.device("cpu"), QUIET)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_takes_the_schedulers_steps(steps: int) -> None:
    """With the noise that it draws: the last step leaves a little, as the scheduler reckons it. The model's answer
    depends on the latent and on the number that it is told, so that both have to be right."""

    def predict(x_BCHW: torch.Tensor, told_B: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.sin(3.0 * x_BCHW + told_B.view(-1, 1, 1, 1)) + 0.5 * x_BCHW

    work = SampleParams(
        ModelRef("m", "", ""),
        (),
        OutputShape(0, 0),
        SamplingSchedule(steps, "euler_ancestral", "simple"),
        GuidanceParams(1.0),
        3,
    )
    table = sigma_table(NoiseFacts(NoiseKind.COSINE))
    ours = denoised(predict, work, table)
    theirs, noise = scheduler(steps), ImageNoise(3)
    x_BCHW = noise.draw((1, *SHAPE))
    for way in theirs.timesteps[:-1]:
        told_B = way.expand(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "diffusers.schedulers.scheduling_ddpm_wuerstchen.randn_tensor", lambda shape, **_: noise.draw(shape)
            )
            x_BCHW = theirs.step(predict(x_BCHW, told_B), told_B, x_BCHW).prev_sample
    torch.testing.assert_close(ours, x_BCHW, rtol=2e-5, atol=2e-5)


@each_case("sampler", sorted(SAMPLERS.keys() - {"dpm_fast", "dpm_adaptive"}))
def test_every_sampler_finds_what_a_perfect_model_knows(sampler: str) -> None:
    """A model that knows the image gives the image, but for the noise that drawing runs leave: a hundredth."""
    clean = torch.linspace(-1, 1, 60).view(1, *SHAPE)

    def predict(x_BCHW: torch.Tensor, told_B: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        sigma = cosine.sigma(float(told_B[0]))
        return (x_BCHW * (1 + sigma**2) ** 0.5 - clean) / sigma

    work = SampleParams(
        ModelRef("m", "", ""), (), OutputShape(0, 0), SamplingSchedule(8, sampler, "simple"), GuidanceParams(1.0), 3
    )
    found = denoised(predict, work, cosine_table())
    torch.testing.assert_close(found, clean, rtol=0, atol=0.02)


@given(st.floats(0.01, 1000.0))
def test_timesteps_are_thousandths_of_the_way(timestep: float) -> None:
    table = cosine_table()
    level = table.sigma(timestep)
    assert table.timestep(level) == pytest.approx(1000 * table.time_input(level)) == pytest.approx(timestep, abs=1e-6)
    assert table.sigma_at_percent(0.25) == pytest.approx(table.sigma(750.0))
