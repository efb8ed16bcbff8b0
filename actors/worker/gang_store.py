"""The address at which other workers meet this one for a run that they share. Opened when it is first asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelpool.pool.devices.torch_api.process_groups import TCPStore

LOOPBACK = "127.0.0.1"


class GangStore:
    """The meeting place of the gangs that a worker leads. Any thread may ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    def address(self, host: str) -> str:
        """Return "host:port". Opens the store the first time: only then is torch's code for process groups imported."""
        from modelpool.pool.inference.gang.meeting_store import open_store

        with self._lock:
            if self._store is None:
                self._store = open_store(host)
            return f"{host}:{self._store.port}"

    def close(self) -> None:
        """Close the store. Idempotent."""
        with self._lock:
            self._store = None
