"""Snapshot of the scheduler for users: counts, queues and residency as frozen plain values. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import ComponentKey, JobId, NodeId, Stage, TaskId, UserId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.decisions.placement.pinned_loads import PinnedLoads, PinnedSet
from modelpool.scheduler.model.jobs import JobStatus, Task, TaskStatus
from modelpool.scheduler.model.run_kinds import gpu_name
from modelpool.scheduler.model.scaling_record import ScalingWhy
from modelpool.scheduler.model.workers import WorkerState

if TYPE_CHECKING:
    from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
    from modelpool.scheduler.core.state import SchedulerState
    from modelpool.scheduler.model.workers import Worker

#: payer of a task (the user of the first job that wants it), its stage, its status
_KIND = attrgetter("payer", "cost_class.stage", "status")
#: cost class and status of a task
_CLASS = attrgetter("cost_class", "status")
#: reasons of one machine
MOST_REASONS = 8


@dataclass(frozen=True, slots=True)
class RunningTaskSnapshot:
    """A task on a worker."""

    task_id: TaskId
    stage: str
    attempt: int
    worker_id: WorkerId
    #: seconds since it was sent
    seconds: float
    stopping: bool
    #: the first of the jobs that want it; None if only cancelled ones did
    job_id: JobId | None = None
    user: UserId | None = None
    #: the workers that share its run, this one included; empty if none do
    gang: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker, in the state that the core assumes."""

    worker_id: WorkerId
    incarnation: int
    #: "starting", "idle", "busy", "given_up" or "drained"
    status: str
    #: False if it ends as soon as it is idle
    wanted: bool
    device_name: str
    #: None while the worker is not up
    residency: Residency | None
    task_id: TaskId | None
    #: runs that ended on it, over all incarnations
    runs: int
    #: of these, runs that found every component resident
    runs_resident: int
    uploaded_bytes: int
    patch_switches: int
    #: failed starts and losses since its last completed run
    failures: int
    streamed_bytes: int = 0
    #: the machine that it is on; "" if not reported
    node: str = ""
    #: full size of each resident component in bytes
    whole_bytes: tuple[int, ...] = ()
    #: number of tasks that run in a batch with `task_id`
    batch_mates: tuple[TaskId, ...] = ()
    #: why files cannot be used on its machine, at most MOST_REASONS of them
    unavailable: tuple[str, ...] = ()
    #: when its machine ends; None if that is not known to end
    drain_deadline: float | None = None
    #: the group of nodes that it was requested from; "" if it was not
    group: str = ""
    #: what an operator wants of it: "cordoned", "draining", "drained" or "restarting"; "" for nothing
    order: str = ""
    #: since when; and when its run must have ended for that, or None
    ordered_at: float | None = None
    leave_by: float | None = None
    #: the workers that share its run, in the order of their ranks; `task_id` is of the run, also on the others
    gang: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group of nodes.

    nodes           that exist or are requested
    starting        workers of it that are not up
    start_seconds   from a request to a worker, as learned
    blocked_seconds until nodes may be requested again; 0 if they may now, infinity if never
    reason          why not
    """

    name: str
    nodes: int
    min_nodes: int
    max_nodes: int
    starting: int
    start_seconds: float
    price_per_hour: float
    spot: bool
    blocked_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScalingSnapshot:
    """The groups of nodes and the money spent on them; the latest decisions with their reasons, oldest first."""

    groups: tuple[GroupSnapshot, ...]
    spent: float
    cost_per_hour: float
    decisions: tuple[ScalingWhy, ...]


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """A pinned set of components.

    replicas  workers that must have it
    holders   workers that have all of it and stay
    loading   workers that load it now
    obstacle  why there are fewer, and none loads it; "" otherwise
    """

    components: tuple[ComponentKey, ...]
    replicas: int
    holders: tuple[WorkerId, ...]
    loading: tuple[WorkerId, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler at one moment. Keys of mappings are plain strings, in a fixed order."""

    at: float
    jobs_live: int
    jobs_unverified: int
    jobs_stopping: int
    #: outcome -> jobs, since the start
    resolved: dict[str, int]
    #: stage -> tasks that could start now
    ready: dict[str, int]
    #: stage -> tasks that wait for a result
    blocked: dict[str, int]
    running: tuple[RunningTaskSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    #: totals over all workers, including those that ended
    runs: int
    runs_resident: int
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int
    #: results that the shell holds, and the part that is only kept for later jobs
    results_held: int
    results_kept: int
    results_kept_bytes: int
    #: user -> stage -> tasks that have not started; only users with waiting tasks. A task that several users want
    #: counts for the first of them
    waiting_by_user: dict[str, dict[str, int]] = field(default_factory=dict)
    #: user -> GPU-seconds used, loads included; only users with an account (`scheduler.decisions.queue.shares`)
    seconds_by_user: dict[str, float] = field(default_factory=dict)
    #: jobs with a deadline that met it, and that missed it, since the start
    deadlines_met: int = 0
    deadlines_missed: int = 0
    #: None without groups
    scaling: ScalingSnapshot | None = None
    pins: tuple[PinSnapshot, ...] = ()
    #: the machines that an operator has cordoned, and whether they are drained
    cordoned_nodes: tuple[tuple[NodeId, bool], ...] = ()
    #: expected time until the known tasks have run on the workers that are up, without loads; None without a worker
    left_seconds: float | None = None


def take_snapshot(state: SchedulerState, now: float | None = None) -> Snapshot:
    """Copy the state at `now`, or else at the last event. Later events do not change the copy."""
    at = state.at if now is None else now
    demand, totals = state.demand, state.worker_table.totals
    ready, blocked, by_user = _queues(demand.tasks.values())
    return Snapshot(
        at=at,
        jobs_live=len(demand.jobs),
        jobs_unverified=sum(job.waits_for_verdict for job in demand.jobs.values()),
        jobs_stopping=[job.status for job in demand.jobs.values()].count(JobStatus.STOPPING),
        resolved={outcome.value: count for outcome, count in demand.resolved.items()},
        ready=ready,
        blocked=blocked,
        running=tuple(_running_tasks(state, at)),
        workers=_workers(state),
        runs=totals.runs,
        runs_resident=totals.runs_resident,
        uploaded_bytes=totals.uploaded_bytes,
        streamed_bytes=totals.streamed_bytes,
        patch_switches=totals.patch_switches,
        results_held=len(demand.results.held),
        results_kept=len(demand.results.kept),
        results_kept_bytes=demand.results.kept_bytes,
        waiting_by_user=by_user,
        seconds_by_user={str(user): account.seconds for user, account in demand.fair_queue.shares.accounts.items()},
        deadlines_met=demand.fair_queue.deadlines.met,
        deadlines_missed=demand.fair_queue.deadlines.missed,
        scaling=None if state.autoscaler is None else _scaling(state, state.autoscaler, at),
        pins=tuple(_pin(state.pinned_loads, pinned, at) for pinned in state.pinned_loads.sets.values()),
        cordoned_nodes=tuple(
            (node, cordon.deadline is not None) for node, cordon in state.worker_table.cordons.nodes.items()
        ),
        left_seconds=_left_seconds(state, at),
    )


def _left_seconds(state: SchedulerState, at: float) -> float | None:
    """Run times are those on the first worker that is up; what runs counts without the time that it has run."""
    live = [worker for worker in state.worker_table.workers.values() if worker.live]
    if not live:
        return None
    name = gpu_name(live[0].spec)
    seconds = sum(
        cost_class.prior_seconds * state.costs.run_kinds.ratio(cost_class.kind, name, cost_class.size)
        for cost_class in state.costs.cost_classes()
        if cost_class.prior_seconds
    )
    for worker in live:
        if worker.task_id is not None and worker.expected_end is not None:
            started_at = state.demand.tasks[worker.task_id].started_at
            seconds -= max(0.0, min(at, worker.expected_end) - started_at)
    return max(0.0, seconds) / len(live)


def _pin(loads: PinnedLoads, pinned: PinnedSet, at: float) -> PinSnapshot:
    return PinSnapshot(
        components=pinned.components,
        replicas=pinned.replicas,
        holders=tuple(sorted(worker.worker_id for worker in loads.holders(pinned))),
        loading=tuple(sorted(worker.worker_id for worker in loads.loading(pinned))),
        obstacle=loads.obstacle(pinned, at),
    )


def _scaling(state: SchedulerState, autoscaler: Autoscaler, at: float) -> ScalingSnapshot:
    counts = autoscaler.node_counts()
    starting = Counter(w.group for w in state.worker_table.workers.values() if w.group and not w.live)
    groups = tuple(
        GroupSnapshot(
            name=name,
            nodes=counts.get(name, 0),
            min_nodes=record.group.min_nodes,
            max_nodes=record.group.max_nodes,
            starting=starting[name],
            start_seconds=record.start_seconds,
            price_per_hour=record.group.price_per_hour,
            spot=record.group.spot,
            blocked_seconds=max(0.0, record.blocked_until - at),
            reason=record.reason if record.blocked_until > at else "",
        )
        for name, record in autoscaler.groups.items()
    )
    return ScalingSnapshot(
        groups,
        autoscaler.spent,
        autoscaler.cost_per_hour,
        tuple(autoscaler.decisions),
    )


def waiting_by_model(tasks: Iterable[Task]) -> dict[str, dict[str, int]]:
    """Return the numbers of tasks that have not started, by the model of their first component, and by stage."""
    by_model: dict[str, dict[str, int]] = {}
    for (cost_class, status), count in Counter(map(_CLASS, tasks)).items():
        if status in (TaskStatus.READY, TaskStatus.BLOCKED) and cost_class.components:
            stage = cost_class.stage.value
            mine = by_model.setdefault(model_of(cost_class.components[0]), {})
            mine[stage] = mine.get(stage, 0) + count
    return by_model


def model_of(component: ComponentKey) -> str:
    """Return the name of the model or file that a component belongs to, for users."""
    return component.rsplit("@", 1)[0].rsplit("/", 1)[0]


def _queues(tasks: Iterable[Task]) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, int]]]:
    """Ready and blocked tasks by stage, and both by user. There may be very many, and the pool waits meanwhile: the
    loop runs in C functions, without Python steps per task."""
    ready = {stage.value: 0 for stage in Stage}
    blocked = dict(ready)
    by_user: dict[str, dict[str, int]] = {}
    for (user, kind, status), count in Counter(map(_KIND, tasks)).items():
        if status in (TaskStatus.READY, TaskStatus.BLOCKED):
            stage = kind.value
            (ready if status is TaskStatus.READY else blocked)[stage] += count
            mine = by_user.setdefault(user, {})
            mine[stage] = mine.get(stage, 0) + count
    return ready, blocked, by_user


