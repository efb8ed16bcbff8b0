"""Decides when a load goes before resident tasks of the same batch, so that its first images end soon. Changes nothing.

The jobs of a batch do not age, and tasks with resident weights go first: without this, all prompts of a batch would be
encoded before the first image is sampled. All weights of a batch have to be loaded, so a load costs the same now as
later, unless it displaces something. Rules
1. A load that neither evicts weights in demand, nor replaces patches, nor is a copy in addition to existing ones takes
   place at once.
2. Any other load recurs: what it displaces is loaded again. It takes place when the tasks that wait for it run
   1 / `RECURRING_SHARE` times as long, on each worker that has their weights, as it and the loads that it causes. This
   bounds both the loads and the images with intermediate values that wait.
3. The tasks wait for a busy worker that should finish them sooner, as in all placement.
4. Where tasks share runs, as many wait as one run may have.
"""

from __future__ import annotations

from itertools import islice

from modelpool.scheduler.decisions.placement.eviction_harm import demanded_seconds
from modelpool.scheduler.decisions.placement.gathering import gathered, run_limit
from modelpool.scheduler.decisions.placement.idle_workers import best_idle
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.placement.waiting import Reservations, first_to_start
from modelpool.scheduler.decisions.queue.backlog import BacklogLine
from modelpool.scheduler.model.cost_classes import LAST_RANK, CostClass
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.workers import Worker

#: fraction of the run time of the waiting tasks that recurring loads may take. An image that takes a second is then
#: the first of a hundred at most; a batch takes about one percent longer
RECURRING_SHARE = 0.01
#: lines of the batch, the first in order, that are considered
MOST_LINES = 32


def further_along(reservations: Reservations, chosen: PlacementDecision) -> PlacementDecision | None:
    """Return the start of an earlier task of the batch of `chosen` that is further along, by the rules above; None if
    `chosen` had better start."""
    query, task = reservations.query, chosen.task
    rank = task.cost_class.rank
    if not task.batch or rank == LAST_RANK:
        return None
    for line in islice(query.backlog.lines(query.workers.largest_idle_bytes), MOST_LINES):
        if line.order >= task.order:
            return None
        if line.cost_class.rank <= rank or line.head.batch != task.batch or line.head.priority != task.priority:
            continue
        best = best_idle(query, line.head)
        if best is None:
            continue
        worker, extra_seconds = best
        if run_limit(query, line.head) > 1 and len(line.tasks) < gathered(query, line.head, worker):
            continue
        recurring_seconds = _recurring_seconds(query, line, worker, extra_seconds)
        if recurring_seconds > RECURRING_SHARE * _waiting_seconds(query, line, worker):
            continue
        place = first_to_start(reservations, line, worker, extra_seconds + recurring_seconds)
        if place is not None:
            note = "its batch has begun it, and the load pays"
            return make_decision(
                query, line.tasks[place], worker, PlacementRule.CHEAPEST, note, reservations.considered
            )
    return None


def _recurring_seconds(query: PlacementQuery, line: BacklogLine, worker: Worker, extra_seconds: float) -> float:
    """Seconds of the load of a line on this worker, which takes `extra_seconds` with streaming, and of the loads that
    it causes; 0 if nothing has to be loaded again because of it."""
    cost_class = line.cost_class
    if extra_seconds == 0.0:
        return 0.0
    load = query.costs.load_estimate(cost_class, worker)
    assert load is not None, f"{line.head.name} does not fit on {worker.worker_id}"
    caused_seconds = demanded_seconds(query, cost_class, worker)
    if not caused_seconds and not _holders(query, line, worker) and not _replaces_patches(cost_class, worker):
        return 0.0
    own_seconds = load.upload_bytes / worker.link_bytes_per_second + load.switches * query.costs.patch_seconds(worker)
    return min(own_seconds, extra_seconds) + caused_seconds


def _replaces_patches(cost_class: CostClass, worker: Worker) -> bool:
    """Whether a component that is there has other patches."""
    there = [(use, worker.entries.get(use.component)) for use in cost_class.uses]
    return any(entry is not None and entry.patch_digest != use.patch_digest for use, entry in there)


def _holders(query: PlacementQuery, line: BacklogLine, worker: Worker) -> int:
    """Number of other workers that have the first component that the line uses."""
    uses = line.cost_class.uses
    holders = query.workers.holders.get(uses[0].component) if uses else None
    return 0 if holders is None else len(holders) - (worker in holders)


def _waiting_seconds(query: PlacementQuery, line: BacklogLine, worker: Worker) -> float:
    """Run time of the line's tasks, divided by the workers that have their weights, including this one."""
    run_seconds = query.costs.resident_seconds(line.head.spec, line.cost_class, worker)
    return len(line.tasks) * run_seconds / (1 + _holders(query, line, worker))
