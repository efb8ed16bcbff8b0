"""`PoolSeries`: the load of the pool over the last hour, in a bounded number of samples, for the charts of the page.

A sample is the mean of the states that were noted in its time. Totals come from counters of the pool, so that a rate
does not depend on how often the pool is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.actors.control.status import PoolStatus, WorkerStatus

#: time of a sample, and samples that are kept: an hour
SAMPLE_SECONDS, MOST_SAMPLES = 15.0, 240
#: workers with a series of their own: the first ones by name
MOST_WORKERS = 16
_UP = frozenset({"idle", "busy"})


class PoolSeries:
    """The samples of one pool, oldest first."""

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self._sample_seconds = sample_seconds
        self._samples: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_SAMPLES)
        self._number = 0
        #: states of the sample that is being taken
        self._noted: list[PoolStatus] = []
        #: monotonic seconds at the end of the last sample, and the jobs that had succeeded then; None before the first
        self._before: tuple[float, int] | None = None

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """The samples by number: `at` in seconds since 1970, tasks that wait, images per minute, the share of the
        workers that were busy, and of each worker the percentages of busy time and of used memory."""
        return {str(number): sample for number, sample in self._samples}

    def note(self, status: PoolStatus, now: float, at: float) -> bool:
        """Note the state of the pool at `now` (monotonic seconds) and `at` (seconds since 1970). Return whether it has
        completed a sample."""
        done = status.jobs.get("succeeded", 0)
        if self._before is None:
            self._before = (now, done)
        self._noted.append(status)
        seconds, since = now - self._before[0], done - self._before[1]
        if seconds < self._sample_seconds:
            return False
        # another controller counts from 0; and after a time without questions, a rate would span the whole gap
        is_known = since >= 0 and seconds < 4 * self._sample_seconds
        rate = 60.0 * since / seconds if is_known else None
        self._samples.append((self._number, _sample(self._noted, at, rate)))
        self._number += 1
        self._noted, self._before = [], (now, done)
        return True


def _sample(noted: list[PoolStatus], at: float, rate: float | None) -> dict[str, Any]:
    waiting = [sum(status.waiting.values()) for status in noted]
    return {
        "at": round(at),
        "waiting": round(sum(waiting) / len(waiting), 1),
        "rate": None if rate is None else round(rate, 1),
        "busy": _percent([_busy_share(status) for status in noted]),
        "workers": _workers(noted),
    }


def _busy_share(status: PoolStatus) -> float:
    up = [worker for worker in status.workers if worker.state in _UP]
    return sum(worker.state == "busy" for worker in up) / len(up) if up else 0.0


def _workers(noted: list[PoolStatus]) -> dict[str, list[int]]:
    states: dict[str, list[WorkerStatus]] = {}
    for status in noted:
        for worker in sorted(status.workers, key=lambda worker: _natural(str(worker.id)))[:MOST_WORKERS]:
            states.setdefault(str(worker.id), []).append(worker)
    return {
        name: [
            _percent([float(worker.state == "busy") for worker in of_worker]),
            _percent(
                [worker.used_bytes / worker.capacity_bytes if worker.capacity_bytes else 0 for worker in of_worker]
            ),
        ]
        for name, of_worker in list(states.items())[:MOST_WORKERS]
    }


def _natural(name: str) -> tuple[int, str]:
    """Order gpu-2 before gpu-10."""
    return len(name), name


def _percent(shares: list[float]) -> int:
    return round(100 * sum(shares) / len(shares))
