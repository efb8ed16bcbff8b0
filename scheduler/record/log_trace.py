"""A recorded log as a workload: who asked for what and when, with the seconds that runs really took.

Decisions are left out, so that any policy can be tried on the same jobs. Knows no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import TypeAlias

from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, JobId, Stage, TaskId, TaskReport, TaskSpec, WorkerId
from modelpool.scheduler.costs.cost_model import times_prior
from modelpool.scheduler.record.event_log import Entry
from modelpool.scheduler.tables.jobs import problem_with
from modelpool.scheduler.tables.messages import CancelAsked, ComponentsKnown, RunEnded, Submitted, WorkerUp
from modelpool.scheduler.workloads.workload import Workload

#: what the length of a run depends on, besides its prior estimate
_Kind: TypeAlias = tuple[Stage, tuple[ComponentKey, ...]]


@dataclass(frozen=True, slots=True)
class LiveTrace:
    """What a log holds.

    measured   runs that ended well: what `workload` has its run seconds from
    cancelled  jobs that somebody did not want any more; they are in the workload as if that had not happened
    refused    jobs that no scheduler would take in, left out
    """

    workload: Workload
    measured: int
    cancelled: int
    refused: int


@dataclass(slots=True)
class _Seen:
    components: dict[ComponentKey, ComponentSpec] = field(default_factory=dict)
    jobs: dict[JobId, Submitted] = field(default_factory=dict)
    tasks: dict[TaskId, TaskSpec] = field(default_factory=dict)
    link_bytes_per_second: dict[WorkerId, float] = field(default_factory=dict)
    #: measured seconds over prior estimates, of runs of one task and of shares of runs of several
    alone: dict[_Kind, list[float]] = field(default_factory=dict)
    batched: dict[_Kind, list[float]] = field(default_factory=dict)
    cancelled: set[JobId] = field(default_factory=set)
    refused: int = 0


def live_trace(entries: Iterable[Entry], name: str) -> LiveTrace:
    """The jobs of a log, the first at 0 seconds. Run seconds are prior estimates times the median of what runs of the
    same stage and components took against theirs: of runs alone, where there are any."""
    seen = _Seen()
    for entry in entries:
        _take_in(seen, entry)
    start = next(iter(seen.jobs.values())).at if seen.jobs else 0.0
    ratios = {kind: median(measured) for kind, measured in {**seen.batched, **seen.alone}.items()}
    jobs = tuple(_as_measured(submitted, ratios, start) for submitted in seen.jobs.values())
    return LiveTrace(
        workload=Workload(name, tuple(seen.components.values()), jobs),
        measured=sum(map(len, (*seen.alone.values(), *seen.batched.values()))),
        cancelled=len(seen.cancelled & seen.jobs.keys()),
        refused=seen.refused,
    )


def _take_in(seen: _Seen, entry: Entry) -> None:
    match entry.event:
        case ComponentsKnown():
            seen.components.update((spec.key, spec) for spec in entry.event.components)
        case WorkerUp():
            worker = entry.event.worker
            seen.link_bytes_per_second[worker.worker_id] = worker.link_bytes_per_second
        case CancelAsked():
            seen.cancelled.add(entry.event.job_id)
        case Submitted():
            job = entry.event.job
            if job.job_id in seen.jobs:
                return
            if problem_with(job, seen.components) is not None:
                seen.refused += 1
                return
            seen.jobs[job.job_id] = entry.event
            seen.tasks.update((task.task_id, task) for task in job.tasks)
        case RunEnded():
            _measure(seen, entry.event.report)


def _measure(seen: _Seen, report: TaskReport) -> None:
    task, cost = seen.tasks.get(report.task_id), report.cost
    if task is None or report.error is not None:
        return
    measured = times_prior(task, cost, seen.link_bytes_per_second.get(report.worker_id) or inf)
    if measured is not None:
        ratios = seen.alone if cost.batched == 1 else seen.batched
        ratios.setdefault(_kind(task), []).append(measured)


def _as_measured(submitted: Submitted, ratios: dict[_Kind, float], start: float) -> Submitted:
    at, job = submitted.at - start, submitted.job
    tasks = tuple(replace(task, run_seconds=task.run_seconds * ratios.get(_kind(task), 1.0)) for task in job.tasks)
    # of a long submission later parts may come after their deadline: as late as can be, which is missed as well
    deadline = None if job.deadline is None else max(at, job.deadline - start)
    return Submitted(at, replace(job, tasks=tasks, deadline=deadline))


def _kind(task: TaskSpec) -> _Kind:
    return task.stage, tuple(use.component for use in task.uses)
