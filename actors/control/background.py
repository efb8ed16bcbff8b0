"""Work of one event loop that nobody waits for: a bug in it is reported, as one in what waits would be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """The tasks that run. `on_bug` is called with each exception that ends one."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        self._on_bug = on_bug
        #: kept here because the event loop only has weak references
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` from now on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in tuple(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            self._on_bug(bug)
