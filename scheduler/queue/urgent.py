"""The waiting tasks that go before all others of their priority, by when they should be done. Decides nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf
from typing import TypeAlias

from modelpool.scheduler.tables.jobs import Order, Task

#: deadline, order, task
Entry: TypeAlias = tuple[float, Order, Task]

#: the deadline of a task that goes first whatever the time: it lost its worker, or was passed over too often
AT_ONCE = -inf


class Hurried:
    """Some of the tasks of a backlog; each leaves with it."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._deadlines: dict[Task, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """By deadline, then in order; those whose deadline is over too."""
        return iter(self._entries)

    def __contains__(self, task: Task) -> bool:
        return task in self._deadlines

    def deadline_of(self, task: Task) -> float | None:
        """The deadline that it is hurried by; None where it is not hurried."""
        return self._deadlines.get(task)

    def add(self, task: Task, deadline: float) -> None:
        """Let it go first. Of two deadlines of one task the sooner counts."""
        known = self._deadlines.get(task)
        if known is not None:
            if known <= deadline:
                return
            self.discard(task)
        self._deadlines[task] = deadline
        insort(self._entries, (deadline, task.order, task))

    def discard(self, task: Task) -> None:
        """Let it go first no more, if it did."""
        deadline = self._deadlines.pop(task, None)
        if deadline is not None:
            del self._entries[bisect_left(self._entries, (deadline, task.order))]

    def now(self, at: float) -> Iterator[Entry]:
        """Those that go first at this time: a deadline that is over hurries nobody any more."""
        for entry in self._entries:
            if entry[0] > AT_ONCE:
                break
            yield entry
        for place in range(bisect_left(self._entries, (at,)), len(self._entries)):
            yield self._entries[place]