def _running_tasks(state: SchedulerState, at: float) -> Iterator[RunningTaskSnapshot]:
    for worker in state.worker_table.workers.values():
        for task_id in worker.task_ids:
            yield _running(state, state.demand.tasks[task_id], worker.worker_id, at)


def _running(state: SchedulerState, task: Task, worker_id: WorkerId, at: float) -> RunningTaskSnapshot:
    job_id = next(iter(task.demand), None)
    return RunningTaskSnapshot(
        task_id=task.spec.task_id,
        stage=task.spec.stage.value,
        attempt=task.attempt,
        worker_id=worker_id,
        seconds=at - task.started_at,
        stopping=task.status is TaskStatus.STOPPING,
        job_id=job_id,
        user=None if job_id is None else state.demand.jobs[job_id].spec.user,
        gang=_gang(state.worker_table.workers[worker_id]),
    )


def _gang(worker: Worker) -> tuple[WorkerId, ...]:
    return () if worker.gang is None else worker.gang.worker_ids


def _whole_bytes(state: SchedulerState, residency: Residency | None) -> tuple[int, ...]:
    known = state.costs.components
    entries = () if residency is None else residency.entries
    return tuple(known[e.component].weight_bytes if e.component in known else e.resident_bytes for e in entries)


def _unavailable(state: SchedulerState, worker: Worker) -> tuple[str, ...]:
    node = state.costs.nodes.of(worker.spec) if state.costs.nodes.lacking and worker.live else None
    if node is None:
        return ()
    reasons = [file.reason for file in node.differing.values()]
    reasons += [file.reason for file in node.unavailable.values() if state.at < file.until]
    return tuple(dict.fromkeys(reasons))[:MOST_REASONS]


