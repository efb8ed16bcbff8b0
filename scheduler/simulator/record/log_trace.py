"""Converts an event log to a workload: the submitted jobs with their times, and the measured run seconds.

Decisions are left out, so that any policy can be tried on the same jobs. Reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import TypeAlias

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.decisions.costs.cost_model import times_prior
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import (
    CancelRequested,
    ComponentsKnown,
    RunEnded,
    RunInGang,
    StateKept,
    Submitted,
    WorkerUp,
)
from modelpool.scheduler.simulator.record.event_log import LogEntry
from modelpool.scheduler.simulator.workloads.workload import Workload

#: what the length of a run depends on, besides its prior estimate
_Kind: TypeAlias = tuple[Stage, tuple[ComponentKey, ...]]


@dataclass(frozen=True, slots=True)
class LiveTrace:
    """The content of a log.

    measured   runs that succeeded: the source of the run seconds in `workload`
    cancelled  jobs that were cancelled; they are in the workload as if they had not been
    refused    invalid jobs, left out
    """

    workload: Workload
    measured: int
    cancelled: int
    refused: int


@dataclass(slots=True)
class _Observed:
    components: dict[ComponentKey, ComponentSpec] = field(default_factory=dict)
    jobs: dict[JobId, Submitted] = field(default_factory=dict)
    tasks: dict[TaskId, TaskSpec] = field(default_factory=dict)
    link_bytes_per_second: dict[WorkerId, float] = field(default_factory=dict)
    #: measured seconds over prior estimates, of runs of single tasks and of shares of batches
    alone: dict[_Kind, list[float]] = field(default_factory=dict)
    batched: dict[_Kind, list[float]] = field(default_factory=dict)
    cancelled: set[JobId] = field(default_factory=set)
    #: task and attempt of the runs on several GPUs
    shared: set[tuple[TaskId, int]] = field(default_factory=set)
    refused: int = 0
    #: the last job of a pack that others are to follow
    followed: JobId | None = None


def live_trace(entries: Iterable[LogEntry], name: str) -> LiveTrace:
    """Return the jobs of a log, the first at 0 seconds. Run seconds are prior estimates times the median ratio of
    measured to estimated seconds for the same stage and components: of single runs, if there are any."""
    observed = _Observed()
    for entry in entries:
        _take_in(observed, entry)
    _end_pack(observed)  # the log may end within one
    start = next(iter(observed.jobs.values())).at if observed.jobs else 0.0
    ratios = {kind: median(measured) for kind, measured in {**observed.batched, **observed.alone}.items()}
    jobs = tuple(_as_measured(submitted, ratios, start) for submitted in observed.jobs.values())
    return LiveTrace(
        workload=Workload(name, tuple(observed.components.values()), jobs),
        measured=sum(map(len, (*observed.alone.values(), *observed.batched.values()))),
        cancelled=len(observed.cancelled & observed.jobs.keys()),
        refused=observed.refused,
    )


def _take_in(observed: _Observed, entry: LogEntry) -> None:
    match entry.event:
        case ComponentsKnown():
            observed.components.update((spec.key, spec) for spec in entry.event.components)
        case WorkerUp():
            worker = entry.event.worker
            observed.link_bytes_per_second[worker.worker_id] = worker.link_bytes_per_second
        case CancelRequested():
            observed.cancelled.add(entry.event.job_id)
        case Submitted():
            _submit(observed, entry.event)
        case StateKept(others_follow=False):
            _end_pack(observed)  # the last state that was found for a pack
        case RunEnded():
            _measure(observed, entry.event.report)
    for command in entry.commands:
        if isinstance(command, RunInGang):
            observed.shared.add((command.run.task_id, command.run.attempt))


def _submit(observed: _Observed, submitted: Submitted) -> None:
    """Take in a job, or leave it out. A pack then ends with the last of its jobs that are not left out."""
    job = submitted.job
    if job.job_id not in observed.jobs:
        if problem_with(job, observed.components) is None:
            observed.jobs[job.job_id] = submitted
            observed.tasks.update((task.task_id, task) for task in job.tasks)
            observed.followed = job.job_id if submitted.others_follow else None
        else:
            observed.refused += 1
    if not submitted.others_follow:
        _end_pack(observed)


def _end_pack(observed: _Observed) -> None:
    """Let nothing follow the last job."""
    if observed.followed is not None:
        observed.jobs[observed.followed] = replace(observed.jobs[observed.followed], others_follow=False)
        observed.followed = None


def _measure(observed: _Observed, report: TaskReport) -> None:
    task, cost = observed.tasks.get(report.task_id), report.cost
    if task is None or report.error is not None or (report.task_id, report.attempt) in observed.shared:
        return  # on several GPUs it takes another time
    measured = times_prior(task, cost, observed.link_bytes_per_second.get(report.worker_id) or inf)
    if measured is not None:
        ratios = observed.alone if cost.batched == 1 else observed.batched
        ratios.setdefault(_kind(task), []).append(measured)


def _as_measured(submitted: Submitted, ratios: dict[_Kind, float], start: float) -> Submitted:
    at, job = submitted.at - start, submitted.job
    tasks = tuple(replace(task, run_seconds=task.run_seconds * ratios.get(_kind(task), 1.0)) for task in job.tasks)
    # later parts of a long submission may come after their deadline: set it as late as possible, which is missed as
    # well
    deadline = None if job.deadline is None else max(at, job.deadline - start)
    return Submitted(at, replace(job, tasks=tasks, deadline=deadline), others_follow=submitted.others_follow)


def _kind(task: TaskSpec) -> _Kind:
    return task.stage, tuple(use.component for use in task.uses)
