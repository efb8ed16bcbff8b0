"""Limits of the tasks that one user may have on workers at once. Knows tasks by their payer.

For a user with a limit, the backlog contains only as many ready tasks as may start: the first ones in order. The others
are held back here, and `settle` moves them.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelpool.pool.values.specs.spec import TaskId, UserId
from modelpool.scheduler.decisions.queue.backlog import Backlog
from modelpool.scheduler.decisions.queue.sorted_sequence import SortedSequence
from modelpool.scheduler.model.jobs import Task


class _Limited:
    """A user with a limit who has ready or running tasks."""

    __slots__ = ("filed", "held", "limit", "running")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: on workers
        self.running = 0
        #: in the backlog
        self.filed: SortedSequence[Task] = SortedSequence()
        #: ready and not in the backlog
        self.held: SortedSequence[Task] = SortedSequence()


class RunningLimits:
    """Keeps users below their limit. A task is counted for its payer when it was queued or started."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._limited: dict[UserId, _Limited] = {}
        #: payers of the running tasks of users with a limit
        self._started: dict[TaskId, UserId] = {}
        #: users for whom something changed since `settle`
        self._unsettled: dict[UserId, None] = {}

    def held(self) -> Iterator[Task]:
        """Yield every ready task that is kept out of the backlog; each user's in order."""
        return (task for limited in self._limited.values() for task in limited.held)

    def running(self, user: UserId) -> int:
        """Number of tasks of a user with a limit that are on workers."""
        limited = self._limited.get(user)
        return 0 if limited is None else limited.running

    def add(self, task: Task, limit: int) -> None:
        """Add a ready task of a payer with this limit: it is held until `settle` finds room."""
        limited = self._limited.get(task.payer)
        if limited is None:
            limited = self._limited[task.payer] = _Limited(limit)
        task.held_back = True
        limited.held.add(task)
        self._unsettled[task.payer] = None

    def remove(self, task: Task) -> None:
        """Remove a task that is no longer ready, from the backlog too if it is there."""
        limited = self._limited[task.payer]
        self._unsettled[task.payer] = None
        if task.held_back:
            limited.held.remove(task)
            task.held_back = False
        else:
            limited.filed.remove(task)
            self._backlog.remove(task)

    def may_start(self, task: Task, limit: int | None) -> bool:
        """Whether one more task of its payer may start now, regardless of the backlog."""
        return limit is None or self.running(task.payer) < limit

    def start(self, task: Task, limit: int) -> None:
        """A task starts; it left the backlog, if it was in it."""
        limited = self._limited.get(task.payer)
        if limited is None:
            limited = self._limited[task.payer] = _Limited(limit)
        place = limited.filed.place_of(task.order)
        if place < len(limited.filed) and limited.filed[place] is task:
            limited.filed.remove(task)
        limited.running += 1
        self._started[task.name] = task.payer
        self._unsettled[task.payer] = None

    def end(self, task: Task) -> None:
        """A task no longer runs."""
        user = self._started.pop(task.name, None)
        if user is not None:
            self._limited[user].running -= 1
            self._unsettled[user] = None

    def is_awaited(self, task: Task) -> bool:
        """Whether a held task may start when this one ends."""
        user = self._started.get(task.name)
        return user is not None and bool(self._limited[user].held)

    def settle(self) -> None:
        """Move the first tasks of each user to the backlog, as many as may start."""
        for user in self._unsettled:
            limited = self._limited[user]
            room = max(0, limited.limit - limited.running)
            while limited.filed and (len(limited.filed) > room or self._stands_behind(limited)):
                last = limited.filed[len(limited.filed) - 1]
                limited.filed.remove(last)
                self._backlog.remove(last)
                last.held_back = True
                limited.held.add(last)
            while limited.held and len(limited.filed) < room:
                first = limited.held[0]
                limited.held.remove(first)
                first.held_back = False
                limited.filed.add(first)
                self._backlog.add(first)
            if not (limited.running or limited.filed or limited.held):
                del self._limited[user]
        self._unsettled.clear()

    @staticmethod
    def _stands_behind(limited: _Limited) -> bool:
        """Whether a held task comes before one in the backlog."""
        return bool(limited.held) and limited.held[0].order < limited.filed[len(limited.filed) - 1].order
