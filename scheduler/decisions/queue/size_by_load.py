"""Chooses between passes of one and of several images by the load, for requests that clients wait for. Pure state.

A request for a pass of several images pays for the empty rows while few others come, and single passes serve fewer
requests per second. So the size with the smaller expected 99th percentile is chosen when a request comes, from the
arrivals before it alone: its bytes depend on the size, and on nothing else.

Rules
1. The rate of a kind of request is the rate of its last `WINDOW` arrivals, less its standard deviation (two of them
   where arrivals are few): one larger pass in a hundred makes the slowest percent as slow as if all were larger. Where
   the latest few came so much faster or slower that chance does not explain it (`SURE` standard deviations), it is the
   nearest rate that explains them. So a burst counts after some arrivals, and so does its end.
2. Other work, other kinds at their sizes and requests that choose no size, waits in the same queue
   (`scheduler.decisions.queue.mixed_load`). What a larger pass saves depends on how many of its rows are taken while
   others wait.
3. Queues take time to grow and to shrink. So the expected tail is at least the longest run after the queue that the
   arrivals so far would have left in passes of this size alone, and at most as much later as this queue grows in the
   next `AHEAD` arrivals at this rate, and the standard deviation of their work.
4. The other size is chosen if it is expected to be `HYSTERESIS` times better (larger passes beside other work:
   `MIXED_HYSTERESIS` times): near equality, requests of both sizes would wait for each other.
5. A kind of which little is known has single passes: its first requests come to a pool that was idle.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt

from modelpool.scheduler.decisions.queue.mixed_load import MOST_BUSY, LoadOfKind, MixedLoad, erlang_c, mean_open_rows

#: arrivals from which a rate is estimated, from how many on, and the parts of them that show a change
WINDOW = 400
LEAST_ARRIVALS = 4
RECENT = (200, 100, 50, 25, 12)
#: standard deviations
SURE = 3.0
HYSTERESIS, MIXED_HYSTERESIS = 1.15, 1.3
#: arrivals for which a queue may still grow
AHEAD = 200
#: the longest queue of one size that is remembered, as a multiple of the expected tail of the other
LONGEST_QUEUE = 2.0
TAIL = 0.01
#: kinds of requests that are remembered, the latest
MOST_KINDS = 64
#: run times count as equal within this factor
SAME_SECONDS = 1.05
#: servers that are computed with; more are scaled down to these, which expects longer waits
MOST_SERVERS = 512


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """What a request takes.

    rows            of the passes that pay
    single_seconds  of a worker, in passes of one
    shared_seconds  from its first step to its end in passes of `rows`, which serve as many requests meanwhile
    """

    rows: int
    single_seconds: float
    shared_seconds: float

    def run_seconds(self, size: int) -> float:
        """How long it runs in passes of this size."""
        return self.single_seconds if size == 1 else self.shared_seconds

    def worker_seconds(self, size: int) -> float:
        """Its part of the time of a worker in full passes of this size."""
        return self.run_seconds(size) / size


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """A size, and the expectation behind it: seconds of the slowest percent in passes of one and of several."""

    size: int
    per_second: float
    single_tail: float = 0.0
    shared_tail: float = 0.0

    @property
    def reason(self) -> str:
        """Why it is that, for users."""
        if not self.single_tail:
            return "by the load: too few requests like it came before to expect another one soon"
        return (
            f"by the load: {self.per_second:.3g} requests like it per second came before; the slowest of a hundred "
            f"should take {self.single_tail:.3g} s in passes of one, and {self.shared_tail:.3g} s in shared ones"
        )


def _latest_times() -> deque[float]:
    return deque(maxlen=WINDOW)


def _latest_costs() -> deque[SizeCosts]:
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class _Sums:
    """What the latest requests of a kind take in passes of one size.

    seconds, squares  sums of their times of a worker in full passes, and of the squares
    runs              how many of them run how long, in powers of `SAME_SECONDS`
    queue_seconds     for which all requests so far would keep the workers busy, if all had this size
    """

    seconds: float = 0.0
    squares: float = 0.0
    runs: Counter[int] = field(default_factory=Counter)
    queue_seconds: float = 0.0

    def count(self, worker_seconds: float, run_seconds: float, change: int) -> None:
        """Add a request (1) or remove it (-1)."""
        self.seconds = max(0.0, self.seconds + change * worker_seconds)
        self.squares = max(0.0, self.squares + change * worker_seconds**2)
        power = round(log(max(run_seconds, 1e-9)) / log(SAME_SECONDS))
        self.runs[power] += change
        if not self.runs[power]:
            del self.runs[power]

    def load(self, per_second: float, size: int) -> LoadOfKind:
        """Return these requests as a part of a load, in passes of `size`."""
        count = self.runs.total()
        mean, square = self.seconds / count * size, self.squares / count * size**2
        return LoadOfKind(per_second, size, mean, square, mean_open_rows(per_second * mean, size))

    def tail_seconds(self, per_second: float, size: int, workers: int, mixed: MixedLoad | None) -> float:
        """Return the expected 99th percentile in passes of `size`, of which each row serves a request; `mixed`: with
        all that waits in the same queue, if that is more."""
        runs = {SAME_SECONDS**power: often for power, often in self.runs.items()}
        count = self.runs.total()
        mean = self.seconds / count
        # runs that have begun are half done, and nobody waits for their rest as long as a worker is free
        least = max(runs) + max(0.0, self.queue_seconds - mean * size / 2)
        if mixed is None:
            growth = max(0.0, mean / workers - 1.0 / per_second)
            expected = tail_seconds(per_second, runs, workers * size)
        else:
            growth = max(0.0, mixed.least_busy - 1.0) / per_second
            expected = max(runs) + mixed.tail_wait_seconds(TAIL)
        most = least + AHEAD * growth + sqrt(AHEAD * self.squares / count) / workers
        return min(max(least, expected), most)


@dataclass(slots=True)
class _Kind:
    """The latest arrivals of a kind of request, and the size that they have.

    open_rows  of larger passes that are taken if nobody waits, beside other work; None without such work, where joining
               fills the passes of a queue
    """

    times: deque[float] = field(default_factory=_latest_times)
    costs: deque[SizeCosts] = field(default_factory=_latest_costs)
    size: int = 1
    single: _Sums = field(default_factory=_Sums)
    shared: _Sums = field(default_factory=_Sums)
    open_rows: float | None = None
    per_second: float = 0.0

    def add(self, at: float, costs: SizeCosts) -> None:
        """Note a request."""
        if len(self.costs) == WINDOW:
            self._count(self.costs[0], -1)
        self.times.append(at)
        self.costs.append(costs)
        self._count(costs, 1)

    def _count(self, costs: SizeCosts, change: int) -> None:
        for sums, size in ((self.single, 1), (self.shared, costs.rows)):
            sums.count(costs.worker_seconds(size), costs.run_seconds(size), change)

    def worker_seconds(self, costs: SizeCosts, size: int, queue_seconds: float) -> float:
        """The time of a worker that a request takes in passes of `size`, behind a queue that fills them."""
        rows = float(size)
        if size > 1 and self.open_rows is not None:
            rows = min(rows, max(self.open_rows, 1.0 + self.per_second * queue_seconds))
        return costs.run_seconds(size) / rows

    def load(self, at: float) -> LoadOfKind | None:
        """Return its requests as a part of the load, at the size that they have; None if too few came."""
        per_second = arrival_rate(self.times, at)
        if not per_second:
            return None
        return (self.single if self.size == 1 else self.shared).load(per_second, self.size)


class SizeByLoad:
    """The sizes of the passes of requests, in the order in which they come."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        #: requests that choose no size, with their seconds of a worker
        self._others = _Kind()
        self._workers = 1
        self._latest_at: float | None = None

    def note_other(self, at: float, worker_seconds: float) -> None:
        """Note a request that has its size in any case, and takes so many seconds of a worker."""
        costs = SizeCosts(1, worker_seconds, worker_seconds)
        self._queue(self._others, at, costs)
        self._others.add(at, costs)

    def choose(self, kind: Hashable, at: float, workers: int, costs: SizeCosts) -> SizeChoice:
        """Return the size for a request that comes now, which is noted. `workers` may run it."""
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        self._workers = workers
        self._queue(known, at, costs)
        known.add(at, costs)
        known.per_second = per_second = arrival_rate(known.times, at)
        if not per_second:
            known.size = 1
            return SizeChoice(1, 0.0)
        single, shared = self._tails(known, at, costs.rows)
        # longer queues decide nothing, and would last
        known.single.queue_seconds = min(known.single.queue_seconds, LONGEST_QUEUE * shared)
        known.shared.queue_seconds = min(known.shared.queue_seconds, LONGEST_QUEUE * single)
        if single > (HYSTERESIS if known.open_rows is None else MIXED_HYSTERESIS) * shared:
            known.size = costs.rows
        elif shared > HYSTERESIS * single:
            known.size = 1
        return SizeChoice(min(known.size, costs.rows), per_second, single, shared)

    def _tails(self, known: _Kind, at: float, rows: int) -> tuple[float, float]:
        """Return the expected tails of a kind in passes of one and of `rows`."""
        others = [other for other in (*self._kinds.values(), self._others) if other is not known]
        loads = [load for other in others if (load := other.load(at)) is not None]
        known.open_rows, tails = None, []
        for sums, size in ((known.single, 1), (known.shared, rows)):
            mixed = None
            if loads:
                own = sums.load(known.per_second, size)
                mixed = MixedLoad((own, *loads), self._workers)
                known.open_rows = own.open_rows
            tails.append(sums.tail_seconds(known.per_second, size, self._workers, mixed))
        return tails[0], tails[1]

    def _queue(self, kind: _Kind, at: float, costs: SizeCosts) -> None:
        """Count a request of a kind in the queues that there would be by now, if each kind had had each of its sizes
        and the others those that they have."""
        since = 0.0 if self._latest_at is None else at - self._latest_at
        self._latest_at = at
        for known in self._kinds.values():
            for sums, size in ((known.single, 1), (known.shared, costs.rows)):
                of_size = size if known is kind else kind.size
                more = kind.worker_seconds(costs, min(of_size, costs.rows), sums.queue_seconds)
                sums.queue_seconds = max(0.0, sums.queue_seconds - since) + more / self._workers


