"""The ready tasks in order: higher priority first, then as submitted. Knows sizes, but no placement.

Tasks are kept in classes by the smallest known capacity that they fit in, so that a queue of tasks that only a busy
large worker can take does not hide what a small idle one could run; and by signature, so that what suits the weights
on a worker is found without looking at every task.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TypeAlias

from pool.residency import Resident
from pool.spec import ComponentKey, Stage, WorkerId
from scheduler.costs import Signature
from scheduler.jobs import Order, Task

_ORDER = attrgetter("order")

#: a component with its patch set; None for a task that uses no component
_Use: TypeAlias = tuple[ComponentKey, str] | None


class Backlog:
    """All ready tasks and nothing else."""

    def __init__(self, limit_of: Callable[[Stage], int]) -> None:
        """`limit_of` a stage: how many starts of later tasks a task of it lets pass."""
        self._limit_of = limit_of
        self._limits = frozenset(limit_of(stage) for stage in Stage)
        #: distinct capacities of the live workers, ascending
        self.capacities: tuple[int, ...] = ()
        #: tasks that were passed over as often as the limit allows, in order
        self.overdue: list[Task] = []
        #: one list for each capacity, and a last one for tasks that fit in none of them; each in order
        self._classes: list[list[Task]] = [[]]
        #: the same tasks by signature, each in order, none empty
        self._alike: dict[Signature, list[Task]] = {}
        #: signatures of `_alike` by the first thing that they use
        self._by_use: dict[_Use, dict[Signature, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        """Every task, in order."""
        return iter(sorted((t for tasks in self._classes for t in tasks), key=_ORDER))

    def add(self, task: Task) -> None:
        """File a task that has become ready, at its place in the order."""
        _file(self._classes[self._class_of(task)], task)
        alike = self._alike.get(task.signature)
        if alike is None:
            alike = self._alike[task.signature] = []
            self._by_use.setdefault(_first_use(task.signature), {})[task.signature] = None
        _file(alike, task)
        if task.passed >= self._limit_of(task.spec.stage):
            _file(self.overdue, task)
        self._count += 1

    def remove(self, task: Task) -> None:
        """Take out a task; its order must be the one that it was filed with."""
        _unfile(self._classes[self._class_of(task)], task)
        alike = self._alike[task.signature]
        _unfile(alike, task)
        if not alike:
            del self._alike[task.signature]
            signatures = self._by_use[_first_use(task.signature)]
            del signatures[task.signature]
            if not signatures:
                del self._by_use[_first_use(task.signature)]
        if task.passed >= self._limit_of(task.spec.stage):
            _unfile(self.overdue, task)
        self._count -= 1

    def start(self, task: Task, capacity_bytes: int) -> None:
        """Take out a task that a worker of this capacity starts, and note whom it passes over."""
        for tasks in self._classes[: self._classes_within(capacity_bytes)]:
            for passed in tasks[: bisect_left(tasks, task.order, key=_ORDER)]:
                passed.passed += 1
                if passed.passed in self._limits and passed.passed == self._limit_of(passed.spec.stage):
                    _file(self.overdue, passed)
        self.remove(task)

    def set_capacities(self, capacities: tuple[int, ...]) -> None:
        """Live workers have these distinct capacities now."""
        if capacities == self.capacities:
            return
        tasks = list(self)
        self.capacities = capacities
        self._classes = [[] for _ in range(len(capacities) + 1)]
        for task in tasks:
            self._classes[self._class_of(task)].append(task)

    def window(self, length: int, capacity_bytes: int) -> list[Task]:
        """The first `length` tasks, in order, that fit in `capacity_bytes`, which is one of the known capacities."""
        filled = self._filled(capacity_bytes)
        if len(filled) == 1:
            return filled[0][:length]
        return sorted((t for tasks in filled for t in tasks[:length]), key=_ORDER)[:length]

    def ends(self, length: int, capacity_bytes: int) -> tuple[Task, Task] | None:
        """The first and the last task of that window; None when it is empty."""
        filled = self._filled(capacity_bytes)
        if len(filled) == 1:
            return filled[0][0], filled[0][min(length, len(filled[0])) - 1]
        tasks = self.window(length, capacity_bytes)
        return (tasks[0], tasks[-1]) if tasks else None

    def first_using(self, entries: Iterable[Resident]) -> list[Task]:
        """Of each signature that starts with one of these components and patches, or with none, the first task."""
        found = [self._alike[signature][0] for signature in self._by_use.get(None, ())]
        for entry in entries:
            signatures = self._by_use.get((entry.component, entry.patch_digest))
            if signatures is not None:
                found += [self._alike[signature][0] for signature in signatures]
        return found

    def _filled(self, capacity_bytes: int) -> list[list[Task]]:
        return [tasks for tasks in self._classes[: self._classes_within(capacity_bytes)] if tasks]

    def _classes_within(self, capacity_bytes: int) -> int:
        return bisect_left(self.capacities, capacity_bytes) + 1

    def _class_of(self, task: Task) -> int:
        return bisect_left(self.capacities, task.signature.needed_bytes)


class Pinned:
    """Ready tasks that wait for one worker each: they ran out of memory elsewhere. Few; each worker's in order.

    They are not in the backlog, and go first on their worker: each was placed before.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, list[Task]] = {}

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._waiting.values())

    def __iter__(self) -> Iterator[Task]:
        """Every task, by worker and then in order."""
        return (task for tasks in list(self._waiting.values()) for task in list(tasks))

    def add(self, task: Task) -> None:
        """File a ready task under the worker that it is pinned to."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        _file(self._waiting.setdefault(task.pinned_to, []), task)

    def remove(self, task: Task) -> None:
        """Take out a task; its worker and order must be the ones that it was filed with."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        tasks = self._waiting[task.pinned_to]
        _unfile(tasks, task)
        if not tasks:
            del self._waiting[task.pinned_to]

    def first(self, worker_id: WorkerId) -> Task | None:
        """The first task that waits for this worker."""
        tasks = self._waiting.get(worker_id)
        return tasks[0] if tasks else None


def _first_use(signature: Signature) -> _Use:
    return (signature.uses[0].component, signature.uses[0].patch_digest) if signature.uses else None


def _file(tasks: list[Task], task: Task) -> None:
    if not tasks or tasks[-1].order < task.order:
        tasks.append(task)
    else:
        insort(tasks, task, key=_ORDER)


def _unfile(tasks: list[Task], task: Task) -> None:
    at = _place(tasks, task.order)
    assert tasks[at : at + 1] == [task], f"{task.name} is not in the backlog where its order says"
    del tasks[at]


def _place(tasks: list[Task], order: Order) -> int:
    return 0 if tasks and tasks[0].order == order else bisect_left(tasks, order, key=_ORDER)
