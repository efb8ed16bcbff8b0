"""`Interrupt`: stops the run that is under way, once, from any thread.

What a run asks at each layer and step is a flag of its own, made when it begins; so a request is never left over for
the next one. Knows no run; torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Shared by whoever runs and whoever wants to stop it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: one event for each run that is under way: usually none or one
        self._under_way: list[threading.Event] = []

    def request(self) -> bool:
        """Ask the runs that are under way to stop at their next layer or step.

        Returns whether there was one. With none nothing happens, now or later.
        """
        with self._lock:
            for flag in self._under_way:
                flag.set()
            return bool(self._under_way)

    @contextmanager
    def run(self) -> Iterator[Callable[[], bool]]:
        """A run is under way inside the block; yields its `should_stop`, which costs well under a microsecond."""
        flag = threading.Event()
        with self._lock:
            self._under_way.append(flag)
        try:
            yield flag.is_set
        finally:
            with self._lock:
                self._under_way.remove(flag)
