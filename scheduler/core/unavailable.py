"""Explains why no machine of the pool has the files that a task reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from modelpool.pool.values.specs.spec import ComponentKey, NodeId, RunError, RunErrorKind, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.model.nodes import Nodes
from modelpool.scheduler.model.workers import Worker, WorkerState

#: machines that a message names
MOST_NAMED = 8


def why_unavailable(spec: TaskSpec, workers: Iterable[Worker], nodes: Nodes, at: float) -> RunError | None:
    """Return why none of `workers` can read the files of the task, with the reason of each machine; None if one may be
    able to. A worker that is not up may start on another machine, and weights on a GPU need no file, unless that is not
    the expected one there."""
    files = tuple(dict.fromkeys(key for use in spec.uses for key in (use.component, *use.adapters)))
    least_bytes = needed_bytes(spec.uses, spec.least_activation_bytes)
    reasons: dict[NodeId, str] = {}
    lacking: set[ComponentKey] = set()
    for worker in workers:
        if worker.status is WorkerState.GIVEN_UP or (worker.live and (worker.capacity_bytes or 0) < least_bytes):
            continue
        node = nodes.of(worker.spec) if worker.live else None
        if node is None:
            return None
        differing, unavailable = node.differing_of(files), node.unavailable_of(files, at)
        if differing is not None:
            reasons[node.node] = differing.reason
        elif unavailable is not None and not _is_resident(spec, worker):
            reasons[node.node] = unavailable.reason
        else:
            return None
        lacking.update(key for key in files if key in node.unavailable or key in node.differing)
    if not reasons:
        return None
    named = "; ".join(f"{node}: {reason}" for node, reason in list(reasons.items())[:MOST_NAMED])
    more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
    message = (
        f"{spec.stage.value} task {spec.task_id}: no node of the pool has the files of {', '.join(sorted(lacking))} "
        f"({named}{more}). Copy them to a node, under the same path; then submit again"
    )
    return RunError(RunErrorKind.FILE_UNAVAILABLE, message, components=tuple(sorted(lacking)))


def _is_resident(spec: TaskSpec, worker: Worker) -> bool:
    """Whether the worker has all weights of the task with their patches on its GPU, at least in part."""
    entries = worker.entries
    return bool(spec.uses) and all(
        use.component in entries and entries[use.component].patch_digest == use.patch_digest for use in spec.uses
    )
