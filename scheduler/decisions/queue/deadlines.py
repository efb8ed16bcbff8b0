"""Earliest-deadline-first: which jobs have to go first to meet their deadline. Knows deadlines and seconds, no workers.

Jobs with the same deadline form one group. Rules
1. Work due by a deadline is the work of its group and of all earlier ones. It has to begin when the rest of it, over
   all workers, or of the longest of its jobs alone, leaves no more time than the margin. Then all of these groups are
   urgent: the earliest deadline goes first.
2. Urgent jobs stay urgent. After its deadline a job has no precedence any more (`UrgentTasks.now`).
3. Work is expected to take `SAFETY` times its estimate: runs are late for many reasons, and early for none.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import JobId, TaskId
from modelpool.scheduler.model.jobs import Job

#: factor on expected seconds. An assumption
SAFETY = 1.25
#: interval for checking a new deadline together with all others; by itself it is checked at once
LEAST_CHECK_SECONDS = 1.0
#: arrivals of jobs that are remembered
MOST_ARRIVALS = 64


@dataclass(slots=True)
class _Member:
    """A job of a group. `left` is its remaining work, by task."""

    job: Job
    left: dict[TaskId, float]


@dataclass(slots=True, eq=False)
class _Group:
    """The jobs with one deadline."""

    deadline: float
    members: dict[JobId, _Member] = field(default_factory=dict)
    #: remaining GPU-seconds of all members
    seconds: float = 0.0
    #: of the longest member alone when it was added, loads included
    longest_seconds: float = 0.0
    urgent: bool = False


class Deadlines:
    """The live jobs that have a deadline."""

    def __init__(self, margin_seconds: float) -> None:
        self._margin_seconds = margin_seconds
        self._groups: dict[float, _Group] = {}
        #: the keys of `_groups`, ascending
        self._due: list[float] = []
        #: time of the next check; infinity while nothing can become urgent
        self.next_check = math.inf
        #: when the last jobs came
        self.arrivals: deque[float] = deque(maxlen=MOST_ARRIVALS)
        #: since the start: jobs that met their deadline, and those that missed it
        self.met = 0
        self.missed = 0

    def __len__(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    def add(self, job: Job, work: dict[TaskId, float], alone_seconds: float, at: float) -> None:
        """Add a job. `work` is in GPU-seconds, by task; `alone_seconds` is the time of the job alone, loads
        included."""
        deadline = job.spec.deadline
        assert deadline is not None, f"{job.name} has no deadline"
        self.arrivals.append(at)
        group = self._groups.get(deadline)
        if group is None:
            group = self._groups[deadline] = _Group(deadline)
            insort(self._due, deadline)
        group.members[job.spec.job_id] = _Member(job, work)
        group.seconds += sum(work.values())
        group.longest_seconds = max(group.longest_seconds, alone_seconds)
        alone = deadline - self._margin_seconds - SAFETY * alone_seconds
        self.next_check = min(self.next_check, at if group.urgent else alone, at + LEAST_CHECK_SECONDS)

    def done(self, job: Job, task_id: TaskId) -> None:
        """A task of the job need not run any more."""
        group = self._groups[_deadline(job)]
        group.seconds -= group.members[job.spec.job_id].left.pop(task_id, 0.0)

    def drop(self, job: Job) -> None:
        """Remove a job that ended."""
        group = self._groups[_deadline(job)]
        group.seconds -= sum(group.members.pop(job.spec.job_id).left.values())
        if not group.members:
            del self._groups[group.deadline]
            self._due.remove(group.deadline)

    def judge(self, job: Job, is_done: bool, at: float) -> bool:
        """Count a job that ended without being cancelled; return whether it met its deadline."""
        is_met = is_done and at <= _deadline(job)
        self.met += is_met
        self.missed += not is_met
        return is_met

    def groups(self) -> Iterator[tuple[float, float, float, bool]]:
        """Yield deadline, seconds of work left, seconds of the longest job alone, whether urgent; earliest deadline
        first."""
        for deadline in self._due:
            group = self._groups[deadline]
            yield deadline, group.seconds, group.longest_seconds, group.urgent

    def check(self, at: float, workers: int) -> list[Job]:
        """Return the jobs that have become urgent, with this many workers up."""
        if at < self.next_check:
            return []
        self.next_check = math.inf
        seconds, last_urgent = 0.0, -1
        for place, deadline in enumerate(self._due):
            group = self._groups[deadline]
            seconds += group.seconds
            begin = deadline - self._margin_seconds - SAFETY * max(group.longest_seconds, seconds / max(1, workers))
            if begin <= at:
                last_urgent = place
            else:
                self.next_check = min(self.next_check, begin)
        groups = [self._groups[deadline] for deadline in self._due[: last_urgent + 1]]
        for group in groups:
            group.urgent = True
        if all(group.urgent for group in self._groups.values()):
            self.next_check = math.inf
        return [member.job for group in groups for member in group.members.values() if not member.job.urgent]


def _deadline(job: Job) -> float:
    assert job.spec.deadline is not None, f"{job.name} has no deadline"
    return job.spec.deadline
