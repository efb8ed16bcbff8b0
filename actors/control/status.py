"""Converts a snapshot of the core to the state of a pool for users and programs (`status_values`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from modelpool.actors.control.cluster_facts import GpuUse, short_name, waiting_text
from modelpool.actors.control.status_values import FailedJob as FailedJob
from modelpool.actors.control.status_values import NodeCosts as NodeCosts
from modelpool.actors.control.status_values import NodeGroupStatus as NodeGroupStatus
from modelpool.actors.control.status_values import PinnedModel as PinnedModel
from modelpool.actors.control.status_values import PoolStatus as PoolStatus
from modelpool.actors.control.status_values import ResidentPart as ResidentPart
from modelpool.actors.control.status_values import RunStatus as RunStatus
from modelpool.actors.control.status_values import SubmissionStatus as SubmissionStatus
from modelpool.actors.control.status_values import WorkerStatus as WorkerStatus
from modelpool.actors.worker.wire.messages import StepDone
from modelpool.pool.values.specs.spec import NO_NODE, UNPATCHED, JobId, NodeId, Stage, TaskId, UserId, WorkerId
from modelpool.scheduler.core.snapshot import RunningTaskSnapshot, ScalingSnapshot, Snapshot, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Facts about the cluster that the core does not need.

    pool        the pool's name
    controller  the node of the controller
    placed      the nodes of workers with a process that has started, by id and incarnation
    names       display names of nodes
    use         the use of GPUs; None if unknown, or if no worker waits
    """

    pool: str = ""
    controller: NodeId = NO_NODE
    placed: Mapping[tuple[WorkerId, int], NodeId] = field(default_factory=dict)
    names: Mapping[NodeId, str] = field(default_factory=dict)
    use: GpuUse | None = None


def pool_status(
    snapshot: Snapshot,
    troubles: Mapping[WorkerId, str],
    steps: Iterable[StepDone] = (),
    seconds: float = 0.0,
    record: str = "",
    whereabouts: Whereabouts | None = None,
    silent: Mapping[WorkerId, float] = MappingProxyType({}),
    asked: Mapping[JobId, tuple[str, str]] = MappingProxyType({}),
) -> PoolStatus:
    """Convert `snapshot`. `troubles` are by worker, `steps` are of the active runs, `silent` are the seconds for which
    workers have not answered, `asked` are model and prompt of the running jobs that have a request."""
    where = whereabouts or Whereabouts()
    waiting = sum(_waits(worker, where) for worker in snapshot.workers)
    waiting_for = waiting_text(waiting, where.use, where.pool) if waiting and where.use is not None else ""
    done = {step.task_id: step for step in steps}
    runs = {task.task_id: _run_status(task, done.get(task.task_id), asked) for task in snapshot.running}
    ready, blocked = snapshot.ready, snapshot.blocked
    return PoolStatus(
        workers=tuple(
            _worker_status(w, runs, troubles.get(w.worker_id, ""), snapshot.at, where, silent.get(w.worker_id, 0.0))
            for w in snapshot.workers
        ),
        waiting={stage: ready.get(stage, 0) + blocked.get(stage, 0) for stage in (*ready, *blocked)},
        jobs={"live": snapshot.jobs_live, **snapshot.resolved},
        jobs_unverified=snapshot.jobs_unverified,
        uploaded_bytes=snapshot.uploaded_bytes,
        streamed_bytes=snapshot.streamed_bytes,
        patch_switches=snapshot.patch_switches,
        tasks_resident=snapshot.runs_resident,
        tasks_total=snapshot.runs,
        restarts=sum(max(0, w.incarnation - 1) for w in snapshot.workers),
        seconds=seconds,
        waiting_by_user=snapshot.waiting_by_user,
        record=record,
        seconds_by_user=snapshot.seconds_by_user,
        deadlines_met=snapshot.deadlines_met,
        deadlines_missed=snapshot.deadlines_missed,
        controller=short_name(where.controller, where.names),
        nodes={w.node: short_name(NodeId(w.node), where.names) for w in snapshot.workers if w.node},
        waiting_for=waiting_for,
        left_seconds=snapshot.left_seconds,
        cordoned_nodes={
            short_name(node, where.names): "drained" if is_drained else "cordoned"
            for node, is_drained in snapshot.cordoned_nodes
        },
        scaling=None if snapshot.scaling is None else _node_costs(snapshot.scaling),
    )


def _node_costs(scaling: ScalingSnapshot) -> NodeCosts:
    return NodeCosts(
        groups=tuple(
            NodeGroupStatus(
                group.name, group.nodes, group.max_nodes, group.starting, group.price_per_hour, group.reason
            )
            for group in scaling.groups
        ),
        spent=scaling.spent,
        per_hour=scaling.cost_per_hour,
        latest_decision=scaling.decisions[-1].words if scaling.decisions else "",
    )


