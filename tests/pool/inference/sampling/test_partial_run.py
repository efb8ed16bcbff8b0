"""A run in two parts, with what a sampler remembers handed on as arrays, is the run as a whole, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.first_frame import noised_image
from modelpool.pool.inference.conditioning.inpainting import Inpainting
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.starts import StartLatent
from modelpool.pool.inference.guidance.apg import AdaptiveProjectedGuidance
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance, Predictions
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling.partial_run import (
    GuidanceMemory,
    PartialRun,
    partial_run_of,
    run_states,
    sampler_states,
)
from modelpool.pool.inference.sampling.sampler_names import OWN_STEPS, SAMPLERS, SCHEDULES
from modelpool.pool.inference.sampling.schedules import flow_table, sd1_sigma_table
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    GuidanceParams,
    MaskCondition,
    ModelRef,
    OutputShape,
    RunHooks,
    RunState,
    SampleParams,
    SamplerState,
    SamplingSchedule,
    StartCondition,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from tests.each_case import each_case
from tests.pool.changed_work import changed_work

CPU = torch.device("cpu")
SHAPE, SEEDS, STEPS = (4, 6, 6), (11, 12), 7
WORK = SampleParams(
    ModelRef("toy", "toy.safetensors", "00"),
    (),
    OutputShape(48, 48),
    SamplingSchedule(STEPS, "euler", "normal"),
    GuidanceParams(3.0),
    0,
)


def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
    """A model of nothing, that depends on all three."""
    mix = torch.sin(timestep_B) + context_BLD.mean(dim=(1, 2))
    return torch.tanh(x_BCHW) * 0.9 + mix[:, None, None, None] * 0.05


def run(
    work: SampleParams,
    part: PartialRun | None,
    kind: str,
    told: list[tuple[int, int]] | None = None,
    hooks: RunHooks | None = None,
    seeds: Sequence[int] = SEEDS,
) -> Tensor:
    texts = [Condition(torch.full((len(seeds), 7, 8), value)) for value in (0.3, -0.1)]
    hooks = hooks or RunHooks(lambda *step: None if told is None else told.append(step), lambda: False)
    kept = None
    if work.has(MaskCondition):
        kept = Inpainting(torch.full((1, *SHAPE), 0.5), torch.linspace(0, 1, 36).reshape(1, 1, 6, 6))
    start = StartLatent(None if kept is None else kept.latent_BCHW, kept)
    images, guider = ImagesToDenoise(work, seeds, SHAPE), ClassifierFreeGuidance(work.guidance.cfg)
    return denoise_images(images, Prompts(*texts), KINDS[kind], guider, CPU, hooks, start, part=part)


KINDS = {
    "noise": ModelCall(predict, sd1_sigma_table()),
    "flow": ModelCall(predict, flow_table(5.0), Prediction.FLOW),
}
NOTHING = TaskInputs()


def after(halfway: SamplerState) -> TaskInputs:
    """The inputs of the second part of a run."""
    return TaskInputs({"sampler_state": halfway})


def travelled(halfway: SamplerState) -> SamplerState:
    """What comes out of another process."""
    arrived: SamplerState = pickle.loads(pickle.dumps(halfway))
    return arrived


@each_case("kind", KINDS)
@each_case("sampler", sorted(SAMPLERS.keys() - OWN_STEPS))
def test_two_parts_make_what_one_run_makes(sampler: str, kind: str) -> None:
    """Wherever it is cut: at the head, where a sampler has looked back to little yet, and in its last steps."""
    whole = changed_work(WORK, sampler=sampler)
    expected = run(whole, None, kind)
    for switch in range(1, STEPS):
        first, told = changed_work(whole, switch=switch), list[tuple[int, int]]()
        part = partial_run_of((first,), (NOTHING,), CPU)
        halfway = sampler_states(run(first, part, kind, told), part.memory)
        assert told == [(done, switch) for done in range(1, switch + 1)]
        second = changed_work(first, low_noise=True)
        rest = partial_run_of((second,) * 2, [after(travelled(each)) for each in halfway], CPU)
        told.clear()
        assert torch.equal(run(second, rest, kind, told), expected), switch
        assert told == [(done, STEPS - switch) for done in range(1, STEPS - switch + 1)]


@pytest.mark.parametrize("sampler", ["euler_ancestral", "uni_pc"])
def test_a_part_of_a_run_from_a_image_keeps_what_its_mask_keeps(sampler: str) -> None:
    """With the noise that the first part put on it, at the levels of a schedule with a head that is left out."""
    whole = changed_work(WORK, sampler=sampler, first_step=2, conditions=(StartCondition(), MaskCondition()))
    expected = run(whole, None, "flow")
    first = changed_work(whole, switch=4)
    parts = (whole, first, changed_work(first, low_noise=True))
    assert [part.steps_run for part in parts] == [5, 2, 3]
    part = partial_run_of((first,), (NOTHING,), CPU)
    halfway = sampler_states(run(first, part, "flow"), part.memory)
    second = changed_work(first, low_noise=True)
    rest = partial_run_of((second,) * 2, [after(each) for each in halfway], CPU)
    assert torch.equal(run(second, rest, "flow"), expected)


def test_what_is_handed_on_is_one_images_own() -> None:
    """So that the second part may run beside other images than the first."""
    first = changed_work(WORK, sampler="uni_pc", switch=4)
    part = partial_run_of((first,), (NOTHING,), CPU)
    one, other = sampler_states(run(first, part, "noise"), part.memory)
    assert one.predictions_NCHW is not None
    assert one.predictions_NCHW.shape == (len(one.levels), *SHAPE) == (3, *SHAPE)
    assert not np.array_equal(one.samples_CHW, other.samples_CHW)
    second = changed_work(first, low_noise=True)
    both = run(second, partial_run_of((second,) * 2, (after(one), after(other)), CPU), "noise")
    turned = run(second, partial_run_of((second,) * 2, (after(other), after(one)), CPU), "noise")
    assert torch.equal(both, turned.flip(0))


def test_a_run_that_no_other_has_a_part_in_is_complete() -> None:
    for work in (WORK, changed_work(WORK, low_noise=True), changed_work(WORK, first_step=2)):
        part = partial_run_of((work,), (NOTHING,), CPU)
        assert (part.begin, part.end, part.done, part.latent_BCHW) == (0, STEPS - work.schedule.first_step, 0, None)
    assert changed_work(WORK, low_noise=True).span == (0, STEPS)


def interrupted(work: SampleParams, kind: str, pauses: Sequence[int], told: list[tuple[int, int]]) -> Tensor:
    """A run that stops after these steps, each time to go on in another process."""
    states: tuple[RunState, ...] = ()
    for step in (*pauses, None):

        def pauses_here(step: int | None = step) -> bool:
            return step is not None and bool(told) and told[-1][0] >= step

        part = partial_run_of((work,) * len(SEEDS), (NOTHING,) * len(SEEDS), CPU, states, pauses_here)
        latents = run(work, part, kind, told)
        if not part.paused:
            return latents
        assert told[-1] == (part.done, work.steps_run) == (step, work.steps_run)
        states = pickle.loads(pickle.dumps(run_states(part, work)))
        assert {(state.step, state.steps) for state in states} == {(part.done, work.steps_run)}
    raise AssertionError("it never ended")


@each_case("kind", KINDS)
@each_case("sampler", sorted(SAMPLERS.keys() - OWN_STEPS))
def test_a_run_that_stops_at_a_step_and_resumes_is_the_same_run(sampler: str, kind: str) -> None:
    """At each single step, and after every step; steps are counted on."""
    for changes in ({}, {"first_step": 2, "conditions": (StartCondition(), MaskCondition())}):
        work = changed_work(WORK, sampler=sampler, **changes)
        expected, count = run(work, None, kind), work.steps_run
        for pauses in (*[(step,) for step in range(1, count)], tuple(range(1, count))):
            told = list[tuple[int, int]]()
            assert torch.equal(interrupted(work, kind, pauses, told), expected), (sampler, kind, pauses)
            assert told == [(step, count) for step in range(1, count + 1)]


def test_samplers_with_steps_of_their_own_resume_where_they_paused() -> None:
    """They report in jumps, and pause between two steps of their own."""
    for sampler in OWN_STEPS:
        work = changed_work(WORK, sampler=sampler, steps=24, eta=0.5)
        seeds = SEEDS[:1] if sampler == ADAPTIVE_SAMPLER else SEEDS
        for kind in KINDS:
            expected, told = run(work, None, kind, seeds=seeds), list[tuple[int, int]]()
            states: tuple[RunState, ...] = ()
            for _ in range(30):
                part = partial_run_of((work,) * len(seeds), (NOTHING,) * len(seeds), CPU, states, lambda: True)
                found = run(work, part, kind, told, seeds=seeds)
                if not part.paused:
                    break
                states = pickle.loads(pickle.dumps(run_states(part, work)))
            assert len(told) > 3
            assert told == sorted(set(told))
            assert told[-1] == (24, 24)
            assert torch.equal(found, expected), (sampler, kind)


@each_case("schedule", sorted(SCHEDULES.keys() - {"ays_svd"}))
def test_a_run_resumes_on_every_schedule(schedule: str) -> None:
    for sampler in ("euler", "euler_ancestral", "uni_pc", "dpmpp_3m_sde", "lms"):
        work = changed_work(WORK, sampler=sampler, noise_schedule=schedule)
        expected = run(work, None, "noise")
        assert torch.equal(interrupted(work, "noise", range(1, STEPS), []), expected), (sampler, schedule)


def test_each_of_two_experts_stops_and_resumes() -> None:
    """The second one from its own state, not from the first one's."""
    for sampler in sorted(SAMPLERS.keys() - OWN_STEPS):
        whole = changed_work(WORK, sampler=sampler)
        expected = run(whole, None, "flow")
        first = changed_work(whole, switch=4)
        one = partial_run_of((first,) * 2, (NOTHING, NOTHING), CPU, (), lambda: True)
        assert one.end == 4
        run(first, one, "flow")
        assert (one.paused, one.done) == (True, 1)
        rest = partial_run_of((first,) * 2, (NOTHING, NOTHING), CPU, run_states(one, first))
        halfway = sampler_states(run(first, rest, "flow"), rest.memory)
        second = changed_work(first, low_noise=True)
        inputs = [after(each) for each in halfway]
        two = partial_run_of((second,) * 2, inputs, CPU, (), lambda: True)
        run(second, two, "flow")
        states = run_states(two, second)
        assert [(state.step, state.steps) for state in states] == [(1, 3), (1, 3)]
        assert torch.equal(run(second, partial_run_of((second,) * 2, inputs, CPU, states), "flow"), expected), sampler


