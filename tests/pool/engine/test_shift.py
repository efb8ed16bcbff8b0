"""A run with a shift of its own steps through the levels of diffusers' scheduler with that shift, whatever the model's
own is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.families.supported import running_families
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize
from modelpool.pool.values.core.stage_params import (
    Encoded,
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    batch_key,
    task_id,
)
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from tests.pool.inference.extensions.extended import latents
from tests.pool.input_names import inputs_of
from tests.pool.zoo import build

#: Flux's
BY_SIZE = NoiseFacts(NoiseKind.FLOW, shift_by_size=ShiftBySize((256, 4096), (0.5, 1.15)), last_share=0.02)
WORK = SampleParams(
    ModelRef("sd3", "/sd3", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(5, "euler", "normal"),
    GuidanceParams(4.0),
    7,
)


def quiet(done: int, steps: int) -> None:
    """Called at each step."""


@pytest.fixture(scope="module")
def model() -> ModelPatcher:
    module, device = build("sd35").module, torch.device("cpu")
    made = ModelPatcher.of(ComponentKey("m"), Role.DIFFUSION_MODEL, module, device, WeightForm(torch.float32))
    made.realize(WeightsTarget(frozenset(m.name for m in made.modules()), made.patches))
    return made


def sampled(model: ModelPatcher, schedule: SamplingSchedule, noise: NoiseFacts | None = None) -> np.ndarray:
    facts = running_families()["sd3"].sampling
    facts = facts if noise is None else replace(facts, noise=noise)
    work = replace(WORK, schedule=schedule)
    texts = [Encoded(latents(7, 32, seed=seed).numpy(), latents(64, seed=seed).numpy()) for seed in (1, 2)]
    (latent,) = sample_batch(
        [work], [inputs_of(work, *texts)], model, LatentFacts(4, 8, 1.0), RunHooks(quiet, lambda: False), facts=facts
    )
    return latent.samples_CHW


@pytest.mark.parametrize("shift", [1.0, 3.1, 6.0])
def test_a_run_with_a_shift_steps_through_the_levels_of_diffusers(model: ModelPatcher, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(5)
    listed = replace(WORK.schedule, noise_schedule="sigmas", sigmas=tuple(scheduler.sigmas[:-1].tolist()))
    found = sampled(model, replace(WORK.schedule, shift=shift))
    assert np.abs(found - sampled(model, listed)).max() < 1e-5
    own = running_families()["sd3"].sampling.noise.shift
    assert own == 3.0
    assert np.abs(found - sampled(model, WORK.schedule)).max() > 1e-3
    assert np.array_equal(sampled(model, replace(WORK.schedule, shift=own)), sampled(model, WORK.schedule))


def test_a_shift_replaces_one_by_size_and_keeps_the_last_share() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.1, shift_terminal=0.02)
    scheduler.set_timesteps(sigmas=[1.0 - i / 20 for i in range(20)])
    levels = make_sigmas("simple", 20, sigma_table(BY_SIZE.shifted_by(3.1), 1024, 20))
    torch.testing.assert_close(levels, scheduler.sigmas, rtol=2e-6, atol=0)
    assert BY_SIZE.shifted_by(0.0) is BY_SIZE


def test_runs_with_other_shifts_are_other_tasks_of_other_batches() -> None:
    works = [replace(WORK, schedule=replace(WORK.schedule, shift=shift)) for shift in (0.0, 1.0, 3.1)]
    assert len({task_id(work, {}) for work in works}) == len({batch_key(work) for work in works}) == 3