def with_parked(status: PoolStatus, waiting: Mapping[UserId, Mapping[Stage, int]], jobs: int) -> PoolStatus:
    """Return `status` with jobs that the core does not know yet, and their tasks by user and stage."""
    if not jobs:
        return status
    total, by_user = Counter(status.waiting), waiting_with_parked(status.waiting_by_user, waiting)
    for tasks in waiting.values():
        total.update({stage.value: count for stage, count in tasks.items()})
    live = status.jobs["live"] + jobs
    left = status.left_seconds
    if left is not None:  # parked tasks take as long as those in the core
        left *= sum(total.values()) / max(1, sum(status.waiting.values()))
    return replace(
        status, waiting=dict(total), waiting_by_user=by_user, jobs={**status.jobs, "live": live}, left_seconds=left
    )


def waiting_with_parked(
    by_user: Mapping[str, Mapping[str, int]], parked: Mapping[UserId, Mapping[Stage, int]]
) -> dict[str, dict[str, int]]:
    """Return the waiting tasks by user and stage, with tasks of parked jobs."""
    sums = {str(user): Counter(tasks) for user, tasks in by_user.items()}
    for user, tasks in parked.items():
        sums.setdefault(str(user), Counter()).update({stage.value: count for stage, count in tasks.items()})
    return {user: dict(tasks) for user, tasks in sums.items()}


def _waits(worker: WorkerSnapshot, where: Whereabouts) -> bool:
    """Whether the worker waits for resources: its process has not started anywhere."""
    return worker.status == "starting" and (worker.worker_id, worker.incarnation) not in where.placed


def _not_up(worker: WorkerSnapshot, trouble: str, where: Whereabouts) -> str:
    """Explain why a worker does not run tasks; "" if it does."""
    node = where.placed.get((worker.worker_id, worker.incarnation))
    if worker.status == "given_up":
        return f"refused{_on(node, where)}: {trouble}" if trouble else f"refused{_on(node, where)}"
    if worker.status != "starting":  # one that is drained has an order, which says so
        return ""
    last = where.placed.get((worker.worker_id, worker.incarnation - 1))
    before = f"; before{_on(last, where)}: {trouble}" if trouble else ""
    if node is not None:
        return f"starting on {short_name(node, where.names)}{before}"
    if where.use is not None and where.use.free < 1:
        return f"pending: no node with a free GPU{before}"
    if trouble:
        return f"starts again{before}"
    return "starting"


def _run_status(task: RunningTaskSnapshot, step: StepDone | None, asked: Mapping[JobId, tuple[str, str]]) -> RunStatus:
    model, prompt = asked.get(task.job_id, ("", "")) if task.job_id else ("", "")
    return RunStatus(
        job_id=task.job_id or "",
        user=task.user or "",
        stage=task.stage,
        attempt=task.attempt,
        step=step.step if step else 0,
        steps=step.steps if step else 0,
        seconds=task.seconds,
        stopping=task.stopping,
        model=model,
        prompt=prompt,
    )


def _on(node: NodeId | None, where: Whereabouts) -> str:
    name = "" if node is None else short_name(node, where.names)
    return f" on {name}" if name else ""


def _worker_status(
    worker: WorkerSnapshot,
    runs: Mapping[TaskId, RunStatus],
    trouble: str,
    at: float,
    where: Whereabouts,
    silent_seconds: float,
) -> WorkerStatus:
    residency = worker.residency
    entries = residency.entries if residency else ()
    run = runs.get(worker.task_id) if worker.task_id else None
    if run is not None and worker.batch_mates:
        run = replace(run, mates=len(worker.batch_mates))
    if run is not None and worker.gang:
        run = replace(run, gpus=len(worker.gang))
    return WorkerStatus(
        id=worker.worker_id,
        state=worker.status,
        device=worker.device_name,
        incarnation=worker.incarnation,
        capacity_bytes=residency.capacity_bytes if residency else 0,
        used_bytes=residency.used_bytes if residency else 0,
        resident=tuple(e.component for e in entries),
        task=run.stage if run else None,
        trouble=trouble,
        node=worker.node,
        node_name=short_name(NodeId(worker.node), where.names),
        not_up=_not_up(worker, trouble, where),
        parts=tuple(
            ResidentPart(e.component, e.resident_bytes, whole_bytes, e.patch_digest != UNPATCHED)
            for e, whole_bytes in zip(entries, worker.whole_bytes, strict=True)
        ),
        run=run,
        runs=worker.runs,
        runs_resident=worker.runs_resident,
        uploaded_bytes=worker.uploaded_bytes,
        streamed_bytes=worker.streamed_bytes,
        unavailable=worker.unavailable,
        leaves_in=None if worker.drain_deadline is None else max(0.0, worker.drain_deadline - at),
        silent_seconds=silent_seconds,
        order=worker.order,
        order_seconds=None if worker.ordered_at is None else max(0.0, at - worker.ordered_at),
        order_left=None if worker.leave_by is None else max(0.0, worker.leave_by - at),
    )
