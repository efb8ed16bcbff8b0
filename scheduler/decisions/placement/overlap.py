"""Computes which weights of one task a worker can preload during a run of another, by the state that the core assumes.

Pure functions over `pool.weights.plan.preload_plan`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey
from modelpool.pool.weights.plan.preload_plan import MARGIN_PART, PreloadPlan, RunningLease
from modelpool.pool.weights.plan.preload_plan import plan_preload as plan_preload_moves
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.backlog import Backlog
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker

#: holders of a component that are considered
MOST_HOLDERS = 8


def held_during_run(
    worker: Worker, cost_class: CostClass, members: int, kept: Iterable[ComponentKey] = ()
) -> RunningLease:
    """The memory that a run of `members` tasks of this cost class holds, with components that must stay as well."""
    run_bytes = cost_class.mode(worker.capacity_bytes or 0).activation_bytes * members
    return RunningLease(frozenset((*cost_class.components, *kept)), run_bytes + cost_class.scratch_bytes)


def plan_preload(
    costs: Costs, worker: Worker, held: RunningLease, cost_class: CostClass, hints: EvictionHints = NO_HINTS
) -> PreloadPlan:
    """The transfers of a preload for a task of this cost class during the run that holds this."""
    now = worker.residency
    assert now is not None, f"{worker.name} is not up"
    working_bytes = cost_class.mode(now.capacity_bytes).activation_bytes
    return plan_preload_moves(now, held, cost_class.uses, costs.components, working_bytes, hints)


def is_load_available(costs: Costs, worker: Worker, cost_class: CostClass) -> bool:
    """Whether it runs undivided there, and all that is missing is in host memory."""
    load, node = costs.load_estimate(cost_class, worker), costs.nodes.of(worker.spec)
    return load is not None and not load.streamed_bytes and (node is None or node.has(load.reads, costs.at))


def may_preload(costs: Costs, worker: Worker, held: RunningLease, cost_class: CostClass, least_bytes: float) -> bool:
    """Whether `plan_preload` may find at least `least_bytes` to upload. A cheap bound: for most tasks too little is
    missing, or there is no room next to the run."""
    load, entries = costs.load_estimate(cost_class, worker), worker.entries
    if load is None or load.upload_bytes < least_bytes:
        return False
    if load.switches:
        return True  # a patch switch of a resident component needs no more room
    free_bytes = (worker.capacity_bytes or 0) - held.run_bytes - held.run_bytes // MARGIN_PART
    room_bytes = free_bytes - cost_class.scratch_bytes - worker.used_bytes
    leaving_bytes = worker.used_bytes - load.present_bytes - load.room_bytes
    if leaving_bytes > 0:  # of these, what the run holds stays
        stays, components, others_bytes = held.components, cost_class.components, 0
        for key, entry in entries.items():
            if key not in stays and key not in components:
                others_bytes += entry.resident_bytes
        room_bytes += min(leaving_bytes, others_bytes)
    return room_bytes > 0


def waiting_work(
    costs: Costs, backlog: Backlog, workers: WorkerIndex, worker: Worker
) -> tuple[float, dict[ComponentKey, None]]:
    """Return the waiting work for weights that the worker has, in seconds if all workers that have them share it, and
    those weights."""
    seconds, wanted = 0.0, dict[ComponentKey, None]()
    for line in backlog.using(worker.entries.values()):
        task, cost_class = line.head, line.cost_class
        if costs.extra_seconds(task.spec, cost_class, worker) == 0.0:
            run_seconds = costs.resident_seconds(task.spec, cost_class, worker)
            components = cost_class.components
            sharing = _with_patches(workers, cost_class) if components else workers.count
            seconds += len(line.tasks) * run_seconds / max(1, sharing)
            for key in components:
                wanted[key] = None
    return seconds, wanted


def would_switch_patches(worker: Worker, cost_class: CostClass, wanted: Container[ComponentKey]) -> bool:
    """Whether a component in `wanted` would get other patches for it there."""
    entries = worker.entries
    for use in cost_class.uses:
        if use.component in wanted:
            entry = entries.get(use.component)
            if entry is not None and entry.patch_digest != use.patch_digest:
                return True
    return False


def _with_patches(workers: WorkerIndex, cost_class: CostClass) -> int:
    """Number of workers that have its first component with its patches; counts no further than matters."""
    component, digest = cost_class.uses[0].component, cost_class.uses[0].patch_digest
    holders = workers.holders.get(component)
    if holders is None or len(holders) < 2:
        return 1
    found = 0
    for place, other in enumerate(holders):
        if place == MOST_HOLDERS:
            break
        if other.entries[component].patch_digest == digest:
            found += 1
    return found


def can_preload_all(
    costs: Costs, backlog: Backlog, workers: WorkerIndex, worker: Worker, running: CostClass, coming: CostClass
) -> bool:
    """Whether all that `coming` lacks there can be preloaded during a run of `running`, without evicting what waiting
    tasks need, and was not preloaded already: a worker that was sent such a preload before has it."""
    load = costs.load_estimate(coming, worker)
    if load is None or not is_load_available(costs, worker, coming):
        return False
    whole_bytes = sum([costs.components[key].upload_bytes for key in coming.components])
    preloaded = worker.preloaded.get(coming)
    if preloaded is not None and preloaded.hidden_bytes >= whole_bytes:
        return False
    if load.upload_bytes and not may_preload(costs, worker, held_during_run(worker, running, 1), coming, 0.0):
        return False  # the checks below are slower than this one
    _, wanted = waiting_work(costs, backlog, workers, worker)
    if would_switch_patches(worker, coming, wanted):
        return False
    kept = [key for key in wanted if key not in coming.components]
    return (
        plan_preload(costs, worker, held_during_run(worker, running, 1, kept), coming).upload_bytes >= load.upload_bytes
    )
