"""`LatestQueue`: a thread that does things one after the other, of which only the latest of each key waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class LatestQueue:
    """Actions by key, on one thread, which starts with the first of them. Nothing here waits for an action, except
    `flush`; an action that raises is logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._current: Hashable | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def has(self, key: Hashable) -> bool:
        """Return whether an action of `key` waits or is in progress."""
        with self._changed:
            return key in self._waiting or (self._current == key and self._current is not None)

    def waits(self, key: Hashable) -> bool:
        """Return whether an action of `key` waits."""
        with self._changed:
            return key in self._waiting

    def put(self, key: Hashable, action: Callable[[], None]) -> None:
        """Do `action` after those that wait, in place of one of `key` that waits. Ignored once closed."""
        with self._changed:
            if self._closed:
                return
            self._waiting.pop(key, None)
            self._waiting[key] = action
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until nothing waits or is in progress, at most `seconds`; return whether that is so."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._current is not None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def close(self) -> None:
        """Drop what waits, and end the thread after the action in progress, without waiting for it. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                self._current = next(iter(self._waiting))
                action = self._waiting.pop(self._current)
            try:
                action()
            except Exception:
                logger.exception("%s: %s failed", self._name, self._current)
            finally:
                del action  # its arrays
                with self._changed:
                    self._current = None
                    self._changed.notify_all()
