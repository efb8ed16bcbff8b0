"""One image: a function of its work alone, that reports each step and stops between two when asked."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS
from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    Stopped,
)
from tests.each_case import each_case
from tests.pool.changed_work import changed_work
from tests.pool.inference.sampling.one_image import denoise_image

SHAPE = (4, 8, 8)
CPU = torch.device("cpu")
WORK = SampleParams(
    ModelRef("toy", "toy.safetensors", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(5, "euler_ancestral", "normal"),
    GuidanceParams(4.0),
    11,
)
COND, UNCOND = torch.full((77, 8), 0.3), torch.full((77, 8), -0.1)
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)


def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
    """A model of nothing, that depends on all three."""
    mix = timestep_B / 1000 + context_BLD.mean(dim=(1, 2))
    return x_BCHW * 0.9 + mix[:, None, None, None] * 0.05


def image(work: SampleParams = WORK, hooks: RunHooks = QUIET, uncond: Tensor | None = UNCOND) -> Tensor:
    return denoise_image(predict_noise, work, SHAPE, COND, uncond, CPU, hooks)


@each_case("sampler", SAMPLERS)
def test_a_image_is_a_function_of_its_work(sampler: str) -> None:
    """Bit for bit the same when other images run before it and in the middle of it, and when torch is reseeded."""
    work = changed_work(WORK, sampler=sampler, noise_schedule=SAMPLERS[sampler].schedule)
    alone = image(work)
    assert (alone.dtype, alone.shape, alone.device.type) == (torch.float32, SHAPE, "cpu")

    def disturb(done: int, steps: int) -> None:
        torch.manual_seed(done)
        image(dataclasses.replace(work, seed=done))

    assert torch.equal(image(work, RunHooks(on_step=disturb, should_stop=lambda: False)), alone)
    assert not torch.equal(image(dataclasses.replace(work, seed=12)), alone)


@pytest.mark.parametrize(
    ("schedule", "scale"), [("normal", math.hypot(1, 14.6146)), ("ddim_uniform", sd1_sigma_table().sigmas[801])]
)
def test_the_first_state_is_the_seeds_noise_at_the_first_level(schedule: str, scale: float) -> None:
    """At the top of the table the model was shown signal and noise together, so the state is that wide; below, not."""
    first: list[Tensor] = []

    def record(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        first.append(x_BCHW)
        return predict_noise(x_BCHW, timestep_B, context_BLD)

    work = changed_work(WORK, noise_schedule=schedule, cfg=1.0)
    denoise_image(record, work, SHAPE, COND, None, CPU, QUIET)
    sigma = float(make_sigmas(schedule, WORK.schedule.steps, sd1_sigma_table())[0])
    expected = ImageNoise(WORK.seed).draw((1, *SHAPE)) * scale / math.hypot(1, sigma)
    torch.testing.assert_close(first[0], expected, rtol=1e-5, atol=1e-6)


def test_levels_listed_one_by_one_make_the_image_of_their_schedule() -> None:
    levels = make_sigmas("karras", 5, sd1_sigma_table()).tolist()[:-1]
    listed = changed_work(WORK, noise_schedule="sigmas", sigmas=tuple(levels))
    assert torch.equal(image(listed), image(changed_work(WORK, noise_schedule="karras")))


def test_ancestral_noise_follows_the_initial_noise_in_step_order() -> None:
    """With a model that finds all of x to be noise, each state is the noise added last, and the rest of before."""
    states: list[Tensor] = []

    def all_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        sigma = sd1_sigma_table().sigma(float(timestep_B[0]))
        states.append(x_BCHW * math.hypot(1, sigma))
        return states[-1] / sigma

    work = changed_work(WORK, cfg=1.0, steps=3)
    result = denoise_image(all_noise, work, SHAPE, COND, None, CPU, QUIET)
    seed = ImageNoise(WORK.seed)
    levels = make_sigmas("normal", 3, sd1_sigma_table()).tolist()
    x = seed.draw((1, *SHAPE)) * math.hypot(1, levels[0])
    for i in (1, 2):
        ratio = levels[i] / levels[i - 1]
        x = x * ratio**2 + seed.draw((1, *SHAPE)) * levels[i] * math.sqrt(1 - ratio**2)
        torch.testing.assert_close(states[i], x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result, torch.zeros(SHAPE), rtol=0, atol=1e-5)


def test_every_step_is_reported_and_asked_about_first() -> None:
    log: list[object] = []

    def should_stop() -> bool:
        log.append("asked")
        return False

    image(hooks=RunHooks(on_step=lambda done, steps: log.append((done, steps)), should_stop=should_stop))
    assert log == [entry for done in range(1, 6) for entry in ("asked", (done, 5))]


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "dpmpp_2m", "uni_pc", "lms", "dpmpp_3m_sde"])
@pytest.mark.parametrize("steps_done", [0, 1, 4])
def test_a_run_stops_at_the_step_boundary_at_which_it_is_asked(sampler: str, steps_done: int) -> None:
    done_steps: list[int] = []
    calls: list[int] = []

    def counted(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        calls.append(len(x_BCHW))
        return predict_noise(x_BCHW, timestep_B, context_BLD)

    hooks = RunHooks(lambda done, steps: done_steps.append(done), lambda: len(done_steps) == steps_done)
    with pytest.raises(Stopped):
        denoise_image(counted, changed_work(WORK, sampler=sampler), SHAPE, COND, UNCOND, CPU, hooks)
    assert done_steps == list(range(1, steps_done + 1))
    assert calls == [2] * steps_done


def test_a_run_that_is_done_is_not_stopped() -> None:
    """A stop asked for during the last step comes too late: the image is there."""
    done_steps: list[int] = []
    hooks = RunHooks(lambda done, steps: done_steps.append(done), lambda: len(done_steps) == WORK.schedule.steps)
    assert torch.equal(image(hooks=hooks), image())


def test_cfg_1_needs_no_negative_prompt() -> None:
    work = changed_work(WORK, cfg=1.0)
    assert torch.equal(image(work, uncond=None), image(work))


def test_no_gradients_are_kept() -> None:
    weight = torch.nn.Parameter(torch.tensor(0.9))
    result = denoise_image(lambda x, t, c: x * weight, WORK, SHAPE, COND, UNCOND, CPU, QUIET)
    assert not result.requires_grad


def test_cfg_plus_plus_takes_its_noise_from_the_negative_prompt_at_cfg_1() -> None:
    """Algorithm 2 of the paper at scale 1: the image of the prompt, with the noise of the negative prompt."""
    schedule = SamplingSchedule(2, "euler_cfg_pp", "normal")
    found = image(dataclasses.replace(WORK, schedule=schedule, guidance=GuidanceParams(1.0)))
    table = sd1_sigma_table()
    first, second, _ = make_sigmas("normal", 2, table).tolist()

    def noise(x: Tensor, text: Tensor, sigma: float) -> Tensor:
        timestep = torch.full((1,), table.time_input(sigma))
        return predict_noise(x[None] / math.sqrt(sigma**2 + 1), timestep, text[None])[0]

    x = ImageNoise(WORK.seed).draw((1, *SHAPE))[0] * math.sqrt(1 + first**2)
    x = x - first * noise(x, COND, first) + second * noise(x, UNCOND, first)
    torch.testing.assert_close(found, x - second * noise(x, COND, second), atol=1e-5, rtol=1e-5)
