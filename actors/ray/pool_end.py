"""`PoolEndWatch`: notices that a pool which this process has joined has ended, and leaves its Ray in time. Ray ends
every process that stays connected without its control service, after 60 s, by an abort of its C++ code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from modelpool.actors.ray.control_service import ControlService

logger = logging.getLogger(__name__)

#: interval of looking
WATCH_SECONDS = 2.0
#: the process of the pool is gone as often before the pool counts as ended
LOOKS = 2


class PoolEndWatch:
    """Watches one pool in a thread of its own, until it ends or `close`."""

    def __init__(
        self,
        name: str,
        control_service: ControlService,
        is_running: Callable[[], bool],
        leave: Callable[[], None],
        interval_seconds: float = WATCH_SECONDS,
    ) -> None:
        """`is_running` says whether the process of the pool runs, as far as this machine knows. `leave` disconnects
        from Ray; it is called once, when no call of the connection waits any more.
        """
        self._name = name
        self._control_service = control_service
        self._is_running = is_running
        self._leave = leave
        self._interval_seconds = interval_seconds
        self._closing = threading.Event()
        self._reason = ""
        self._thread = threading.Thread(target=self._watch, name="watch the pool", daemon=True)
        self._thread.start()

    def reason(self) -> str:
        """Return why the pool has ended, once this process has left its Ray; "" before."""
        return self._reason

    def stop(self) -> None:
        """Stop watching, without waiting for a look that is under way."""
        self._closing.set()

    def close(self) -> None:
        """Stop watching. Waits while this process leaves Ray. Idempotent."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        missing = 0
        while not self._closing.wait(self._interval_seconds):
            missing = 0 if self._is_running() else missing + 1
            problem = f"the pool {self._name!r} has ended" if missing >= LOOKS else self._control_service.problem()
            if problem:
                logger.warning("%s", problem)
                self._control_service.end(problem)
                self._leave()
                self._reason = problem
                return
