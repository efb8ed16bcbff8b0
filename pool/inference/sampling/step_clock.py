"""The step that a run is in, for options that act during a part of the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.values.core.stage_params import SamplingSchedule


class Timed(Protocol):
    """An option with a start and an end."""

    def acts(self, step: int, steps: int) -> bool:
        """Return whether it acts in `step` of `steps`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepClock:
    """The steps of one run, numbered from 0 over the complete schedule."""

    schedule: SamplingSchedule
    part: PartialRun

    @property
    def now(self) -> int:
        """The step that is computed."""
        return self.schedule.first_step + self.part.done

    @property
    def first(self) -> int:
        """The first step of the run."""
        return self.schedule.first_step + self.part.begin

    @property
    def last(self) -> int:
        """The last step of the run."""
        schedule, end = self.schedule, self.part.end
        if end is None:
            return (schedule.steps if schedule.resumes else schedule.switch or schedule.steps) - 1
        return schedule.first_step + end - 1

    def acts(self, option: Timed) -> bool:
        """Return whether `option` acts in this step."""
        return option.acts(self.now, self.schedule.steps)
