"""Decides which workers to ask whether they answer, and when a silent one is suspect or lost. Pure.

Every message of a worker proves that it answers; only one that sent nothing in an interval is asked. A worker answers
on a thread of its own, during runs too: torch releases the interpreter lock in its kernels. So silence means that the
process is stopped, that something keeps the lock, or that its machine hangs.

The time until a worker is lost follows from what would be repeated: giving up too soon costs the run, waiting costs the
same time of a GPU. Waiting as long as the run is expected to take costs at most twice the better choice, whatever is
the case (the ski rental problem); the bounds are multiples of the interval.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)

#: intervals of silence after which a worker is reported as not answering
SUSPECT_BEATS = 2
#: bounds of the silence after which it is lost: 30 s and 5 minutes with the default interval. Imports and first loads
#: may keep the interpreter lock for seconds on a busy machine
LEAST_BEATS, MOST_BEATS = 10, 100


def patience_seconds(interval_seconds: float, repeated_seconds: float | None) -> float:
    """Return the silence after which a worker is lost.

    repeated_seconds  the expected length of its run, 0 if it is idle; None if unknown: a first run of its kind, a start
    """
    least, most = LEAST_BEATS * interval_seconds, MOST_BEATS * interval_seconds
    return most if repeated_seconds is None else min(most, max(least, repeated_seconds))


@dataclass(slots=True)
class _Watched:
    """One worker: whether it sent something since the last beat, and whether a question is open."""

    heard: bool = False
    asked: bool = False
    silent_seconds: float = 0.0


class Heartbeats(Generic[_Key]):
    """The silence of workers, by any key. The caller calls `beat` once per interval, and asks what it returns."""

    def __init__(self, interval_seconds: float, now: float) -> None:
        self.interval_seconds = interval_seconds
        self._workers: dict[_Key, _Watched] = {}
        self._beat_at = now

    def watch(self, key: _Key) -> None:
        """Start to watch a worker. Idempotent."""
        self._workers.setdefault(key, _Watched())

    def forget(self, key: _Key) -> None:
        """Stop to watch a worker. Idempotent."""
        self._workers.pop(key, None)

    def heard(self, key: _Key) -> None:
        """The worker sent something."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.heard, worker.asked, worker.silent_seconds = True, False, 0.0

    def beat(self, now: float) -> list[_Key]:
        """An interval has passed: return the workers to ask now.

        A beat that comes late counts as two intervals at most: then this process was stopped itself, and the answers
        wait to be read.
        """
        passed_seconds = min(now - self._beat_at, 2 * self.interval_seconds)
        self._beat_at = now
        to_ask = []
        for key, worker in self._workers.items():
            if worker.asked:
                worker.silent_seconds += passed_seconds
            elif not worker.heard:
                worker.asked = True
                to_ask.append(key)
            worker.heard = False
        return to_ask

    def silent(self) -> dict[_Key, float]:
        """Return the suspects, and for how many seconds they have not answered."""
        least = SUSPECT_BEATS * self.interval_seconds
        return {key: worker.silent_seconds for key, worker in self._workers.items() if worker.silent_seconds >= least}