def order_of(worker: Worker) -> str:
    """Return what an operator wants of a worker, as `WorkerSnapshot` says it."""
    if worker.status is WorkerState.DRAINED:
        return "drained"
    if worker.drains:
        return "draining"
    if worker.restart_by is not None:
        return "restarting"
    return "" if worker.cordon is None else "cordoned"


def _workers(state: SchedulerState) -> tuple[WorkerSnapshot, ...]:
    return tuple(
        WorkerSnapshot(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            status=worker.status.value,
            wanted=worker.wanted,
            device_name="" if worker.spec is None else worker.spec.device_name,
            residency=worker.residency,
            task_id=worker.task_id if worker.gang is None else worker.gang.task_id,
            runs=worker.totals.runs,
            runs_resident=worker.totals.runs_resident,
            uploaded_bytes=worker.totals.uploaded_bytes,
            patch_switches=worker.totals.patch_switches,
            failures=worker.failures,
            streamed_bytes=worker.totals.streamed_bytes,
            node="" if worker.spec is None else worker.spec.node,
            whole_bytes=_whole_bytes(state, worker.residency),
            batch_mates=worker.batch_mates,
            unavailable=_unavailable(state, worker),
            drain_deadline=worker.drain_deadline,
            group=worker.group,
            order=order_of(worker),
            ordered_at=None if worker.cordon is None else worker.cordon.since,
            leave_by=worker.leave_by,
            gang=_gang(worker),
        )
        for worker in state.worker_table.workers.values()
    )
