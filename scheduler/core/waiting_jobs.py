"""What the unresolved jobs of a submission wait for: groups of jobs with a common reason, and how many each has.

Pure, computed on request; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import JobId
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.scheduler.core.waiting_task import wait_of
from modelpool.scheduler.model.jobs import WAITS_FOR_VERDICT, Job, JobStatus, Task, TaskStatus

if TYPE_CHECKING:
    from modelpool.scheduler.core.state import SchedulerState

#: kinds of waiting tasks that are examined in detail; each costs an estimate for some workers
MOST_EXAMINED_KINDS = 64
#: reason of the tasks of other kinds
_NOT_EXAMINED = "waits for a worker"
#: reasons that begin so have figures of one task after a colon
_WITH_FIGURES = "waits for "
_QUEUED = "is next on a worker that runs another task"
_STOPPING = "is cancelled, and ends when its run has stopped"
_ENDING = "has its result, and is about to end"
_OTHERS = "waits for the result of another job"


@dataclass(frozen=True, slots=True)
class JobGroup(WireValue):
    """Unresolved jobs with a common reason.

    reason   why they have not ended, as a clause, without figures of a single job
    first    the first of them in the order of submission
    detail   the reason of the first one with its figures, if it has some; "" without any
    is_running  a worker runs a task of each
    """

    count: int
    reason: str
    first: JobId
    detail: str = ""
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class SubmissionWaits(WireValue):
    """The unresolved jobs of a submission in the pool, and why they have not ended; the groups that run come first."""

    submission: str
    groups: tuple[JobGroup, ...]

    @property
    def jobs(self) -> int:
        """Number of these jobs."""
        return sum(group.count for group in self.groups)


def groups_of(state: SchedulerState, job_ids: Iterable[JobId], now: float) -> tuple[JobGroup, ...]:
    """Return why those of these jobs that the core knows have not ended, the largest group first."""
    groups: dict[str, JobGroup] = {}
    known: dict[object, tuple[str, str]] = {}
    for job_id in job_ids:
        job = state.demand.jobs.get(job_id)
        if job is None:
            continue
        reason, detail, is_running = _reason(state, job, now, known)
        group = groups.get(reason)
        if group is None:
            groups[reason] = JobGroup(1, reason, job_id, detail, is_running)
        else:
            groups[reason] = replace(group, count=group.count + 1)
    return tuple(sorted(groups.values(), key=lambda group: (not group.is_running, -group.count)))


def _reason(state: SchedulerState, job: Job, now: float, known: dict[object, tuple[str, str]]) -> tuple[str, str, bool]:
    """Return why a job has not ended, the same with figures, and whether it runs. `known` keeps the reasons of kinds of
    waiting tasks."""
    if job.status is JobStatus.STOPPING:
        return _STOPPING, "", False
    if job.waits_for_verdict:
        return WAITS_FOR_VERDICT, "", False
    tasks = [state.demand.tasks[task_id] for task_id in job.demands if task_id in state.demand.tasks]
    by_status: dict[TaskStatus, Task] = {}
    for task in tasks:
        by_status.setdefault(task.status, task)
    running = by_status.get(TaskStatus.RUNNING) or by_status.get(TaskStatus.STOPPING)
    if running is not None:
        return f"{running.spec.stage.value} runs", "", True
    if (queued := by_status.get(TaskStatus.QUEUED)) is not None:
        return f"{queued.spec.stage.value} {_QUEUED}", "", False
    if (ready := by_status.get(TaskStatus.READY)) is not None:
        words, detail = _waits(state, ready, now, known)
        return f"{ready.spec.stage.value} {words}", detail and f"{ready.spec.stage.value} {detail}", False
    return (_OTHERS if tasks else _ENDING), "", False


def _waits(state: SchedulerState, task: Task, now: float, known: dict[object, tuple[str, str]]) -> tuple[str, str]:
    """Return what a task that could start waits for, in common words and with the figures of this task."""
    kind = (task.cost_class, task.held_back, task.pinned_to)
    if kind not in known:
        if len(known) >= MOST_EXAMINED_KINDS:
            return _NOT_EXAMINED, ""
        wait = wait_of(state, task, now)
        reason = _NOT_EXAMINED if wait is None else wait.reason
        common, colon, _ = reason.partition(": ")
        has_figures = colon and reason.startswith(_WITH_FIGURES)
        known[kind] = (common, reason) if has_figures else (reason, "")
    return known[kind]
