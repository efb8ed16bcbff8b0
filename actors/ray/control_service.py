"""Checks whether Ray's control service (GCS) answers.

Without it nothing can join or start, calls that need it block, and after 60 s Ray ends every process of the cluster
with an abort of its C++ code. So a program that depends on Ray ends itself before, with a message.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import ray

from modelpool.actors.outputs.results.outcomes import PoolLost

T = TypeVar("T")

#: limit of one check. Measured with Ray 2.60 on loopback: 1 ms; the whole limit if the service is gone or stopped
CHECK_SECONDS = 2.0
#: least interval of two checks
INTERVAL_SECONDS = 3.0
#: silence after which the service counts as lost: well below the 60 s after which Ray aborts, and longer than the start
#: of a new one (measured: 1.7 s) where the cluster keeps its state (KubeRay with Redis)
PATIENCE_SECONDS = 30.0
#: calls that wait look for its end more often
END_SECONDS = 12.0


def answers(timeout_seconds: float = CHECK_SECONDS) -> bool:
    """Return whether the control service of this process's cluster answers. Takes little longer than the timeout."""

    def ask() -> bool:
        try:
            ray._private.worker.global_worker.gcs_client.check_alive([], timeout=timeout_seconds)
        except Exception:  # private: whatever it raises, there is no answer
            return False
        return True

    return bool(answer_within(timeout_seconds + 1.0, ask))


def answer_within(limit_seconds: float, ask: Callable[[], T]) -> T | None:
    """Return what `ask` returns, which raises nothing; None after the limit. For calls of Ray without a timeout: one
    under way when the control service ends, or when this process leaves the cluster, never returns. Its thread stays.
    """
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), name="ask control service", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answers[0] if answers else None


def is_connected_to(address: str) -> bool:
    """Return whether this process is connected to the Ray at an address. Ray itself is not asked: a call of a process
    that has left it starts another Ray."""
    return bool(ray.is_initialized() and ray.get_runtime_context().gcs_address == address)


class ControlService:
    """The control service, as one process sees it. Any thread may call."""

    def __init__(
        self,
        address: str,
        ask: Callable[[], bool] = answers,
        now: Callable[[], float] = time.monotonic,
        patience_seconds: float = PATIENCE_SECONDS,
        is_connected: Callable[[str], bool] = is_connected_to,
    ) -> None:
        self._address = address
        self._is_connected = is_connected
        self._ask = ask
        self._now = now
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._checked_at = -INTERVAL_SECONDS
        self._calls = threading.Condition()
        #: calls of Ray that are under way, and why no other may begin; "" while others may
        self._under_way, self._ended = 0, ""
        #: when the silence began, as far as checks tell; None while it answers
        self._silent_since: float | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Have `end` wait for a call of Ray that is made meanwhile. Raises PoolLost after the end, and after this
        process has left the cluster: Ray would connect it to another one, or start one."""
        with self._calls:
            if reason := self._ended or self._left():
                raise PoolLost(reason)
            self._under_way += 1
        try:
            yield
        finally:
            with self._calls:
                self._under_way -= 1
                self._calls.notify_all()

    def end(self, reason: str, limit_seconds: float = END_SECONDS) -> bool:
        """Let no call begin any more: the service counts as lost, for this reason. Waits for calls under way, and
        returns whether all have ended in time."""
        with self._calls:
            self._ended = self._ended or reason
            return self._calls.wait_for(lambda: not self._under_way, limit_seconds)

    def _left(self) -> str:
        if self._is_connected(self._address):
            return ""
        return (
            f"this program has left the Ray at {self._address}: all its connections to a pool end with the one that it "
            "opened first; close that one last"
        )

    def problem(self) -> str:
        """Return why calls are of no use any more, as a sentence; "" while they are: this program has left the cluster,
        the pool has ended, or the service has not answered any check for the patience. Checks now unless the last check
        is recent, which takes up to `CHECK_SECONDS`."""
        if reason := self._ended or self._left():
            return reason
        with self._lock:
            began = self._now()
            if began - self._checked_at >= INTERVAL_SECONDS:
                self._checked_at = began
                if self._ask():
                    self._silent_since = None
                elif self._silent_since is None:
                    self._silent_since = began
            if self._silent_since is None or self._now() - self._silent_since < self._patience_seconds:
                return ""
            silent_seconds = self._now() - self._silent_since
        return (
            f"the control service of Ray (GCS) at {self._address} has not answered for {silent_seconds:.0f} s: nothing "
            "can start or join, and Ray will end all its processes"
        )
