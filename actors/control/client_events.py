"""`ClientFeed`: what one driver has not heard yet. Knows neither jobs' content nor the core.

Ends of jobs are kept until the driver says that they arrived, so that a lost answer loses nothing; there are never more
than the driver has jobs. Progress is a level that the driver is told of at most every `PROGRESS_SECONDS`. While
more ends are to come, answers keep `GATHER_SECONDS` apart, so that one tells of many: an answer costs about as much as
a task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from itertools import islice

from modelpool.actors.wire.messages import JobEnded, News, RunningTask

PROGRESS_SECONDS = 0.1
GATHER_SECONDS = 0.01
#: ends in one answer; the driver asks again at once while there are more
ENDS_IN_ONE_ANSWER = 256


class ClientFeed:
    """One driver's news."""

    def __init__(self, now: float) -> None:
        self._ended: deque[JobEnded] = deque()
        #: number of ends that were acknowledged and dropped
        self._dropped = 0
        self._wake = asyncio.Event()
        self._wake_later: asyncio.TimerHandle | None = None
        self._all_ended = asyncio.Event()
        self._listening = 0
        self._heard_at = now
        #: on the loop's clock, when the last answer with ends went out
        self._told_ends_at = float("-inf")

    def ended(self, job: JobEnded) -> None:
        """A job of this driver ended."""
        self._ended.append(job)
        self._wake.set()

    def all_ended(self) -> None:
        """No more ends are to come for now: those that there are need not wait for others."""
        self._all_ended.set()

    def progressed(self) -> None:
        """What runs for this driver may have changed."""
        if self._wake_later is None and self._listening:
            self._wake_later = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._tell_progress)

    def quiet_seconds(self, now: float) -> float:
        """How long nothing was heard of the driver. 0 while it waits for news."""
        return 0.0 if self._listening else now - self._heard_at

    async def news(
        self,
        cursor: int,
        timeout_seconds: float,
        running: Callable[[], tuple[RunningTask, ...]],
        now: Callable[[], float],
        more_to_come: Callable[[], bool] = lambda: True,
    ) -> News:
        """Wait until there is anything new, or for `timeout_seconds`. Ends before `cursor` have arrived. Nothing is
        gathered when no `more_to_come` than has ended."""
        self._acknowledge(cursor)
        self._listening += 1
        try:
            if not self._ended:
                async with asyncio.timeout(timeout_seconds):
                    await self._wake.wait()
            loop = asyncio.get_running_loop()
            early = self._told_ends_at + GATHER_SECONDS - loop.time()
            if early > 0 and self._ended and more_to_come():
                await self._gather(early)
            if self._ended:
                self._told_ends_at = loop.time()
        except TimeoutError:
            pass
        finally:
            self._listening -= 1
            self._heard_at = now()
        self._wake.clear()
        ended = tuple(islice(self._ended, ENDS_IN_ONE_ANSWER))
        return News(self._dropped + len(ended), ended, running())

    def close(self) -> None:
        """Wake whoever waits, for the last time."""
        if self._wake_later is not None:
            self._wake_later.cancel()
        self._wake.set()

    async def _gather(self, seconds: float) -> None:
        """Let more jobs end, for so long at most."""
        self._all_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_ended.wait()

    def _acknowledge(self, cursor: int) -> None:
        while self._dropped < cursor and self._ended:
            self._ended.popleft()
            self._dropped += 1

    def _tell_progress(self) -> None:
        self._wake_later = None
        self._wake.set()
