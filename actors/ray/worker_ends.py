"""`WorkerEnds`: ends workers in threads, since calls that need Ray's control service block while it does not answer.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from modelpool.actors.ray.survivors import ENDS, Succession, end_own
from modelpool.actors.worker.worker_lease import OlderEpoch

#: limit of all ends of a pool that closes
CLOSE_SECONDS = 10.0


class WorkerEnds:
    """The ends of the workers of one controller. Any thread may end a worker; `settled` is for the event loop."""

    def __init__(self, succession: Succession | None) -> None:
        """Without `succession`, workers end with their controller."""
        self._succession = succession
        self._threads = ThreadPoolExecutor(ENDS, "ray ends")
        #: changed by single atomic operations
        self._under_way: set[Future[bool]] = set()

    def end(self, handle: ActorHandle[Any]) -> Future[bool]:
        """End a worker, started or starting. The answer is False if it has outlived this controller and serves a newer
        one."""
        return self.submit(partial(self._end_own, handle))

    def end_created(self, creation: Future[ActorHandle[Any]]) -> None:
        """End a worker that was created, and that nobody waits for any more."""
        with suppress(Exception):  # its creation may have failed
            self.end(creation.result())

    def submit(self, end: Callable[[], bool]) -> Future[bool]:
        """Call `end` in a thread; `settled` waits for it."""
        ending = self._threads.submit(end)
        self._under_way.add(ending)
        ending.add_done_callback(self._under_way.discard)
        return ending

    async def settled(self) -> None:
        """Wait until the ends that are under way are over, at most `CLOSE_SECONDS`."""
        ending = tuple(self._under_way)
        await asyncio.get_running_loop().run_in_executor(None, partial(wait, ending, timeout=CLOSE_SECONDS))

    def _end_own(self, handle: ActorHandle[Any]) -> bool:
        if self._succession is None:
            ray.kill(handle)
            return True
        try:
            end_own(handle, self._succession.epoch)
        except OlderEpoch:
            self._succession.on_replaced()
            return False
        return True
