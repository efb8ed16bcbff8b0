"""Selects waiting tasks that join a running pass at its next step. Pure.

A pass with a fixed batch size takes as long with a free row as without: the row is padded. So a task that may join
(`TaskSpec.pass_key`) does so before any worker is started for it, with these rules
1. It runs on weights that are there, in memory that the pass has; it has not failed before, and the limit of its user
   lets it start.
2. A task that ends with the pass, or before it, costs nobody anything. One that makes the pass longer has precedence as
   a batch mate has (`scheduler.decisions.placement.batching`, rule 2): its priority is no lower than the priority of
   the first task that waits and fits there, it is within the share window of that task, and no task of another kind is
   urgent. Nor has that first task, if it is another one, waited longer than the share window: tasks of one user have
   no virtual starts. So a pass ends when others have waited longer than that, however many more could join.
3. Nothing joins a worker that ends, that an operator keeps free, that was sent tasks to run afterwards, or that was
   asked to stop one of its tasks. That one leaves at its next step; if it does not, the pass hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from modelpool.scheduler.decisions.placement.batching import has_urgent_task, may_share
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery
from modelpool.scheduler.decisions.queue.shares import share_window_end
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.workers import Worker

#: lines, and tasks of each for one free row, that are considered
MOST_LINES = 16
LOOKED_AT_EACH = 4
_ORDER = attrgetter("order")
#: a task may end so much later than the pass and count as ending with it: times are estimates
SAME_END_SECONDS = 1e-6


def takes_joining(worker: Worker, running: Iterable[Task]) -> bool:
    """Rule 3: return whether tasks may join the run of a worker, of the tasks `running`, now."""
    if not worker.free_rows or worker.queue or worker.drain_deadline is not None or not worker.takes_tasks:
        return False
    return not any(task.is_stopping for task in running)


def joining_task(query: PlacementQuery, worker: Worker, may_start: Callable[[Task], bool]) -> Task | None:
    """Return the first task in order that may join the pass that `worker` runs; None if there is none. `may_start`:
    whether the limit of its user lets a task start."""
    for task in sorted(_candidates(query, worker), key=_ORDER):
        if _may_join(query, task, worker) and may_start(task):
            return task
    return None


def _candidates(query: PlacementQuery, worker: Worker) -> Iterator[Task]:
    assert worker.pass_component is not None, f"{worker.name} runs no pass"
    for line in query.backlog.of_component(worker.pass_component, MOST_LINES):
        for task in line.tasks.first(LOOKED_AT_EACH * worker.free_rows):
            if task.spec.pass_key == worker.pass_key:
                yield task


def _may_join(query: PlacementQuery, task: Task, worker: Worker) -> bool:
    if task.held_back or not may_share(task) or query.costs.extra_seconds(task.spec, task.cost_class, worker) != 0.0:
        return False
    if ends_with_pass(query, task, worker):
        return True
    passed = query.backlog.passed_by(task, worker.capacity_bytes or 0)
    if passed is not None and passed.overdue:  # of the same kind, and it may not join itself
        return False
    oldest = query.backlog.oldest(worker.capacity_bytes or 0)
    if oldest is None or oldest.priority > task.priority or has_urgent_task(query, task, worker):
        return False
    if oldest is not task and oldest.waited_seconds(query.at) > query.config.share_window_seconds:
        return False
    window_seconds = query.config.share_window_seconds * query.workers.count
    return task.virtual_start <= max(oldest.virtual_start, share_window_end(oldest.order, window_seconds))


def ends_with_pass(query: PlacementQuery, task: Task, worker: Worker) -> bool:
    """Whether the pass that `worker` runs takes no longer with `task`: nobody waits for it."""
    end = worker.expected_end
    return end is not None and query.at + joining_seconds(query, task, worker) <= end + SAME_END_SECONDS


def joining_seconds(query: PlacementQuery, task: Task, worker: Worker) -> float:
    """Return the seconds from the join to the end of `task`."""
    return query.costs.resident_seconds(task.spec, task.cost_class, worker)
