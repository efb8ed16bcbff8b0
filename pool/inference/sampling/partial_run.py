"""Partial runs of a sampler: the steps that each runs, and the state that it passes to the next.

Two partial runs give bit for bit the result of one complete run: coefficients depend on the levels of the complete
schedule, and the state is passed on unchanged. So a run can switch its model, or stop between two steps and resume
later, and the second partial run can use another device, or another batch, than the first.

Shape legend: B batch, N predictions, C latent channels, H W latent height and width; videos have T latent frames before
H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.values.core.results import FloatArray, GuidanceState, RunState, SamplerState
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.core.task_inputs import SAMPLER_STATE, TaskInputs

#: (noise level, the clean latent as predicted there)
Denoised: TypeAlias = tuple[float, Tensor]
#: called after each step with (steps done, total steps)
OnStep: TypeAlias = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class SamplerMemory:
    """The state of a multistep sampler between two steps. Multistep samplers write to it.

    predictions  earlier predictions or slopes with their levels, the newest first
    start_BCHW  the latent at which the last step started
    numbers     numbers of a sampler that chooses its steps: time and length of the next step
    draws       how often noise was drawn after the initial one
    """

    predictions: list[Denoised] = field(default_factory=list)
    start_BCHW: Tensor | None = None
    numbers: tuple[float, ...] = ()
    draws: int = 0


@dataclass(slots=True)
class GuidanceMemory:
    """The state of the guidance between two steps. Guidance functions write to it; it has the fields of
    `GuidanceState`."""

    levels: int = 0
    level: float | None = None
    differences_BCHW: Tensor | None = None
    before_BCHW: Tensor | None = None
    inputs_drawn: int = 0


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class PartialRun:
    """The steps of a schedule that one run executes, and its state between two steps, which the run updates.

    begin, end    number of steps done before and after it; None for all
    memory        state of the sampler
    latent_BCHW   the latent after `done` steps, with its noise; None starts from the run's initial noise
    guidance      state of the guidance
    done          steps done: `begin`, or more if it resumes after an interruption
    should_pause  asked between two steps: True ends the run there
    paused        it ended so
    """

    begin: int = 0
    end: int | None = None
    memory: SamplerMemory = field(default_factory=SamplerMemory)
    latent_BCHW: Tensor | None = None
    guidance: GuidanceMemory = field(default_factory=GuidanceMemory)
    done: int = -1
    should_pause: Callable[[], bool] = _never
    paused: bool = False

    def __post_init__(self) -> None:
        self.done = max(self.done, self.begin)

    def steps(self, sigmas: Tensor) -> Iterator[tuple[int, float, float]]:
        """Yield (steps done after this one, noise level before, noise level after) for each of its steps, until it
        should pause."""
        first = self.done + 1
        for done, (sigma, sigma_next) in enumerate(pairwise(sigmas.tolist()), start=1):
            if first <= done <= self._end(sigmas):
                if done > first and self.pauses():
                    return
                yield done, sigma, sigma_next

    def spans(self, ends: Sequence[int]) -> Iterator[int]:
        """Yield the place of each span of steps that is not done, until the run should pause; `ends`: steps done of the
        complete schedule after each span. For samplers that place their own steps, which two experts cannot share."""
        assert (self.begin, self.end or ends[-1]) == (0, ends[-1]), "a part of a run has steps of its own"
        first = True
        for place, end in enumerate(ends):
            if end > self.done:
                if not first and self.pauses():
                    return
                first = False
                yield place

    def pauses(self) -> bool:
        """Return whether the run pauses here, and note it."""
        self.paused = self.should_pause()
        return self.paused

    def step_reporter(self, on_step: OnStep, sigmas: Tensor) -> Callable[[int, Tensor], None]:
        """Return a callback for the steps done of the complete schedule and the latent after them: it notes both, and
        calls `on_step` with steps of this part, including those before an interruption."""
        count = self._end(sigmas) - self.begin

        def report(done: int, latent_BCHW: Tensor) -> None:
            self.done, self.latent_BCHW = done, latent_BCHW
            on_step(done - self.begin, count)

        return report

    def forget(self) -> None:
        """Drop the tensors of a run that failed: a traceback keeps the closures of its functions, and so this."""
        self.latent_BCHW, self.memory, self.guidance = None, SamplerMemory(), GuidanceMemory()

    def _end(self, sigmas: Tensor) -> int:
        return len(sigmas) - 1 if self.end is None else self.end


def partial_run_of(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    device: torch.device,
    resumed: Sequence[RunState] = (),
    should_pause: Callable[[], bool] = _never,
) -> PartialRun:
    """Return the run of `works`: from the states in `resumed`, from the other expert's in its inputs, or from
    the beginning."""
    work = works[0]
    begin, end = (steps - work.schedule.first_step for steps in work.span)
    part = PartialRun(begin, end, should_pause=should_pause)
    if resumed:
        assert len({state.step for state in resumed}) == 1, f"run states at different steps: {work}"
        part.done = begin + resumed[0].step
        part.guidance = _guidance_memory([state.guidance for state in resumed], device)
        found = [state.sampler for state in resumed]
    elif work.schedule.resumes:
        found = [read.read(SAMPLER_STATE, SamplerState) for read in inputs]
    else:
        return part
    assert len({each.levels for each in found}) == 1, f"sampler states at different noise levels: {work}"
    part.latent_BCHW = _stacked([each.samples_CHW for each in found], device)
    assert len({(each.numbers, each.draws) for each in found}) == 1, f"sampler states of different runs: {work}"
    part.memory.start_BCHW = _stacked_if_any([each.start_CHW for each in found], device)
    part.memory.numbers, part.memory.draws = found[0].numbers, found[0].draws
    for place, level in enumerate(found[0].levels):
        predictions = [each.predictions_NCHW[place] for each in found if each.predictions_NCHW is not None]
        part.memory.predictions.append((level, _stacked(predictions, device)))
    return part


def run_states(part: PartialRun, work: SampleParams) -> tuple[RunState, ...]:
    """Return the state of each image of a run of `work` after at least one step."""
    assert part.latent_BCHW is not None, f"a run without a step has no state: {work}"
    found, guidance = sampler_states(part.latent_BCHW, part.memory), part.guidance
    differences = _on_host(guidance.differences_BCHW)
    before = _on_host(guidance.before_BCHW)
    return tuple(
        RunState(
            part.done - part.begin,
            work.steps_run,
            state,
            GuidanceState(
                guidance.levels,
                guidance.level,
                None if differences is None else _array(differences[place]),
                None if before is None else _array(before[place]),
                guidance.inputs_drawn,
            ),
        )
        for place, state in enumerate(found)
    )


def _guidance_memory(states: Sequence[GuidanceState], device: torch.device) -> GuidanceMemory:
    first = states[0]
    return GuidanceMemory(
        first.levels,
        first.level,
        _stacked_if_any([state.differences_CHW for state in states], device),
        _stacked_if_any([state.before_CHW for state in states], device),
        first.inputs_drawn,
    )


def sampler_states(samples_BCHW: Tensor, memory: SamplerMemory) -> tuple[SamplerState, ...]:
    """Return the sampler state of each image: its latent between two steps, and the sampler's memory."""
    levels = tuple(level for level, _ in memory.predictions)
    predictions_NBCHW = (
        torch.stack([prediction_BCHW.to("cpu") for _, prediction_BCHW in memory.predictions]) if levels else None
    )
    start_BCHW = _on_host(memory.start_BCHW)
    return tuple(
        SamplerState(
            _array(samples_CHW),
            levels,
            None if predictions_NBCHW is None else _array(predictions_NBCHW[:, place]),
            None if start_BCHW is None else _array(start_BCHW[place]),
            memory.numbers,
            memory.draws,
        )
        for place, samples_CHW in enumerate(samples_BCHW.to("cpu"))
    )


def _array(values: Tensor) -> FloatArray:
    # a copy: on the CPU, tensors of a run that continues after a checkpoint would be shared with it
    found: FloatArray = values.contiguous().numpy().copy()
    return found


def _on_host(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to("cpu")


def _stacked_if_any(arrays: Sequence[FloatArray | None], device: torch.device) -> Tensor | None:
    """Stack the arrays; None if there are none."""
    found = [array for array in arrays if array is not None]
    return _stacked(found, device) if found else None


def _stacked(arrays: Sequence[FloatArray], device: torch.device) -> Tensor:
    return torch.stack([torch.from_numpy(array.copy()) for array in arrays]).to(device)
