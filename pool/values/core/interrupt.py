"""`Interrupt`: stops the current run, once, from any thread.

Each run has its own flag, created when it starts, so a request never carries over to the next run. Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Shared by the runner and the threads that may stop it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: one event for each current run: usually none or one
        self._under_way: list[threading.Event] = []

    def request(self) -> bool:
        """Ask all current runs to stop at their next layer or step.

        Returns whether there was one. Without a run nothing happens, now or later.
        """
        with self._lock:
            for flag in self._under_way:
                flag.set()
            return bool(self._under_way)

    @contextmanager
    def run(self) -> Iterator[Callable[[], bool]]:
        """A run is in progress inside the block; yields its `should_stop`, which takes well under a microsecond."""
        flag = threading.Event()
        with self._lock:
            self._under_way.append(flag)
        try:
            yield flag.is_set
        finally:
            with self._lock:
                self._under_way.remove(flag)
