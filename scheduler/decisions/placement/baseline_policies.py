"""Baseline placement policies, to compare the default (`scheduler.decisions.placement.expected_completion`) with."""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.workers import Worker


def arrival_order(query: PlacementQuery) -> PlacementDecision | None:
    """Baseline: the first ready task, on the worker that is idle longest. Ignores residency."""
    workers = sorted(query.workers.idle_workers(), key=lambda w: (w.idle_since, w.worker_id))
    return _first_fit(query, workers, "next in order, on the worker that is idle longest")


def least_loaded(query: PlacementQuery) -> PlacementDecision | None:
    """Baseline: the first ready task, on the idle worker with fewest runs so far."""
    workers = sorted(query.workers.idle_workers(), key=lambda w: (w.totals.runs, w.worker_id))
    return _first_fit(query, workers, "next in order, on the worker with fewest runs")


def _first_fit(query: PlacementQuery, workers: Sequence[Worker], reason: str) -> PlacementDecision | None:
    task = query.backlog.oldest(query.workers.largest_idle_bytes)
    if task is None:
        return None
    for worker in workers:
        if query.costs.extra_seconds(task.spec, task.cost_class, worker) is not None:
            return make_decision(query, task, worker, PlacementRule.IN_ORDER, reason)
    return None
