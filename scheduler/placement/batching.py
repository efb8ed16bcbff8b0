"""Which waiting tasks go through the module together with one that is about to start. Changes nothing but what it
learns.

Tasks may share a run that have one signature (the same weights, patches and sizes), the same `TaskSpec.together` and
the same expected length. Rules
1. Nothing is moved for a mate: what the activations of all need is free beside the weights that stay after the first
   one's plan. A worker that divides the first runs it alone.
2. Nobody waits for it who goes before: a mate has the first one's priority and its user's turn has come too; there is
   no mate while a task is hurried, or one of a higher priority waits that fits on the worker.
3. Who failed before runs alone (`Task.alone`): a task that does harm takes nobody along twice.
4. Other workers take their part: those that would have finished one of the tasks before the run of all ends count as
   many tasks as this one.
5. Only what pays: a larger run is chosen where its tasks take less time each than in the next smaller one, as measured
   for such runs on such GPUs. What was not measured is tried, one size after the other, until one no longer pays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from modelpool.pool.specs.spec import RunCost, Rung, WorkerId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.rules import Choice, Question, is_divided
from modelpool.scheduler.queue.backlog import Line
from modelpool.scheduler.queue.shares import turn_end
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.workers import Worker

#: measured runs of a size before it counts as known
LEAST_RUNS = 2
#: a larger run pays when its tasks take so much of the time, each, that they take in the next smaller one
PAYS_BELOW = 0.97
#: tasks of the line that are looked at for one mate
LOOKED_AT_EACH = 4
#: workers that are looked at for taking their part
MOST_WORKERS = 16
#: tasks that go first that are looked at; more of them leave no time for batches
MOST_HURRIED = 64
#: sizes that were found too large and are remembered
MOST_REMEMBERED = 1024

#: kind and size of a run, on a worker
_Place: TypeAlias = tuple[Signature, WorkerId]


class Batching:
    """Chooses mates, within `limit` tasks of a run, and remembers which runs turned out too large."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: the sizes that are tried, ascending; few, since kernels are chosen anew for each
        self.sizes = _sizes(limit)
        self._most: OrderedDict[_Place, int] = OrderedDict()

    def mates(self, question: Question, choice: Choice) -> tuple[Task, ...]:
        """The tasks that start with `choice.task`, in order; none where it runs alone."""
        task, worker = choice.task, choice.worker
        line = question.backlog.line(task.signature)
        if line is None or len(line.tasks) <= 1 or not may_share(task) or worker.capacity_bytes is None:
            return ()
        oldest = question.backlog.oldest(worker.capacity_bytes)
        if oldest is None or oldest.priority > task.priority or _somebody_hurries(question, task, worker):
            return ()
        window_seconds = question.config.share_window_seconds * question.workers.count
        latest_tag = max(task.tag, turn_end(oldest.order, window_seconds))
        following = list(_following(line, task, self.limit - 1, latest_tag))
        room = tasks_that_fit(question.costs, task.signature, worker)
        most = min(1 + len(following), room, self._most_on(task, worker))
        members = self._members(question, task, worker, most, len(line.tasks) - line.tasks.place_of(task.order))
        return tuple(following[: members - 1])

    def learn(self, task: Task, worker: Worker, cost: RunCost) -> None:
        """A run that was of `worker.members` tasks ended well: where memory made it smaller, later ones are."""
        if Rung.DIVIDE not in cost.rungs or cost.batched >= worker.members:
            return
        place = (task.signature, worker.worker_id)
        self._most[place] = min(cost.batched, self._most.pop(place, cost.batched))
        if len(self._most) > MOST_REMEMBERED:
            self._most.popitem(last=False)

    def _most_on(self, task: Task, worker: Worker) -> int:
        return self._most.get((task.signature, worker.worker_id), self.limit)

    def _members(self, question: Question, task: Task, worker: Worker, most: int, waiting: int) -> int:
        """Rules 4 and 5: how many tasks the run has, of at most so many, when so many wait, the first included."""
        chosen, least_seconds = 1, question.costs.batch_seconds(task.spec, task.signature, worker, 1)
        for members in self.sizes:
            if members > most or _fair_part(question, task, worker, members, waiting) < members:
                break
            seconds = question.costs.batch_seconds(task.spec, task.signature, worker, members) / members
            if question.costs.batch_runs(task.signature, worker, members) < LEAST_RUNS:
                return members
            if seconds > PAYS_BELOW * least_seconds:
                break
            chosen, least_seconds = members, seconds
        return chosen


