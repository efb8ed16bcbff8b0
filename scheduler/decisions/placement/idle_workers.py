"""Finds the best idle worker for a task. Pure functions.

Of many idle workers only some are considered: those that have a part of what the task uses, and some of every class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery, is_divided
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.workers import Worker

#: idle workers of one class, and idle holders of a component, that are considered for one line
MOST_IDLE = 8
#: machines that have an adapter
MOST_MACHINES = 8


def best_idle(query: PlacementQuery, task: Task) -> tuple[Worker, float] | None:
    """Return the idle worker that should finish it first, with its extra seconds; None if it fits on none. Ties go to
    the worker that runs it undivided, then that evicts least, then that is idle longest, then by name."""
    workers, costs, cost_class = query.workers, query.costs, task.cost_class
    if workers.idle_count == 1:
        (worker,) = workers.some_idle(1)
        extra = costs.extra_seconds(task.spec, cost_class, worker)
        return None if extra is None else (worker, extra)
    best: list[tuple[Worker, float]] = []
    least_seconds = 0.0
    is_few = workers.idle_count <= MOST_IDLE
    for worker in workers.some_idle(MOST_IDLE) if is_few else _some_idle(query, cost_class):
        extra_seconds = costs.extra_seconds(task.spec, cost_class, worker)
        if extra_seconds is None:
            continue
        seconds = extra_seconds + costs.resident_seconds(task.spec, cost_class, worker)
        if not best or seconds < least_seconds:
            best, least_seconds = [(worker, extra_seconds)], seconds
        elif seconds == least_seconds:
            best.append((worker, extra_seconds))
    if len(best) < 2:
        return best[0] if best else None
    chosen = least_evicting(costs, cost_class, [worker for worker, _ in best])
    return next(pair for pair in best if pair[0] is chosen)


def _some_idle(query: PlacementQuery, cost_class: CostClass) -> Iterable[Worker]:
    """A selection of many idle workers: holders of its components, some near its adapters, and some of every class."""
    workers = query.workers
    found = dict.fromkeys(w for use in cost_class.uses for w in workers.idle_holders(use.component, MOST_IDLE))
    found.update((w, None) for w in near(query, cost_class) if w.is_idle)
    for sort in workers.idle.values():
        found.update(dict.fromkeys(islice(sort, MOST_IDLE)))
    return found


def near(query: PlacementQuery, cost_class: CostClass) -> list[Worker]:
    """Some workers on machines that have its adapters in memory, or its files of sources on their disk."""
    on_node, holders = query.workers.on_node, query.costs.nodes.holders
    if not holders:
        return _near_files(query, cost_class)
    return _near_files(query, cost_class) + [
        worker
        for use in cost_class.uses
        for adapter in use.adapters
        for node in islice((node for node in holders.get(adapter, ()) if node in on_node), MOST_MACHINES)
        for worker in on_node[node]
    ]


def _near_files(query: PlacementQuery, cost_class: CostClass) -> list[Worker]:
    """Some workers on machines that have its files of sources on their disk; none in a pool without sources."""
    fetched, on_node = query.costs.fetched, query.workers.on_node
    if not fetched.sets:
        return []
    keys = dict.fromkeys(fetched.sets[use.component][0] for use in cost_class.uses if use.component in fetched.sets)
    return [
        worker
        for key in keys
        for node in islice((node for node in fetched.holders.get(key, ()) if node in on_node), MOST_MACHINES)
        for worker in on_node[node]
    ]


def least_evicting(costs: Costs, cost_class: CostClass, workers: Sequence[Worker]) -> Worker:
    """Return the worker with the lowest `_harm`; all of them should finish it equally soon."""
    if len(workers) == 1:
        return workers[0]
    return min(workers, key=lambda w: _harm(costs, cost_class, w))


def _harm(costs: Costs, cost_class: CostClass, worker: Worker) -> tuple[bool, int, float, WorkerId]:
    """Sort key of workers that should finish it equally soon, best first. Idle time makes new adapters go to workers
    without recent requests."""
    load = costs.load_estimate(cost_class, worker)
    evicted_bytes = 0 if load is None else load.evicted_bytes(worker)
    return is_divided(cost_class, worker), evicted_bytes, worker.idle_since, worker.worker_id
