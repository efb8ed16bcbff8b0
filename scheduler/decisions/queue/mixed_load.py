"""Expects how long requests wait that share workers with requests of other kinds. Pure.

All kinds wait in one queue, so that each adds to the wait of all. A pass takes as long with free rows as with none
(`scheduler.decisions.queue.size_by_load`), so the time of a worker that a request takes depends on how many share its
pass. The longer requests wait, the more these are, since requests of the same kind that came meanwhile begin
together. So the wait is the one that passes of so many rows explain.

The wait of a request follows the tail of a queue with so many workers and Poisson arrivals, scaled to the variation of
the runs (Allen and Cunneen), where a run is a single one or a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log

#: a share of the workers that is busy, from which on requests wait ever longer
MOST_BUSY = 0.98
#: kinds that are computed with one by one, of those that take the most; the others count as they are without a queue
MOST_KINDS_MIXED = 8
#: the longest wait that is looked for
LONGEST_WAIT_SECONDS = 1e5
#: halvings of the interval in which a wait is looked for
HALVINGS = 12
#: rows in flight from which on the last pass counts as half full
MANY_ROWS = 600
#: workers that are computed with; more are scaled down to these, which expects longer waits
MOST_WORKERS = 64


@dataclass(frozen=True, slots=True)
class LoadOfKind:
    """Requests of a kind.

    per_second   requests that come
    rows         of their passes; 1: single runs
    run_seconds  mean time of a run or a pass
    run_squares  mean of the square of that time, in seconds squared
    open_rows    of a pass that are taken if nobody waits
    """

    per_second: float
    rows: int
    run_seconds: float
    run_squares: float
    open_rows: float

    def rows_taken(self, wait_seconds: float) -> float:
        """Rows of a pass that are taken if requests wait so long: those that come meanwhile begin together."""
        if self.rows == 1:
            return 1.0
        return min(float(self.rows), max(self.open_rows, 1.0 + self.per_second * wait_seconds))

    def busy_workers(self, wait_seconds: float) -> float:
        """Workers that these requests keep busy if they wait so long."""
        return self.per_second / self.rows_taken(wait_seconds) * self.run_seconds


@dataclass(frozen=True, slots=True)
class _Wait:
    """What requests wait with so busy workers: in the mean, and the scale and the share of those that wait."""

    mean_seconds: float
    scale_seconds: float
    share: float


class MixedLoad:
    """All kinds that wait for so many workers.

    least_busy  the share of the workers that are busy if all passes are full; above 1 the queue grows
    """

    def __init__(self, kinds: Sequence[LoadOfKind], workers: int) -> None:
        by_size = sorted(kinds, key=lambda kind: -kind.busy_workers(0.0))
        self._kinds = by_size[:MOST_KINDS_MIXED]
        rest = by_size[MOST_KINDS_MIXED:]
        self._rest_busy = sum(kind.busy_workers(0.0) for kind in rest)
        self._rest_squares = sum(kind.per_second / kind.rows_taken(0.0) * kind.run_squares for kind in rest)
        self._workers = workers
        self.least_busy = self._busy(inf)[0] / workers

    def tail_wait_seconds(self, tail: float) -> float:
        """Return the wait that a share of `tail` exceeds; infinity if the workers do not keep up."""
        wait = self._explained()
        if wait is None or wait.share <= tail:
            return inf if wait is None else 0.0
        return wait.scale_seconds * log(wait.share / tail)

    def _explained(self) -> _Wait | None:
        """Return the wait with which passes have so many rows that requests wait so long; None if there is none."""
        if self.least_busy >= MOST_BUSY:
            return None
        low, high = 0.0, 1.0
        while self._wait(high).mean_seconds > high:
            low, high = high, 2.0 * high
            if high > LONGEST_WAIT_SECONDS:
                return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self._wait(middle).mean_seconds > middle else (low, middle)
        return self._wait(high)

    def _busy(self, wait_seconds: float) -> tuple[float, float]:
        """Return the workers that are busy, and the squares of their runs for each second."""
        busy, squares = self._rest_busy, self._rest_squares
        for kind in self._kinds:
            runs = kind.per_second / kind.rows_taken(wait_seconds)
            busy += runs * kind.run_seconds
            squares += runs * kind.run_squares
        return busy, squares

    def _wait(self, wait_seconds: float) -> _Wait:
        """Return what requests wait if passes have the rows of this wait."""
        busy, squares = self._busy(wait_seconds)
        idle = 1.0 - busy / self._workers
        if idle <= 1.0 - MOST_BUSY:
            return _Wait(inf, inf, 1.0)
        counted = min(self._workers, MOST_WORKERS)
        share = erlang_c(counted, busy * counted / self._workers)
        scale = squares / busy / 2.0 / (self._workers * idle)
        return _Wait(share * scale, scale, share)


def mean_open_rows(in_flight: float, rows: int) -> float:
    """Return the rows that are taken of an open pass, if `in_flight` requests run in the mean, at times that are as
    random as their arrivals, and fill one pass of `rows` after the other."""
    if rows == 1 or in_flight <= 0.0:
        return 1.0
    if in_flight > MANY_ROWS:
        return in_flight / (in_flight / rows + 0.5)
    # the mean number of passes is the sum of the probabilities that more than 0, `rows`, 2 `rows`, ... run
    probability = exp(-in_flight)
    passes = beyond = 1.0 - probability
    number = 0
    while beyond > 1e-6:
        for _ in range(rows):
            number += 1
            probability *= in_flight / number
            beyond -= probability
        passes += max(0.0, beyond)
    return in_flight / passes


def erlang_c(servers: int, offered: float) -> float:
    """Return the share of arrivals that wait, by Erlang's formula."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))
