"""Selects waiting tasks that run in one batch with a task that is about to start. Changes only what it learns.

What gathers tasks in the queue for that is in `scheduler.decisions.placement.gathering`.

Tasks may share a run if they have one cost class (equal weights, patches and sizes), the same `TaskSpec.together` and
the same expected length. Tasks with a fixed batch size (`TaskSpec.batch_size`) run in a pass of that size however few
they are: all that wait share it, by rules 2 and 3 alone. Rules
1. No weights are moved for a batch mate: the activations of all fit next to the weights that stay after the first
   task's plan. A worker that divides the first task runs it alone.
2. No task with precedence waits for it: a mate has the first one's priority and is within the share window; there are
   no mates while a task is urgent, or one of a higher priority waits that fits on the worker.
3. A task that failed before runs alone (`Task.alone`): it affects others at most once.
4. Other workers take their part: those that would finish one of the tasks before the end of the batch count as many
   tasks as this one. Busy ones also have their part of the tasks that lack inputs: mostly, they work on these inputs.
5. Only profitable sizes: a larger batch is chosen if its tasks take less time each than in the next smaller size, as
   measured for such batches on such GPUs. Sizes without measurements are tried in ascending order until one does not
   pay. A size that was not used for long counts as not measured (`scheduler.model.run_kinds`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from modelpool.pool.values.specs.spec import OomStep, RunCost, TaskSpec, WorkerId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, is_divided
from modelpool.scheduler.decisions.queue.backlog import BacklogLine
from modelpool.scheduler.decisions.queue.shares import share_window_end
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.workers import Worker

#: measured runs of a size before it counts as known
LEAST_RUNS = 2
#: a larger batch pays if its time per task is below this fraction of the next smaller size's
PAYS_BELOW = 0.97
#: tasks of the line that are considered for one mate
LOOKED_AT_EACH = 4
#: other workers that are considered for rule 4
MOST_WORKERS = 16
#: urgent tasks that are considered; more of them leave no time for batches
MOST_URGENT = 64
#: sizes that were found too large and are remembered
MOST_REMEMBERED = 1024

#: cost class of a run, on a worker
_Place: TypeAlias = tuple[CostClass, WorkerId]


class Batching:
    """Selects mates, up to `limit` tasks per run, and remembers which runs turned out too large."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: the sizes that are tried, ascending; few, since kernels are selected again for each
        self.sizes = batch_sizes(limit)
        self._most: OrderedDict[_Place, int] = OrderedDict()

    def limit_of(self, spec: TaskSpec) -> int:
        """Return how many tasks like this one a run may have."""
        return spec.batch_size if spec.batch_size > 1 else self.limit

    def batch_mates(self, query: PlacementQuery, decision: PlacementDecision) -> tuple[Task, ...]:
        """Return the tasks that start with `decision.task`, in order; empty if it runs alone."""
        task, worker = decision.task, decision.worker
        line = query.backlog.line(task.cost_class)
        if line is None or len(line.tasks) <= 1 or not may_share(task) or worker.capacity_bytes is None:
            return ()
        oldest = query.backlog.oldest(worker.capacity_bytes)
        if oldest is None or oldest.priority > task.priority or has_urgent_task(query, task, worker):
            return ()
        window_seconds = query.config.share_window_seconds * query.workers.count
        latest_start = max(task.virtual_start, share_window_end(oldest.order, window_seconds))
        following = list(_following(line, task, self.limit_of(task.spec) - 1, latest_start))
        if task.spec.batch_size > 1:
            return tuple(following)
        room = tasks_that_fit(query.costs, task.cost_class, worker)
        most = min(1 + len(following), room, self._most_on(task, worker))
        members = self._members(query, task, worker, most, len(line.tasks) - line.tasks.place_of(task.order))
        return tuple(following[: members - 1])

    def runs_alone(self, costs: Costs, task: Task, worker: Worker) -> bool:
        """Return whether `task` would run alone whenever it starts on `worker`: it must, no other task of its cost
        class waits or is to come, or no batch fits or pays there, as measured."""
        if self.limit_of(task.spec) == 1 or not may_share(task):
            return True
        if task.cost_class.tasks - task.cost_class.on_workers <= 1:
            return True
        if task.spec.batch_size > 1:
            return False
        most = min(tasks_that_fit(costs, task.cost_class, worker), self._most_on(task, worker))
        return paying_size(costs, task, worker, [size for size in self.sizes if size <= most]) == 1

    def learn(self, task: Task, worker: Worker, cost: RunCost) -> None:
        """A run of `worker.members` tasks succeeded: if memory reduced its size, later ones get that size."""
        if OomStep.DIVIDE not in cost.oom_steps or cost.batched >= worker.members:
            return
        place = (task.cost_class, worker.worker_id)
        self._most[place] = min(cost.batched, self._most.pop(place, cost.batched))
        if len(self._most) > MOST_REMEMBERED:
            self._most.popitem(last=False)

    def _most_on(self, task: Task, worker: Worker) -> int:
        return self._most.get((task.cost_class, worker.worker_id), self.limit)

    def _members(self, query: PlacementQuery, task: Task, worker: Worker, most: int, waiting: int) -> int:
        """Rules 4 and 5: number of tasks of the run, up to `most`, if `waiting` tasks wait, including the first."""
        fair: list[int] = []
        for members in self.sizes:
            if members > most or _fair_part(query, task, worker, members, waiting) < members:
                break
            fair.append(members)
        return paying_size(query.costs, task, worker, fair)


