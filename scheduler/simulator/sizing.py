"""Finds how many GPUs a goal needs by trial: the search, the goal, and the bottleneck. Pure functions.

Knows figures, not simulations. That more GPUs are never worse is expected, not relied on: counts next to the answer are
tried too, and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelpool.scheduler.simulator.metrics import Figures

#: fraction of the makespan: with the last arrival as late as this there is nothing to gain
ARRIVING = 0.9
#: fraction of the busy time: GPUs that load for longer are limited by loading
LOADING = 0.3
#: fraction of all GPU-seconds: GPUs that are busy for longer are limited by computing
BUSY = 0.75


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal. None means not required.

    deadline_seconds  all jobs are done this long after the first submission
    latency_seconds   99% of the jobs take no longer
    """

    deadline_seconds: float | None = None
    latency_seconds: float | None = None

    def is_met(self, found: Figures) -> bool:
        """Whether every job succeeded, in time."""
        return (
            found.succeeded == found.jobs
            and (self.deadline_seconds is None or found.makespan_seconds <= self.deadline_seconds)
            and (self.latency_seconds is None or found.latency.p99_seconds <= self.latency_seconds)
        )


@dataclass(frozen=True, slots=True)
class LeastCount:
    """The answer of a search.

    count      the least count found that meets the goal; None if none of those tried does
    tried      count -> whether it meets the goal, of all that were tried
    is_steady  of the counts tried, all below `count` fail and all from it on succeed
    """

    count: int | None
    tried: dict[int, bool]
    is_steady: bool


def least_count(does: Callable[[int], bool], most: int, first: int = 1) -> LeastCount:
    """Find the least count up to `most` that meets the goal: in steps from `first` on that double, then bisecting.

    The result meets it, and one less does not. Two less and one more are tried as well; if two less does, the search
    continues downwards from there.
    """
    tried: dict[int, bool] = {}

    def check(count: int) -> bool:
        if count not in tried:
            tried[count] = count > 0 and does(count)
        return tried[count]

    low, high, step = 0, min(max(first, 1), most), 1
    while not check(high):
        if high == most:
            return LeastCount(None, tried, True)
        low, high, step = high, min(high + step, most), 2 * step
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


def first_estimate(work_seconds: float, goal: Goal, last_arrival_seconds: float) -> int:
    """The number of GPUs that are busy all the time until the deadline with this much computing; the first to try."""
    seconds = goal.deadline_seconds if goal.deadline_seconds is not None else last_arrival_seconds
    return max(1, int(work_seconds / seconds)) if seconds > 0 else 1


def bottleneck(found: Figures) -> str:
    """Return the bottleneck, in a sentence."""
    loading, busy = f"{found.loading_share:.0%}", f"{found.busy_share:.0%}"
    if found.last_arrival_seconds >= ARRIVING * found.makespan_seconds > 0:
        return f"arrivals: jobs come until shortly before the end, and GPUs are busy for {busy} of the time"
    if found.loading_share >= LOADING:
        return f"loading: GPUs load weights for {loading} of the time that they are busy"
    if found.busy_share >= BUSY:
        return f"computing: GPUs are busy for {busy} of the time, and {loading} of that is loading"
    return f"the longest chain: GPUs are busy for {busy} of the time, and wait for stages of the last jobs"
