"""The waiting tasks that go before all others of their priority, by deadline. Decides nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf
from typing import TypeAlias

from modelpool.scheduler.model.jobs import Order, Task

#: deadline, order, task
UrgentEntry: TypeAlias = tuple[float, Order, Task]

#: the deadline of a task that goes first at any time: it lost its worker, or was passed over too often
AT_ONCE = -inf


class UrgentTasks:
    """Some of the tasks of a backlog; each is removed with its removal from there."""

    def __init__(self) -> None:
        self._entries: list[UrgentEntry] = []
        self._deadlines: dict[Task, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[UrgentEntry]:
        """By deadline, then in order; including tasks with a past deadline."""
        return iter(self._entries)

    def __contains__(self, task: Task) -> bool:
        return task in self._deadlines

    def deadline_of(self, task: Task) -> float | None:
        """The deadline of an urgent task; None if the task is not urgent."""
        return self._deadlines.get(task)

    def add(self, task: Task, deadline: float) -> None:
        """Make it urgent. Of two deadlines of one task the earlier counts."""
        known = self._deadlines.get(task)
        if known is not None:
            if known <= deadline:
                return
            self.discard(task)
        self._deadlines[task] = deadline
        insort(self._entries, (deadline, task.order, task))

    def discard(self, task: Task) -> None:
        """Make it not urgent any more."""
        deadline = self._deadlines.pop(task, None)
        if deadline is not None:
            del self._entries[bisect_left(self._entries, (deadline, task.order))]

    def now(self, at: float) -> Iterator[UrgentEntry]:
        """Tasks that go first at this time: without tasks with a past deadline."""
        for entry in self._entries:
            if entry[0] > AT_ONCE:
                break
            yield entry
        for place in range(bisect_left(self._entries, (at,)), len(self._entries)):
            yield self._entries[place]
