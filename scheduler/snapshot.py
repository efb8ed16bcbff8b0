"""What a person sees of the scheduler: counts, queues and residency as frozen plain values. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pool.residency import Residency
from pool.spec import Stage, TaskId, WorkerId
from scheduler.jobs import JobStatus, Task, TaskStatus

if TYPE_CHECKING:
    from scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task on a worker."""

    task_id: TaskId
    stage: str
    attempt: int
    worker_id: WorkerId
    #: seconds since it was sent
    seconds: float
    stopping: bool


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker, as the core believes it to be."""

    worker_id: WorkerId
    incarnation: int
    #: "starting", "idle", "busy" or "given_up"
    status: str
    #: False when it ends as soon as it is idle
    wanted: bool
    device_name: str
    #: None while the worker is not up
    residency: Residency | None
    task_id: TaskId | None
    #: runs that ended on it, all incarnations together
    runs: int
    #: of these, runs that found every component resident
    runs_resident: int
    uploaded_bytes: int
    patch_switches: int
    #: starts that failed and losses since its last completed run
    failures: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler at one moment. Maps are from plain words, in a fixed order."""

    at: float
    jobs_live: int
    jobs_stopping: int
    #: outcome -> jobs, since the start
    resolved: dict[str, int]
    #: stage -> tasks that could start now
    ready: dict[str, int]
    #: stage -> tasks that wait for a result
    blocked: dict[str, int]
    running: tuple[RunningTask, ...]
    workers: tuple[WorkerSnapshot, ...]
    #: totals over all workers, those that are gone included
    runs: int
    runs_resident: int
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int
    #: results that the shell holds, and of these the ones kept for later jobs only
    results_held: int
    results_kept: int
    results_kept_bytes: int


def take_snapshot(state: SchedulerState) -> Snapshot:
    """What is so now. Copies; later events do not show in it."""
    demand, totals = state.demand, state.fleet.totals
    running = tuple(
        RunningTask(
            task_id=task.spec.task_id,
            stage=task.spec.stage.value,
            attempt=task.attempt,
            worker_id=task.worker_id,
            seconds=state.at - task.started_at,
            stopping=task.status is TaskStatus.STOPPING,
        )
        for task in demand.tasks.values()
        if task.worker_id is not None
    )
    return Snapshot(
        at=state.at,
        jobs_live=len(demand.jobs),
        jobs_stopping=sum(job.status is JobStatus.STOPPING for job in demand.jobs.values()),
        resolved={outcome.value: count for outcome, count in demand.resolved.items()},
        ready=_by_stage(t for t in demand.tasks.values() if t.status is TaskStatus.READY),
        blocked=_by_stage(t for t in demand.tasks.values() if t.status is TaskStatus.BLOCKED),
        running=running,
        workers=_workers(state),
        runs=totals.runs,
        runs_resident=totals.runs_resident,
        uploaded_bytes=totals.uploaded_bytes,
        streamed_bytes=totals.streamed_bytes,
        patch_switches=totals.patch_switches,
        results_held=len(demand.results.held),
        results_kept=len(demand.results.kept),
        results_kept_bytes=demand.results.kept_bytes,
    )


def _by_stage(tasks: Iterable[Task]) -> dict[str, int]:
    counts = {stage.value: 0 for stage in Stage}
    for task in tasks:
        counts[task.spec.stage.value] += 1
    return counts


def _workers(state: SchedulerState) -> tuple[WorkerSnapshot, ...]:
    return tuple(
        WorkerSnapshot(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            status=worker.status.value,
            wanted=worker.wanted,
            device_name="" if worker.spec is None else worker.spec.device_name,
            residency=worker.residency,
            task_id=worker.task_id,
            runs=worker.totals.runs,
            runs_resident=worker.totals.runs_resident,
            uploaded_bytes=worker.totals.uploaded_bytes,
            patch_switches=worker.totals.patch_switches,
            failures=worker.failures,
        )
        for worker in state.fleet.workers.values()
    )
