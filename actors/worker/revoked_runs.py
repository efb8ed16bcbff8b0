"""`RevokedRuns`: which of the runs that wait on a worker do not start, as the controller took them back.

A controller counts its runs from 1. Each starts once or never, but not always in that order: runs of a call that
failed are sent again alone, while later ones have started.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

#: runs that have started, or were revoked, and are remembered. More than wait on a worker at a time, with runs of
#: calls that are sent again
MOST_REMEMBERED = 1024


class RevokedRuns:
    """The start of a run and its revocation: whichever comes first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: whether each of the latest runs may start, decided by its start or its revocation
        self._decided: OrderedDict[int, bool] = OrderedDict()
        #: the largest number that is not remembered any more: these have started
        self._forgotten = 0

    def start(self, run: int) -> bool:
        """Return whether the run may start. From now on it cannot be revoked."""
        with self._lock:
            return self._decide(run, True)

    def revoke(self, run: int) -> bool:
        """Take a run back; return False if that is too late."""
        with self._lock:
            return not self._decide(run, False)

    def _decide(self, run: int, may_start: bool) -> bool:
        decided = self._decided.setdefault(run, may_start or run <= self._forgotten)
        if len(self._decided) > MOST_REMEMBERED:
            self._forgotten = max(self._forgotten, self._decided.popitem(last=False)[0])
        return decided
