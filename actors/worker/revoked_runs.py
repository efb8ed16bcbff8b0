"""`RevokedRuns`: which of the runs that wait on a worker do not start, as the controller took them back.

A controller counts its runs from 1 and sends them in that order, so a run that has started is known by its number.
"""

from __future__ import annotations

import threading


class RevokedRuns:
    """The start of a run and its revocation: whichever comes first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: number of the latest run that was to start
        self._latest = 0
        #: runs that are to start later and must not; at most those that wait here
        self._revoked: set[int] = set()

    def start(self, run: int) -> bool:
        """Return whether the run may start. From now on it cannot be revoked."""
        with self._lock:
            self._latest = max(self._latest, run)
            is_revoked = run in self._revoked
            self._revoked = {other for other in self._revoked if other > run}
            return not is_revoked

    def revoke(self, run: int) -> bool:
        """Take a run back; return False if that is too late."""
        with self._lock:
            if run <= self._latest:
                return run in self._revoked
            self._revoked.add(run)
            return True