def paying_size(costs: Costs, task: Task, worker: Worker, sizes: Iterable[int]) -> int:
    """Rule 5: the size of a run with `task` on `worker`, one of these, in ascending order, or 1."""
    chosen, least_seconds = 1, costs.batch_seconds(task.spec, task.cost_class, worker, 1)
    for members in sizes:
        seconds = costs.batch_seconds(task.spec, task.cost_class, worker, members) / members
        if costs.batch_runs(task.cost_class, worker, members) < LEAST_RUNS:
            return members
        if seconds > PAYS_BELOW * least_seconds:
            break
        chosen, least_seconds = members, seconds
    return chosen


def has_urgent_task(query: PlacementQuery, task: Task, worker: Worker) -> bool:
    """Return whether a task of another line that fits the worker goes before all that would run with `task`."""
    capacity_bytes = worker.capacity_bytes or 0
    return any(
        other.cost_class is not task.cost_class
        and other.priority >= task.priority
        and not other.is_for_pass
        and other.cost_class.needed_bytes <= capacity_bytes
        for _, _, other in islice(query.backlog.urgent.now(query.at), MOST_URGENT)
    )


def may_share(task: Task) -> bool:
    """Whether a task may run with others at all."""
    failed = task.alone or task.failures or task.memory_failures or task.crashed or task.oom_steps
    return bool(task.spec.together) and not failed and task.pinned_to is None


def tasks_that_fit(costs: Costs, cost_class: CostClass, worker: Worker) -> int:
    """Rule 1: number of tasks of this cost class that a run on `worker` may have."""
    load = costs.load_estimate(cost_class, worker)
    if load is None or is_divided(cost_class, worker):
        return 1
    free_bytes = load.room_bytes - (worker.used_bytes - load.present_bytes)
    each_bytes = load.mode.activation_bytes
    if free_bytes < each_bytes:
        return 1
    return 1 + free_bytes // each_bytes if each_bytes else worker.used_bytes + 1


def _following(line: BacklogLine, task: Task, most: int, latest_start: float) -> Iterator[Task]:
    """Up to `most` tasks after `task` in its line that may share its run, in order."""
    behind = islice(line.tasks.from_order(task.order), 1, 1 + LOOKED_AT_EACH * most)
    left = most
    for other in behind:
        if left <= 0:
            return
        if (
            other.priority == task.priority
            and other.virtual_start <= latest_start
            and may_share(other)
            and _alike(other, task)
        ):
            left -= 1
            yield other


def _alike(other: Task, task: Task) -> bool:
    # tasks that resume share a run if they are at the same step
    other_step = None if other.kept is None else other.kept.step
    return (
        other.spec.together == task.spec.together
        and other.spec.run_seconds == task.spec.run_seconds
        and other_step == (None if task.kept is None else task.kept.step)
    )


def _fair_part(query: PlacementQuery, task: Task, worker: Worker, members: int, waiting: int) -> int:
    """Rule 4: how many of the waiting tasks `worker` takes, if it could run a batch of `members`."""
    costs, at = query.costs, query.at
    batch_seconds = costs.batch_seconds(task.spec, task.cost_class, worker, members)
    idle = busy = 0
    for other in _others(query, task.cost_class, worker):
        wait_seconds, extra_seconds = other.wait_seconds(at), costs.extra_seconds(task.spec, task.cost_class, other)
        if wait_seconds is None or extra_seconds is None:
            continue
        run_seconds = costs.resident_seconds(task.spec, task.cost_class, other)
        if wait_seconds + extra_seconds + run_seconds <= batch_seconds:
            idle += other.is_idle
            busy += not other.is_idle
    line = query.backlog.line(task.cost_class)
    coming = task.cost_class.tasks - task.cost_class.on_workers - (0 if line is None else len(line.tasks))
    return min(-(-waiting // (1 + idle)), -(-(waiting + coming) // (1 + idle + busy)))


def _others(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> Sequence[Worker]:
    """Some of the other workers that are up: holders of what it uses, and idle ones."""
    found = dict.fromkeys(islice(query.workers.idle_workers(), MOST_WORKERS))
    for use in cost_class.uses:
        found.update(dict.fromkeys(islice(query.workers.holders.get(use.component, ()), MOST_WORKERS)))
    found.pop(worker, None)
    return list(found)


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Powers of two up to `limit`, and `limit`."""
    powers = [1 << power for power in range(1, limit.bit_length()) if 1 << power < limit]
    return (*powers, limit) if limit > 1 else ()
