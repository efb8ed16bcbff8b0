"""Chooses between passes of one and of several images by the load: a rule for requests that clients wait for.

A request for a pass of several images pays for the empty rows while few others come, and single passes serve fewer
requests per second. So the size with the smaller expected 99th percentile is chosen when a request comes, from the
arrivals before it alone, and recorded with it as any size: its bytes depend on nothing else. Not in the pool.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import exp, inf

#: arrivals from which the rate is estimated, and from how many on
WINDOW = 200
LEAST_ARRIVALS = 10
#: the other size is chosen if it is expected to be so many times better: near equality, requests of both sizes would
#: wait for each other
HYSTERESIS = 1.15
#: a share of the servers that is busy, from which on requests wait ever longer
MOST_BUSY = 0.98
TAIL = 0.01


class SizeByLoad:
    """The sizes of the passes of requests, in the order in which they come."""

    def __init__(self, rows: int, gpus: int, seconds: Callable[[int, int], float]) -> None:
        """`seconds` of a request of so many steps, in passes of so many rows, alone on a GPU."""
        self._rows = rows
        self._gpus = gpus
        self._seconds = seconds
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._chosen = rows

    def size_for(self, at: float, steps: int) -> int:
        """Return the size for a request that comes now, which is noted."""
        self._arrivals.append((at, steps))
        if len(self._arrivals) < LEAST_ARRIVALS:
            return self._chosen
        rate = (len(self._arrivals) - 1) / (at - self._arrivals[0][0])
        steps_of = Counter(steps for _, steps in self._arrivals)

        def expected(rows: int) -> float:
            # each row of a pass serves a request
            runs = {self._seconds(steps, rows): count for steps, count in steps_of.items()}
            return tail_seconds(rate, runs, self._gpus * rows)

        single, shared = expected(1), expected(self._rows)
        if shared == inf or single > HYSTERESIS * shared:
            self._chosen = self._rows
        elif shared > HYSTERESIS * single:
            self._chosen = 1
        return self._chosen


def tail_seconds(rate: float, runs: Mapping[float, int], servers: int) -> float:
    """Return the 99th percentile of wait and run together, for Poisson arrivals at a rate per second, of runs of these
    seconds as often as said; infinity if the servers do not keep up. Waits have the exponential tail of a queue with so
    many servers, scaled to the variation of the runs (Allen and Cunneen)."""
    count = sum(runs.values())
    mean = sum(seconds * often for seconds, often in runs.items()) / count
    square = sum(seconds**2 * often for seconds, often in runs.items()) / count
    busy = rate * mean / servers
    if busy >= MOST_BUSY:
        return inf
    waits = _erlang_c(servers, rate * mean)
    scale = square / mean / 2 / (servers * (1 - busy))

    def beyond(at: float) -> float:
        shares = (often * (1.0 if at < run else waits * exp((run - at) / scale)) for run, often in runs.items())
        return sum(shares) / count

    low, high = 0.0, max(runs)
    while beyond(high) > TAIL:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > TAIL else (low, middle)
    return high


def _erlang_c(servers: int, offered: float) -> float:
    """Return the share of arrivals that wait, by Erlang's formula."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))
