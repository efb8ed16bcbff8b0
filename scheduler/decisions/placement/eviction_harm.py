"""The loads that a load causes: seconds for which weights that it evicts are loaded again. Changes nothing."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.workers import Worker

#: multiples of its load after which weights that are needed again would not have been kept anyway
HORIZON_LOADS = 20.0


def eviction_seconds(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> float:
    """Return the expected seconds of loading again what a run of this cost class would evict from a live worker that it
    fits on: the sum over the evicted components of the time of their load there times the probability that they are
    needed within `HORIZON_LOADS` times that. Components that several workers have share the demand. 0 if nothing is
    evicted."""
    rates, holders, at = query.costs.rates, query.workers.holders, query.at
    seconds = 0.0
    for key, load_seconds in _evicted(query, cost_class, worker):
        sharing = max(1, len(holders.get(key, ())))
        seconds += load_seconds * rates.needed_within(key, HORIZON_LOADS * load_seconds / sharing, at)
    return seconds


def demanded_seconds(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> float:
    """Return the seconds of loading again what such a run would evict there of components that are in demand: tasks
    that use them have not ended, whether they can start yet or not. 0 if nothing of that is evicted."""
    rates = query.costs.rates
    return sum([seconds for key, seconds in _evicted(query, cost_class, worker) if rates.is_in_demand(key)])


def _evicted(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> list[tuple[ComponentKey, float]]:
    """The components of which a run of this cost class would evict something there, and the seconds of loading that
    part again. Which components leave is decided later: assumed are those with the lowest rate of demand, without
    waiting tasks first."""
    costs, load = query.costs, query.costs.load_estimate(cost_class, worker)
    assert load is not None, f"the task does not fit on {worker.worker_id}"
    missing_bytes = worker.used_bytes - load.present_bytes - load.room_bytes
    if missing_bytes <= 0:
        return []
    wanted, holders, at = query.backlog.wanted, query.workers.holders, query.at
    candidates: list[tuple[bool, float, ComponentKey, int]] = []
    for key, entry in worker.entries.items():
        if key not in cost_class.components:
            sharing = max(1, len(holders.get(key, ())))
            candidates.append((key in wanted, costs.rates.per_second(key, at) / sharing, key, entry.resident_bytes))
    candidates.sort()
    evicted: list[tuple[ComponentKey, float]] = []
    for _, _, key, resident_bytes in candidates:
        spec = costs.components.get(key)
        if spec is not None and spec.weight_bytes:
            part = min(missing_bytes, resident_bytes) / spec.weight_bytes
            evicted.append((key, part * spec.upload_bytes / worker.link_bytes_per_second))
        missing_bytes -= resident_bytes
        if missing_bytes <= 0:
            break
    return evicted