def arrival_rate(times: Sequence[float], at: float) -> float:
    """Rule 1: requests per second at this time, as far as the latest arrivals tell; 0 if they do not."""
    count = len(times)
    if count < LEAST_ARRIVALS:
        return 0.0
    unsure = max(1.0, 2.0 - 0.1 * sqrt(count)) / sqrt(count)
    found = (count - 1) / max(at - times[0], 1e-9) * (1.0 - unsure)
    for low, high in _likely(times, at):
        found = min(max(found, low), high)
    return found


def _likely(times: Sequence[float], at: float) -> Iterator[tuple[float, float]]:
    """The rates that explain the latest arrivals, from long parts to short ones."""
    for recent in RECENT:
        if recent <= len(times):
            rate = (recent - 1) / max(at - times[-recent], 1e-9)
            yield rate * (1.0 - SURE / sqrt(recent)), rate * (1.0 + SURE / sqrt(recent))


def tail_seconds(rate: float, runs: Mapping[float, int], servers: int) -> float:
    """Return the 99th percentile of wait and run together, for Poisson arrivals at a rate per second, of runs of these
    seconds as often as said; infinity if the servers do not keep up. Waits have the exponential tail of a queue with so
    many servers, scaled to the variation of the runs (Allen and Cunneen)."""
    if servers > MOST_SERVERS:
        rate, servers = rate * MOST_SERVERS / servers, MOST_SERVERS
    count = sum(runs.values())
    mean = sum(seconds * often for seconds, often in runs.items()) / count
    square = sum(seconds**2 * often for seconds, often in runs.items()) / count
    busy = rate * mean / servers
    if busy >= MOST_BUSY:
        return inf
    waits = erlang_c(servers, rate * mean)
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