def _somebody_hurries(question: Question, task: Task, worker: Worker) -> bool:
    """A task of another line that fits the worker goes before all that would run with `task`."""
    capacity_bytes = worker.capacity_bytes or 0
    return any(
        other.signature is not task.signature
        and other.priority >= task.priority
        and other.signature.needed_bytes <= capacity_bytes
        for _, _, other in islice(question.backlog.hurried.now(question.at), MOST_HURRIED)
    )


def may_share(task: Task) -> bool:
    """Whether a task may run with others at all."""
    failed = task.alone or task.failures or task.memory_failures or task.crashed or task.rungs
    return bool(task.spec.together) and not failed and task.pinned_to is None


def tasks_that_fit(costs: Costs, signature: Signature, worker: Worker) -> int:
    """Rule 1: how many tasks of this signature a run on `worker` may have."""
    setup = costs.setup(signature, worker)
    if setup is None or is_divided(signature, worker):
        return 1
    free_bytes = setup.room_bytes - (worker.used_bytes - setup.own_bytes)
    each_bytes = setup.way.activation_bytes
    if free_bytes < each_bytes:
        return 1
    return 1 + free_bytes // each_bytes if each_bytes else worker.used_bytes + 1


def _following(line: Line, task: Task, most: int, latest_tag: float) -> Iterator[Task]:
    """Up to so many tasks behind `task` in its line that may share its run, in order."""
    behind = islice(line.tasks.from_order(task.order), 1, 1 + LOOKED_AT_EACH * most)
    left = most
    for other in behind:
        if left <= 0:
            return
        if other.priority == task.priority and other.tag <= latest_tag and may_share(other) and _alike(other, task):
            left -= 1
            yield other


def _alike(other: Task, task: Task) -> bool:
    return other.spec.together == task.spec.together and other.spec.run_seconds == task.spec.run_seconds


def _fair_part(question: Question, task: Task, worker: Worker, members: int, waiting: int) -> int:
    """Rule 4: how many of the tasks that wait `worker` takes, when a run of so many is what it could do."""
    costs, at = question.costs, question.at
    batch_seconds = costs.batch_seconds(task.spec, task.signature, worker, members)
    helpers = 0
    for other in _others(question, task.signature, worker):
        wait_seconds, extra_seconds = other.wait_seconds(at), costs.extra_seconds(task.spec, task.signature, other)
        if wait_seconds is None or extra_seconds is None:
            continue
        run_seconds = costs.resident_seconds(task.spec, task.signature, other)
        helpers += wait_seconds + extra_seconds + run_seconds <= batch_seconds
    return -(-waiting // (1 + helpers))


def _others(question: Question, signature: Signature, worker: Worker) -> Sequence[Worker]:
    """Some of the other workers that are up: those that hold what it uses, and idle ones."""
    found = dict.fromkeys(islice(question.workers.idle_workers(), MOST_WORKERS))
    for use in signature.uses:
        found.update(dict.fromkeys(islice(question.workers.holders.get(use.component, ()), MOST_WORKERS)))
    found.pop(worker, None)
    return list(found)


def _sizes(limit: int) -> tuple[int, ...]:
    """Powers of two up to `limit`, and `limit`."""
    powers = [1 << power for power in range(1, limit.bit_length()) if 1 << power < limit]
    return (*powers, limit) if limit > 1 else ()
