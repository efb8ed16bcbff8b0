"""`ClientEvents`: the pending events of one driver.

Ends of jobs are kept until the driver acknowledges them, so that a lost answer loses nothing; there are at most as
many as the driver has jobs. Progress is a level, which every answer has: it has an answer of its own only if no end
follows within `PROGRESS_SECONDS`, or within `PATIENT_SECONDS` while ends come that often. While more ends are expected,
answers are `GATHER_SECONDS` apart, and wait for the ends that come in the next turns of the event loop, as the ends of
one batch do, so that each carries many: an answer costs about as much as a task. An answer that is full waits for
nothing, and none waits for turns longer than `TURNS_SECONDS`. Knows neither the content of jobs nor the core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from itertools import islice

from modelpool.actors.worker.wire.messages import DriverEvents, JobEnded, JobPreview, NodesEnded, TaskProgress
from modelpool.pool.values.specs.spec import JobId

PROGRESS_SECONDS = 0.1
PATIENT_SECONDS = 0.3
#: previews of one answer, some KiB each; the oldest are dropped
PREVIEWS_KEPT = 256
#: ends of tasks of one answer, some hundred bytes each; the oldest are dropped: the end of a job ends all its nodes
NODES_KEPT = 4096
GATHER_SECONDS = 0.01
#: longest wait for the ends of further turns of the event loop
TURNS_SECONDS = 0.01
#: ends in one answer; the driver calls again at once while there are more
ENDS_IN_ONE_ANSWER = 256


class ClientEvents:
    """The events of one driver."""

    def __init__(self, now: float) -> None:
        self._ended: deque[JobEnded] = deque()
        #: number of ends that were acknowledged and dropped
        self._dropped = 0
        #: the newest preview of each job that was not sent, oldest first
        self._previews: dict[JobId, JobPreview] = {}
        self._nodes: deque[NodesEnded] = deque(maxlen=NODES_KEPT)
        self._wake = asyncio.Event()
        self._wake_later: asyncio.TimerHandle | None = None
        self._all_ended = asyncio.Event()
        self._listening = 0
        self._last_call_at = now
        #: on the loop's clock, when the last answer with ends was sent, and the time between it and the one before
        self._last_sent_at = float("-inf")
        self._gap_seconds = float("inf")

    def ended(self, job: JobEnded) -> None:
        """Add the end of a job of this driver."""
        self._ended.append(job)
        self._wake.set()

    def all_ended(self) -> None:
        """Note that no more ends are expected for now: existing ones need not wait for others."""
        self._all_ended.set()

    def progressed(self) -> None:
        """Note that the running tasks of this driver may have changed."""
        if self._wake_later is None and self._listening:
            loop = asyncio.get_running_loop()
            since_seconds = loop.time() - self._last_sent_at
            is_patient = max(since_seconds, self._gap_seconds) < PATIENT_SECONDS
            delay_seconds = PATIENT_SECONDS - since_seconds if is_patient else PROGRESS_SECONDS
            self._wake_later = loop.call_later(max(PROGRESS_SECONDS, delay_seconds), self._send_progress)

    def previewed(self, made: JobPreview) -> None:
        """Add a preview, in place of an earlier one of its job that was not sent."""
        self._previews.pop(made.job_id, None)
        self._previews[made.job_id] = made
        while len(self._previews) > PREVIEWS_KEPT:
            del self._previews[next(iter(self._previews))]
        self.progressed()

    def nodes_ended(self, nodes: NodesEnded) -> None:
        """Add the end of a task of a workflow, or the failure of a task."""
        self._nodes.append(nodes)
        self.progressed()

    def quiet_seconds(self, now: float) -> float:
        """Return the time since the last call of the driver; 0 while it waits for events."""
        return 0.0 if self._listening else now - self._last_call_at

    async def events(
        self,
        cursor: int,
        timeout_seconds: float,
        running: Callable[[], tuple[TaskProgress, ...]],
        now: Callable[[], float],
        more_to_come: Callable[[], bool] = lambda: True,
    ) -> DriverEvents:
        """Wait for new events, for `timeout_seconds` at most. Ends before `cursor` are acknowledged. Does not gather
        unless `more_to_come`.
        """
        self._acknowledge(cursor)
        self._listening += 1
        try:
            if not self._ended:
                async with asyncio.timeout(timeout_seconds):
                    await self._wake.wait()
            loop = asyncio.get_running_loop()
            early = self._last_sent_at + GATHER_SECONDS - loop.time()
            if early > 0 and self._ended and not self._is_full() and more_to_come():
                await self._gather(early)
            if self._ended:
                await self._take_turns(more_to_come)
                self._gap_seconds, self._last_sent_at = loop.time() - self._last_sent_at, loop.time()
        except TimeoutError:
            pass
        finally:
            self._listening -= 1
            self._last_call_at = now()
        self._wake.clear()
        self._forget_progress()  # what follows has it
        ended = tuple(islice(self._ended, ENDS_IN_ONE_ANSWER))
        previews, self._previews = tuple(self._previews.values()), {}
        nodes = tuple(self._nodes)
        self._nodes.clear()
        return DriverEvents(self._dropped + len(ended), ended, running(), previews, nodes)

    def close(self) -> None:
        """Wake waiting calls for the last time."""
        self._forget_progress()
        self._wake.set()

    def _forget_progress(self) -> None:
        if self._wake_later is not None:
            self._wake_later.cancel()
            self._wake_later = None

    async def _gather(self, seconds: float) -> None:
        """Wait for more jobs to end, for `seconds` at most."""
        self._all_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_ended.wait()

    async def _take_turns(self, more_to_come: Callable[[], bool]) -> None:
        """Wait while each turn of the event loop brings further ends, until the answer is full or `TURNS_SECONDS` are
        over: turns of a busy controller always bring some."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TURNS_SECONDS
        while not self._is_full() and loop.time() < until and more_to_come():
            before = len(self._ended)
            await asyncio.sleep(0)
            if len(self._ended) == before:
                return

    def _is_full(self) -> bool:
        return len(self._ended) >= ENDS_IN_ONE_ANSWER

    def _acknowledge(self, cursor: int) -> None:
        while self._dropped < cursor and self._ended:
            self._ended.popleft()
            self._dropped += 1

    def _send_progress(self) -> None:
        self._wake_later = None
        self._wake.set()
