"""`WorkerLease`: which controller a worker serves, and how long it waits for a call when none comes.

A worker of a pool that outlives its controller belongs to no process. Each controller of the pool has a larger epoch
than those before it. Rules
1. A call has the epoch of its controller. One of an older epoch is rejected, so that a controller that was replaced
   without noticing changes nothing.
2. Every accepted call renews the lease. When it is over, the worker ends itself: nobody else would.

Knows no Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: least time between two checks of a lease
_LEAST_SECONDS = 0.05
#: part of a lease by which its end is put off, and the most
_GRACE_PART, MOST_GRACE_SECONDS = 0.1, 5.0


class OlderEpoch(RuntimeError):
    """A call of a controller that another one has replaced. The message has both epochs."""


class WorkerLease:
    """The lease of one worker. Thread-safe: each method reads or replaces single values."""

    def __init__(self, epoch: int = 0, seconds: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """`seconds` without a call after which the lease is over; None for a worker that ends with its controller."""
        self.epoch = epoch
        self._seconds = seconds
        self._now = now
        self._renewed_at = now()

    def check(self, epoch: int) -> None:
        """Accept a call of this epoch. Raises OlderEpoch."""
        if epoch < self.epoch:
            raise OlderEpoch(f"this worker serves the controller of epoch {self.epoch}; the call is of epoch {epoch}")
        self._renewed_at = self._now()

    def pass_to(self, epoch: int) -> None:
        """Serve the controller of this epoch from now on. Raises OlderEpoch."""
        self.check(epoch)
        self.epoch = epoch

    @property
    def left_seconds(self) -> float | None:
        """Seconds until the lease is over, negative afterwards; None if it has no end."""
        return None if self._seconds is None else self._renewed_at + self._seconds - self._now()

    @property
    def grace_seconds(self) -> float:
        """How much longer than the lease its end is put off."""
        return min(MOST_GRACE_SECONDS, (self._seconds or 0.0) * _GRACE_PART)


class LeaseWatch:
    """A thread that calls `on_over` once when the lease is over."""

    def __init__(self, lease: WorkerLease, on_over: Callable[[], None]) -> None:
        self._lease = lease
        self._on_over = on_over
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="worker lease", daemon=True)

    def start(self) -> None:
        """Start the thread, if the lease has an end."""
        if self._lease.left_seconds is not None:
            self._thread.start()

    def close(self) -> None:
        """End the thread without a call. Idempotent."""
        self._ended.set()

    def _watch(self) -> None:
        while (left_seconds := self._lease.left_seconds) is not None and not self._ended.is_set():
            if left_seconds <= 0.0:
                # this process may have been stopped: calls of its controller wait, and renew the lease
                if not self._ended.wait(self._lease.grace_seconds) and (self._lease.left_seconds or 0.0) <= 0.0:
                    self._on_over()
                    return
                continue
            self._ended.wait(max(left_seconds, _LEAST_SECONDS))
