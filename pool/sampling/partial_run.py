"""A run of a sampler in parts, one after the other: which steps each makes, and what it remembers of those before.

Two parts make, bit for bit, what one run of all steps makes: coefficients depend on the levels of the whole schedule,
and what is handed on is the state as it is. So a run can change its model on the way, and the second part may be made
on another device, or beside other images, than the first.

Shape legend: B batch, N guesses, C latent channels, H W latent height and width; videos have T cells of time before H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.core.results import FloatArray, Halfway, Result
from modelpool.pool.core.stage_params import SampleWork

#: (noise level, the clean latent as guessed there)
Guess: TypeAlias = tuple[float, Tensor]
#: called after each step with (steps done, steps in all)
OnStep: TypeAlias = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class Memory:
    """What a sampler remembers from one step to the next. Samplers that look back write to it.

    guesses     the newest first
    start_BCHW  where the last step began
    """

    guesses: list[Guess] = field(default_factory=list)
    start_BCHW: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The steps of a schedule that one run makes.

    begin, end   steps done before it and after; None is all
    memory       of the steps before, and after the run of these too
    latent_BCHW  what it begins with, as noisy as that is; None begins with the run's first noise
    """

    begin: int = 0
    end: int | None = None
    memory: Memory = field(default_factory=Memory)
    latent_BCHW: Tensor | None = None

    def steps(self, sigmas: Tensor) -> Iterator[tuple[int, float, float]]:
        """(steps done after this one, noise level before, noise level after) of each of its steps."""
        for done, (sigma, sigma_next) in enumerate(pairwise(sigmas.tolist()), start=1):
            if self.begin < done <= self._end(sigmas):
                yield done, sigma, sigma_next

    def telling(self, on_step: OnStep, sigmas: Tensor) -> Callable[[int], None]:
        """What is called with the steps done of the schedule: `on_step`, in steps of this part."""
        count = self._end(sigmas) - self.begin
        return lambda done: on_step(done - self.begin, count)

    def _end(self, sigmas: Tensor) -> int:
        return len(sigmas) - 1 if self.end is None else self.end


def part_of(works: Sequence[SampleWork], inputs: Sequence[Sequence[Result]], device: torch.device) -> Part | None:
    """The part of a schedule that a run of `works` makes, with what was handed on to it; None for all of one that no
    other run has a part in."""
    work = works[0]
    if not work.switch:
        return None
    begin, end = (steps - work.first_step for steps in work.span)
    if not work.resumes:
        return Part(begin, end)
    found = [_halfway(read) for read in inputs]
    assert len({each.levels for each in found}) == 1, f"runs that were halfway at different places: {work}"
    latent_BCHW = _stacked([each.samples_CHW for each in found], device)
    starts = [each.start_CHW for each in found if each.start_CHW is not None]
    memory = Memory(start_BCHW=_stacked(starts, device) if starts else None)
    for place, level in enumerate(found[0].levels):
        guesses = [each.guesses_NCHW[place] for each in found if each.guesses_NCHW is not None]
        memory.guesses.append((level, _stacked(guesses, device)))
    return Part(begin, end, memory, latent_BCHW)


def handed_on(samples_BCHW: Tensor, memory: Memory) -> tuple[Halfway, ...]:
    """Latents between two steps, with what a sampler remembers, one image's each."""
    levels = tuple(level for level, _ in memory.guesses)
    guesses_NBCHW = torch.stack([guess_BCHW.to("cpu") for _, guess_BCHW in memory.guesses]) if levels else None
    start_BCHW = None if memory.start_BCHW is None else memory.start_BCHW.to("cpu")
    return tuple(
        Halfway(
            _array(samples_CHW),
            levels,
            None if guesses_NBCHW is None else _array(guesses_NBCHW[:, place]),
            None if start_BCHW is None else _array(start_BCHW[place]),
        )
        for place, samples_CHW in enumerate(samples_BCHW.to("cpu"))
    )


def _halfway(read: Sequence[Result]) -> Halfway:
    """The one that a run goes on from; another number of them is our mistake."""
    (found,) = [one for one in read if isinstance(one, Halfway)]
    return found


def _array(values: Tensor) -> FloatArray:
    found: FloatArray = values.contiguous().numpy()
    return found


def _stacked(arrays: Sequence[FloatArray], device: torch.device) -> Tensor:
    return torch.stack([torch.from_numpy(array.copy()) for array in arrays]).to(device)
