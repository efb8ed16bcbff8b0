"""A workload: components and the jobs that use them, in time; the input of a simulation and the content of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.spec import ComponentSpec
from modelpool.scheduler.model.messages import Submitted


@dataclass(frozen=True, slots=True)
class Workload:
    """Raises UnusableField unless the jobs are in order of time, from 0 on, no job or component has two entries, and
    the last job is the last one of its pack.

    Whether jobs are well formed and name existing components is checked where they are submitted
    (`scheduler.model.jobs.problem_with`), as for jobs of users.
    """

    name: str
    components: tuple[ComponentSpec, ...]
    jobs: tuple[Submitted, ...]

    def __post_init__(self) -> None:
        self._refuse_repeats("components", (spec.key for spec in self.components))
        self._refuse_repeats("jobs", (submitted.job.job_id for submitted in self.jobs))
        latest = 0.0
        for submitted in self.jobs:
            if not (isfinite(submitted.at) and submitted.at >= latest):
                where = f"{self.name}: at of {submitted.job.job_id}"
                raise unusable_field(where, submitted.at, f"a time from {latest} on: jobs are in order")
            latest = submitted.at
        if self.jobs and self.jobs[-1].others_follow:
            where = f"{self.name}: others_follow of {self.jobs[-1].job.job_id}"
            raise unusable_field(where, True, "none for the last job, behind which no other one comes")

    def _refuse_repeats(self, field: str, names: Iterable[str]) -> None:
        seen = set()
        for name in names:
            if name in seen:
                raise unusable_field(f"{self.name}: {field}", name, "each name once")
            seen.add(name)

    @property
    def seconds(self) -> float:
        """Time of the last job; 0 without jobs."""
        return self.jobs[-1].at if self.jobs else 0.0
