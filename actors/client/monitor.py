"""`Monitor`: the lock around the state of a submission, with waits for its changes and functions called after them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

#: maximum delay of Ctrl-C, see `Monitor.wait_until`
_SIGNAL_SECONDS = 0.5


class Monitor:
    """Held within a `with` block, by one thread, which may enter it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._changed.__enter__()

    def __exit__(self, *error: object) -> None:
        self._changed.__exit__(None, None, None)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of the progress, in a thread of the pool. It must not block, nor call
        methods of the submission.
        """
        with self:
            self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Call `changed` no longer. Idempotent."""
        with self:
            self._watchers = [known for known in self._watchers if known != changed]

    def wake(self) -> None:
        """Wake the threads that wait. Requires the lock."""
        self._changed.notify_all()

    def notify(self) -> None:
        """Wake the threads that wait, and call the watchers. Requires the lock."""
        self.wake()
        for changed in self._watchers:
            changed()

    def wait_until(self, is_settled: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait for a condition, and return whether it holds. Requires the lock. Waits in short pieces: a signal that
        arrives just before a thread falls asleep does not wake it, and Ctrl-C would only take effect at the next
        change, possibly hours later.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_settled():
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, _SIGNAL_SECONDS))
        return True
