"""Decides when a task of a batch of jobs waits until more like it are ready, so that they share a run. Changes nothing.

With resident weights, an image would be sampled as soon as its prompt is encoded, and alone. Rules
1. A sampling waits for encodes of its batch that are ready, until as many wait as one run there may profitably have
   (`scheduler.decisions.placement.batching`). Encodes are short. Decodes do not wait for samplings: the images of one
   run end together, and their decodes share a run without that.
2. It waits only where such encodes start at once: on the worker that it would start on, with resident weights.
3. No task with precedence waits: urgent ones, and those that were passed over often, start before this is asked.
"""

from __future__ import annotations

from modelpool.scheduler.decisions.placement.batching import batch_sizes, may_share, paying_size, tasks_that_fit
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.model.cost_classes import LAST_RANK, CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.workers import Worker


def feed_first(query: PlacementQuery, chosen: PlacementDecision) -> PlacementDecision | None:
    """Return the start of a task that leads to more tasks like the chosen one, by the rules above; None if `chosen`
    had better start."""
    task, worker = chosen.task, chosen.worker
    rank = task.cost_class.rank
    if run_limit(query, task) <= 1 or not task.batch or rank in (0, LAST_RANK):
        return None
    line = query.backlog.line(task.cost_class)
    if line is None or not may_share(task) or len(line.tasks) >= gathered(query, task, worker):
        return None
    for other in query.backlog.using(worker.entries.values()):
        head = other.head
        is_earlier = other.cost_class.rank < rank and head.batch == task.batch and head.priority == task.priority
        if is_earlier and query.costs.extra_seconds(head.spec, other.cost_class, worker) == 0.0:
            return make_decision(query, head, worker, PlacementRule.RESIDENT, "samplings of its batch wait for more")
    return None


def gathered(query: PlacementQuery, task: Task, worker: Worker) -> int:
    """Number of tasks of a run with `task` on `worker`, if enough of them wait."""
    if task.spec.batch_size > 1:
        return task.spec.batch_size
    most = min(query.config.batch_limit, _room(query, task.cost_class, worker))
    return paying_size(query.costs, task, worker, [size for size in batch_sizes(most) if size <= most])


def run_limit(query: PlacementQuery, task: Task) -> int:
    """Number of tasks like this one that a run may have."""
    return task.spec.batch_size if task.spec.batch_size > 1 else query.config.batch_limit


def _room(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> int:
    return tasks_that_fit(query.costs, cost_class, worker)
