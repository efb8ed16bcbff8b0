"""Partial runs of a sampler: the steps that each runs, and the sampler state that it passes to the next.

Two partial runs give bit for bit the result of one complete run: coefficients depend on the levels of the complete
schedule, and the state is passed on unchanged. So a run can switch its model, and the second partial run can use
another device, or another batch, than the first.

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

from modelpool.pool.core.results import FloatArray, Result, SamplerState
from modelpool.pool.core.stage_params import SampleParams

#: (noise level, the clean latent as predicted there)
Denoised: TypeAlias = tuple[float, Tensor]
#: called after each step with (steps done, total steps)
OnStep: TypeAlias = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class SamplerMemory:
    """The state of a multistep sampler between two steps. Multistep samplers write to it.

    predictions  earlier predictions, the newest first
    start_BCHW  the latent at which the last step started
    """

    predictions: list[Denoised] = field(default_factory=list)
    start_BCHW: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PartialRun:
    """The steps of a schedule that one run executes.

    begin, end   number of steps done before and after it; None for all
    memory       state before the first step, updated by the run
    latent_BCHW  the latent to resume from, with its noise; None starts from the run's initial noise
    """

    begin: int = 0
    end: int | None = None
    memory: SamplerMemory = field(default_factory=SamplerMemory)
    latent_BCHW: Tensor | None = None

    def steps(self, sigmas: Tensor) -> Iterator[tuple[int, float, float]]:
        """Yield (steps done after this one, noise level before, noise level after) for each of its steps."""
        for done, (sigma, sigma_next) in enumerate(pairwise(sigmas.tolist()), start=1):
            if self.begin < done <= self._end(sigmas):
                yield done, sigma, sigma_next

    def step_reporter(self, on_step: OnStep, sigmas: Tensor) -> Callable[[int], None]:
        """Return a callback for the steps done of the complete schedule that calls `on_step` in steps of this part."""
        count = self._end(sigmas) - self.begin
        return lambda done: on_step(done - self.begin, count)

    def _end(self, sigmas: Tensor) -> int:
        return len(sigmas) - 1 if self.end is None else self.end


def partial_run_of(
    works: Sequence[SampleParams], inputs: Sequence[Sequence[Result]], device: torch.device
) -> PartialRun | None:
    """Return the partial run of `works`, resuming from the state in its inputs; None for a complete run."""
    work = works[0]
    if not work.switch:
        return None
    begin, end = (steps - work.first_step for steps in work.span)
    if not work.resumes:
        return PartialRun(begin, end)
    found = [_state_of(read) for read in inputs]
    assert len({each.levels for each in found}) == 1, f"sampler states at different noise levels: {work}"
    latent_BCHW = _stacked([each.samples_CHW for each in found], device)
    starts = [each.start_CHW for each in found if each.start_CHW is not None]
    memory = SamplerMemory(start_BCHW=_stacked(starts, device) if starts else None)
    for place, level in enumerate(found[0].levels):
        predictions = [each.predictions_NCHW[place] for each in found if each.predictions_NCHW is not None]
        memory.predictions.append((level, _stacked(predictions, device)))
    return PartialRun(begin, end, memory, latent_BCHW)


def sampler_states(samples_BCHW: Tensor, memory: SamplerMemory) -> tuple[SamplerState, ...]:
    """Return the sampler state of each image: its latent between two steps, and the sampler's memory."""
    levels = tuple(level for level, _ in memory.predictions)
    predictions_NBCHW = (
        torch.stack([prediction_BCHW.to("cpu") for _, prediction_BCHW in memory.predictions]) if levels else None
    )
    start_BCHW = None if memory.start_BCHW is None else memory.start_BCHW.to("cpu")
    return tuple(
        SamplerState(
            _array(samples_CHW),
            levels,
            None if predictions_NBCHW is None else _array(predictions_NBCHW[:, place]),
            None if start_BCHW is None else _array(start_BCHW[place]),
        )
        for place, samples_CHW in enumerate(samples_BCHW.to("cpu"))
    )


def _state_of(read: Sequence[Result]) -> SamplerState:
    """Return the one sampler state of an input; any other number is a bug."""
    (found,) = [one for one in read if isinstance(one, SamplerState)]
    return found


def _array(values: Tensor) -> FloatArray:
    found: FloatArray = values.contiguous().numpy()
    return found


def _stacked(arrays: Sequence[FloatArray], device: torch.device) -> Tensor:
    return torch.stack([torch.from_numpy(array.copy()) for array in arrays]).to(device)
