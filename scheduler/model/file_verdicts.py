"""Which results depend on files with unknown hashes, and what workers have found out about such files.

A worker may use a file before its SHA-256 is known. What it makes until then has an origin: the worker and the state of
the file (`pool.values.specs.spec.JudgedFile`). A result with origins may be read by other tasks: their results have the
same origins. It leaves the pool when all of them are right, and is made again when one is not. Nobody can find out any
more what a worker that is gone has used: its states count as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from modelpool.pool.values.specs.spec import TaskReport, WorkerId

#: a worker, its incarnation, and a state of a file
Origin: TypeAlias = tuple[WorkerId, int, int]
Origins: TypeAlias = frozenset[Origin]
Incarnation: TypeAlias = tuple[WorkerId, int]
NO_ORIGINS: Origins = frozenset()

#: verdicts of a worker that are remembered, for reports that arrive after them; the oldest are forgotten first
MOST_VERDICTS = 4096
#: workers with remembered verdicts, including workers that are gone
MOST_WORKERS = 16384


class FileVerdicts:
    """The verdicts of live workers."""

    def __init__(self) -> None:
        self._known: dict[Incarnation, dict[int, bool]] = {}
        #: workers that have made results with files of unknown hashes
        self.pending: dict[Incarnation, None] = {}

    def note(self, worker: Incarnation, state: int, is_right: bool) -> Origin:
        """Remember a verdict."""
        known = self._known.setdefault(worker, {})
        if len(self._known) > MOST_WORKERS:
            del self._known[next(iter(self._known))]
        known[state] = is_right
        if len(known) > MOST_VERDICTS:
            del known[next(iter(known))]
        return (*worker, state)

    def origins_of(self, report: TaskReport, inputs: Iterable[Origins]) -> Origins | None:
        """Return the origins of a result that are not known to be right; None if one is wrong. `inputs` are the origins
        of what the run has read."""
        found = [(report.worker_id, report.incarnation, state) for state in report.unverified]
        for origins in inputs:
            found.extend(origins)
        if not found:
            return NO_ORIGINS
        left: list[Origin] = []
        for origin in found:
            verdict = self._known.get(origin[:2], {}).get(origin[2])
            if verdict is False:
                return None
            if verdict is None:
                self.pending[origin[:2]] = None
                left.append(origin)
        return frozenset(left)

    def lost(self, is_live: Callable[[WorkerId, int], bool]) -> list[Incarnation]:
        """Forget the workers that are gone; return the ones that have made results with files of unknown hashes."""
        lost = [worker for worker in self.pending if not is_live(*worker)]
        if lost:
            for worker in lost:
                del self.pending[worker]
            self._known = {worker: known for worker, known in self._known.items() if is_live(*worker)}
        return lost
