"""What a person sees of the scheduler: counts, queues and residency as frozen plain values. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pool.residency import Residency
from pool.spec import JobId, Stage, TaskId, UserId, WorkerId
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
    #: the first of the jobs that want it; None when only cancelled ones did
    job_id: JobId | None = None
    user: UserId | None = None


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
    streamed_bytes: int = 0
    #: the machine that it is on; "" when it did not say
    node: str = ""
    #: bytes of each resident component when it is whole
    whole_bytes: tuple[int, ...] = ()
    #: tasks that go through the module together with `task_id`
    mates: tuple[TaskId, ...] = ()


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
    #: user -> stage -> tasks that have not started; only users who wait for something. A task that several want
    #: counts for the first of them
    waiting_by_user: dict[str, dict[str, int]] = field(default_factory=dict)
    #: user -> GPU-seconds that were had, loads included; only users that the accounts know (`scheduler.shares`)
    seconds_by_user: dict[str, float] = field(default_factory=dict)
    #: jobs with a deadline that were done by it, and that were not, since the start
    deadlines_met: int = 0
    deadlines_missed: int = 0


def take_snapshot(state: SchedulerState) -> Snapshot:
    """What is so now. Copies; later events do not show in it."""
    demand, totals = state.demand, state.fleet.totals
    queues = _Queues()
    running = []
    for task in demand.tasks.values():
        if task.worker_id is not None:
            running.append(_running(state, task, task.worker_id))
        else:
            queues.add(task, _user(state, task))
    return Snapshot(
        at=state.at,
        jobs_live=len(demand.jobs),
        jobs_stopping=sum(job.status is JobStatus.STOPPING for job in demand.jobs.values()),
        resolved={outcome.value: count for outcome, count in demand.resolved.items()},
        ready=queues.ready,
        blocked=queues.blocked,
        running=tuple(running),
        workers=_workers(state),
        runs=totals.runs,
        runs_resident=totals.runs_resident,
        uploaded_bytes=totals.uploaded_bytes,
        streamed_bytes=totals.streamed_bytes,
        patch_switches=totals.patch_switches,
        results_held=len(demand.results.held),
        results_kept=len(demand.results.kept),
        results_kept_bytes=demand.results.kept_bytes,
        waiting_by_user=queues.by_user,
        seconds_by_user={str(user): account.seconds for user, account in demand.turns.shares.accounts.items()},
        deadlines_met=demand.turns.deadlines.met,
        deadlines_missed=demand.turns.deadlines.missed,
    )


class _Queues:
    """Waiting tasks, counted in one pass: there may be very many."""

    def __init__(self) -> None:
        self.ready = {stage.value: 0 for stage in Stage}
        self.blocked = dict(self.ready)
        self.by_user: dict[str, dict[str, int]] = {}

    def add(self, task: Task, user: UserId | None) -> None:
        """Count a task that no worker has."""
        stage = task.spec.stage.value
        counts = self.ready if task.status is TaskStatus.READY else self.blocked
        counts[stage] += 1
        if user is not None:
            mine = self.by_user.setdefault(user, {})
            mine[stage] = mine.get(stage, 0) + 1


def _running(state: SchedulerState, task: Task, worker_id: WorkerId) -> RunningTask:
    return RunningTask(
        task_id=task.spec.task_id,
        stage=task.spec.stage.value,
        attempt=task.attempt,
        worker_id=worker_id,
        seconds=state.at - task.started_at,
        stopping=task.status is TaskStatus.STOPPING,
        job_id=next(iter(task.demand), None),
        user=_user(state, task),
    )


def _user(state: SchedulerState, task: Task) -> UserId | None:
    """Who wants the task; the first of them."""
    job_id = next(iter(task.demand), None)
    return None if job_id is None else state.demand.jobs[job_id].spec.user


def _whole_bytes(state: SchedulerState, residency: Residency | None) -> tuple[int, ...]:
    known = state.costs.components
    entries = () if residency is None else residency.entries
    return tuple(known[e.component].weight_bytes if e.component in known else e.resident_bytes for e in entries)


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
            streamed_bytes=worker.totals.streamed_bytes,
            node="" if worker.spec is None else worker.spec.node,
            whole_bytes=_whole_bytes(state, worker.residency),
            mates=worker.mates,
        )
        for worker in state.fleet.workers.values()
    )
