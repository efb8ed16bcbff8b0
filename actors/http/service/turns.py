"""`Turns`: how much of one kind of work is done at a time, in all and for each owner, so that nobody takes all."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Belongs to one event loop. Those that wait get their turn in the order in which they came, except that owners who
    have as many turns as one may have wait for one of their own to end."""

    def __init__(self, most: int, most_of_owner: int) -> None:
        assert 0 < most_of_owner <= most
        self._most = most
        self._most_of_owner = most_of_owner
        self._taken: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn of `owner`, and have it inside the block."""
        if self._has_turn(owner):
            self._taken[owner] += 1
        else:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((owner, mine))
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # it was given the turn at the same time
                    self._end(owner)
                raise
        try:
            yield
        finally:
            self._end(owner)

    def _has_turn(self, owner: str) -> bool:
        return self._taken.total() < self._most and self._taken[owner] < self._most_of_owner

    def _end(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        left: deque[tuple[str, asyncio.Future[None]]] = deque()
        while self._waiting and self._taken.total() < self._most:
            waiter, future = self._waiting.popleft()
            if future.done():  # it does not wait any more
                continue
            if self._has_turn(waiter):
                self._taken[waiter] += 1
                future.set_result(None)
            else:
                left.append((waiter, future))
        self._waiting.extendleft(reversed(left))
