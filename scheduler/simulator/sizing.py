"""How many GPUs a goal needs, by trying: the search, the goal, and what stands in the way. Pure functions.

Knows figures; not how a simulation is made. That more GPUs are never worse is hoped for, not relied on: what is next to
the answer is tried too, and said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.scheduler.simulator.metrics import Figures

#: of the makespan: jobs that come as late as this leave nothing to gain
ARRIVING = 0.9
#: of the time at work: GPUs that load for longer wait for weights more than for anything else
LOADING = 0.3
#: of all GPU-seconds: GPUs that are busy for longer have no more to give
BUSY = 0.75


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached. None is not asked for.

    deadline_seconds  all jobs are done so long after the first was submitted
    latency_seconds   of the jobs, 99% take no longer than that
    """

    deadline_seconds: float | None = None
    latency_seconds: float | None = None

    def is_met(self, found: Figures) -> bool:
        """Every job succeeded, and in time."""
        return (
            found.succeeded == found.jobs
            and (self.deadline_seconds is None or found.makespan_seconds <= self.deadline_seconds)
            and (self.latency_seconds is None or found.latency.p99_seconds <= self.latency_seconds)
        )


@dataclass(frozen=True, slots=True)
class LeastCount:
    """The answer of a search.

    count      the least that was found to do; None when none of those tried does
    tried      count -> whether it does, of all that were tried
    is_steady  of the counts tried, all below `count` fail and all from it on do
    """

    count: int | None
    tried: dict[int, bool]
    is_steady: bool


def least_count(does: Callable[[int], bool], most: int, first: int = 1) -> LeastCount:
    """The least count up to `most` that does: doubling from `first` on, then halving the gap.

    What is found does, and one less does not. Two less and one more are tried as well, and where two less does, the
    search goes on downwards from there.
    """
    tried: dict[int, bool] = {}

    def check(count: int) -> bool:
        if count not in tried:
            tried[count] = count > 0 and does(count)
        return tried[count]

    low, high = 0, min(max(first, 1), most)
    while not check(high):
        if high == most:
            return LeastCount(None, tried, True)
        low, high = high, min(2 * high, most)
    while True:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if check(middle) else (middle, high)
        if high <= 2 or not check(high - 2):
            break
        low, high = 0, high - 2
    if high < most:
        check(high + 1)
    tried.pop(0, None)
    steady = all(meets == (count >= high) for count, meets in tried.items())
    return LeastCount(high, dict(sorted(tried.items())), steady)


def first_guess(work_seconds: float, goal: Goal, last_arrival_seconds: float) -> int:
    """GPUs that are busy all the time until the deadline with that much computing; what to try first."""
    seconds = goal.deadline_seconds if goal.deadline_seconds is not None else last_arrival_seconds
    return max(1, int(work_seconds / seconds)) if seconds > 0 else 1


def bottleneck(found: Figures) -> str:
    """What its time went into, in a sentence."""
    loading, busy = f"{found.loading_share:.0%}", f"{found.busy_share:.0%}"
    if found.last_arrival_seconds >= ARRIVING * found.makespan_seconds > 0:
        return f"arrivals: jobs come until shortly before the end, and GPUs are busy for {busy} of the time"
    if found.loading_share >= LOADING:
        return f"loading: GPUs move weights for {loading} of the time that they are at work"
    if found.busy_share >= BUSY:
        return f"computing: GPUs are busy for {busy} of the time, and {loading} of that is loading"
    return f"the longest chain: GPUs are busy for {busy} of the time, and wait for stages of the last jobs"