def test_a_checkpoint_is_the_state_at_its_step() -> None:
    """It does not change while the run continues, and a run resumes from it."""
    for sampler in sorted(SAMPLERS.keys() - OWN_STEPS):
        work = changed_work(WORK, sampler=sampler)
        expected, saved = run(work, None, "noise"), list[tuple[RunState, ...]]()
        part = partial_run_of((work,) * 2, (NOTHING, NOTHING), CPU)

        def keep(states: Callable[[], Sequence[RunState]], saved: list[tuple[RunState, ...]] = saved) -> None:
            saved.append(tuple(states()))

        hooks = RunHooks(lambda *step: None, lambda: False, checkpoint=keep)
        assert torch.equal(run(work, part, "noise", hooks=hooks), expected)
        assert [states[0].step for states in saved] == list(range(1, STEPS))
        for states in saved:
            resumed = partial_run_of((work,) * 2, (NOTHING, NOTHING), CPU, states)
            assert torch.equal(run(work, resumed, "noise"), expected), (sampler, states[0].step)


def test_guidance_resumes_with_its_state() -> None:
    """APG accumulates differences, and an image with noise draws numbers in each step."""
    random = torch.Generator().manual_seed(3)
    pairs = [torch.randn((2, *SHAPE), generator=random) for _ in range(2 * STEPS)]
    levels = [float(STEPS - step) for step in range(STEPS)]

    def guided(breaks: Sequence[int]) -> list[Tensor]:
        memory, made = GuidanceMemory(), []
        guide = AdaptiveProjectedGuidance(3.0, (2, 4), 0, memory)
        for step, level in enumerate(levels):
            if step in breaks:
                part = PartialRun(latent_BCHW=pairs[0], guidance=memory, done=step)
                states = pickle.loads(pickle.dumps(run_states(part, WORK)))
                memory = partial_run_of((WORK,) * 2, (NOTHING, NOTHING), CPU, states).guidance
                guide = AdaptiveProjectedGuidance(3.0, (2, 4), 0, memory)
            made.append(guide.combine(Predictions(pairs[2 * step], pairs[2 * step + 1]), level))
        return made

    expected = guided(())
    for breaks in (*[(step,) for step in range(1, STEPS)], range(1, STEPS)):
        assert all(map(torch.equal, guided(breaks), expected)), breaks

    image = torch.randn((2, 4, 3, 6, 6), generator=random)
    draw = noised_image(image, SEEDS, 0.5)
    numbers = [draw()["image"] for _ in range(6)]
    memory = GuidanceMemory()
    before = noised_image(image, SEEDS, 0.5, memory)
    assert [torch.equal(before()["image"], number) for number in numbers[:2]] == [True] * 2
    later = noised_image(image, SEEDS, 0.5, GuidanceMemory(inputs_drawn=memory.inputs_drawn))
    assert [torch.equal(later()["image"], number) for number in numbers[2:]] == [True] * 4
