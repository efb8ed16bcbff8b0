"""The pool at one moment, as people and programs read it. Values only, and the way there from the core's snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pool.spec import TaskId, WorkerId
from scheduler.snapshot import Snapshot, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker.

    state           "starting", "idle", "busy" or "given_up"
    device          the GPU's name; "" while it starts
    incarnation     grows by one with each start
    resident        components with bytes on the GPU, least recently used first
    task            the stage it runs; None when it runs nothing
    trouble         why it was lost or did not start, the last time that happened; "" when it never did
    """

    id: WorkerId
    state: str
    device: str
    incarnation: int
    capacity_bytes: int
    used_bytes: int
    resident: tuple[str, ...]
    task: str | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool. Totals count from its start, workers that are gone included.

    waiting      stage -> tasks that have not started
    jobs         "live", "succeeded", "failed", "cancelled" -> jobs
    tasks_total  runs that ended; of these, `tasks_resident` found every component resident
    restarts     times that a worker was started again
    """

    workers: tuple[WorkerStatus, ...]
    waiting: Mapping[str, int]
    jobs: Mapping[str, int]
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int
    tasks_resident: int
    tasks_total: int
    restarts: int


def pool_status(snapshot: Snapshot, troubles: Mapping[WorkerId, str]) -> PoolStatus:
    """What `snapshot` says, in the words of `PoolStatus`. `troubles` are by worker."""
    stages = {task.task_id: task.stage for task in snapshot.running}
    ready, blocked = snapshot.ready, snapshot.blocked
    return PoolStatus(
        workers=tuple(_worker_status(w, stages, troubles.get(w.worker_id, "")) for w in snapshot.workers),
        waiting={stage: ready.get(stage, 0) + blocked.get(stage, 0) for stage in (*ready, *blocked)},
        jobs={"live": snapshot.jobs_live, **snapshot.resolved},
        uploaded_bytes=snapshot.uploaded_bytes,
        streamed_bytes=snapshot.streamed_bytes,
        patch_switches=snapshot.patch_switches,
        tasks_resident=snapshot.runs_resident,
        tasks_total=snapshot.runs,
        restarts=sum(max(0, w.incarnation - 1) for w in snapshot.workers),
    )


def _worker_status(worker: WorkerSnapshot, stages: Mapping[TaskId, str], trouble: str) -> WorkerStatus:
    residency = worker.residency
    return WorkerStatus(
        id=worker.worker_id,
        state=worker.status,
        device=worker.device_name,
        incarnation=worker.incarnation,
        capacity_bytes=residency.capacity_bytes if residency else 0,
        used_bytes=residency.used_bytes if residency else 0,
        resident=tuple(e.component for e in residency.entries) if residency else (),
        task=stages.get(worker.task_id) if worker.task_id else None,
        trouble=trouble,
    )
