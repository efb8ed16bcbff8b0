"""Explains why no worker of the pool can run a task: it fits on none, or no machine has the files. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from modelpool.pool.values.core.errors import does_not_fit
from modelpool.pool.values.specs.spec import ComponentKey, NodeId, RunError, RunErrorKind, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.model.nodes import Nodes
from modelpool.scheduler.model.workers import Worker, WorkerState

#: machines that a message names
MOST_NAMED = 8


def why_unfit(spec: TaskSpec, largest: tuple[int, str] | None) -> RunError | None:
    """Return why the task does not fit on the worker with most memory, `largest` (bytes and name), fully streamed and
    at the finest division; None if it fits, or if that worker is unknown."""
    if largest is None:
        return None
    least_bytes = needed_bytes(spec.uses, spec.least_activation_bytes)
    capacity_bytes, worker_id = largest
    if least_bytes <= capacity_bytes:
        return None
    what = f"{spec.stage.value} task {spec.task_id} of {', '.join(use.component for use in spec.uses)}"
    divided = f"at the finest division ({spec.activation_bytes} B undivided), " if spec.divisions else ""
    passes = f"a forward pass of {spec.batch_size} images; " if spec.batch_size > 1 else ""
    detail = (
        f"{passes}activations {spec.least_activation_bytes} B, {divided}working set of the largest layer "
        f"{least_bytes - spec.least_activation_bytes} B; {worker_id} has most"
    )
    return RunError(RunErrorKind.BAD_INPUT, str(does_not_fit(what, least_bytes, capacity_bytes, detail)))


def why_too_few(spec: TaskSpec, workers: Iterable[Worker]) -> RunError | None:
    """Return why no machine of `workers` has as many equal GPUs as must share a run of the task; None if one has, or
    may have: a worker was never up."""
    least = spec.degrees[0]
    counts: dict[tuple[NodeId, str], int] = {}
    for worker in workers:
        if not worker.wanted or worker.status is WorkerState.GIVEN_UP:
            continue
        if worker.spec is None:
            return None
        if worker.spec.node:
            key = (worker.spec.node, worker.spec.device_name)
            counts[key] = counts.get(key, 0) + 1
    most = max(counts.values(), default=0)
    if most >= least:
        return None
    message = (
        f"{spec.stage.value} task {spec.task_id} must run on {least} GPUs of one machine together; the largest machine "
        f"of the pool has {most} equal ones"
    )
    return RunError(RunErrorKind.BAD_INPUT, message)


def why_unavailable(spec: TaskSpec, workers: Iterable[Worker], nodes: Nodes, at: float) -> RunError | None:
    """Return why none of `workers` can read the files of the task, with the reason of each machine; None if one may be
    able to. A worker that is not up may start on another machine, and weights on a GPU need no file, unless that is not
    the expected one there, or a run with its weights on the GPU was refused."""
    files = spec.files
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
        elif unavailable is not None and (node.refused_of(files, at) is not None or not _is_resident(spec, worker)):
            reasons[node.node] = unavailable.reason
        else:
            return None
        lacking.update(file[0] for file in files if node.unavailable.of(file) or node.differing.of(file))
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
