"""How much of the pool's GPU time runs have needed lately, and how much may be spent on sharing runs. Pure arithmetic.

A run on several GPUs takes more GPU time than on one. That costs nothing while GPUs would be idle otherwise, and makes
others wait under load. So a run may take as many times its GPU time as keeps the pool below `MOST_LOAD`, if all work
took so much more.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isqrt

#: time over which the load is averaged
AVERAGED_SECONDS = 300.0
#: load up to which GPU time is spent on sharing runs
MOST_LOAD = 0.9
#: time in which the jobs with deadlines have come that more of them are expected after
EXPECTED_SECONDS = 60.0
#: the load of the moment in which the first run comes that may be shared counts as if it had lasted so long
FIRST_SECONDS = 10.0
_JUST_AFTER_SECONDS = 1e-3


class GangLoad:
    """The average part of GPU time that runs needed, each counted as on one GPU."""

    def __init__(self) -> None:
        #: until when the load is known; None before the first call
        self._at: float | None = None
        self._since = 0.0
        self.load = 0.0

    def pass_time(self, at: float, workers: int, busy: float) -> None:
        """Account for the time from the call before to `at`: of `workers`, `busy` ran something. Of shared runs, what
        one GPU would not have needed is not counted in `busy`. The first call begins with the load of the moment."""
        if self._at is None:
            self._at = at
            if workers:
                self.load, self._since = busy / workers, FIRST_SECONDS
        seconds = at - self._at
        if seconds <= 0.0:
            return
        self._at = at
        if not workers:
            return
        self._since += seconds
        weight = seconds / max(seconds, min(self._since, AVERAGED_SECONDS + seconds))
        self.load += weight * (busy / workers - self.load)

    @property
    def is_known(self) -> bool:
        """Whether time is accounted for."""
        return self._at is not None

    @property
    def most_times(self) -> float:
        """How many times the GPU time of a run on one GPU a shared run may take."""
        return MOST_LOAD / self.load if self.load > 0.0 else inf


def reserved_gpus(workers: int, arrivals: Iterable[float], at: float) -> int:
    """Return how many of the idle GPUs of `workers` stay free for jobs with deadlines, of which the last ones came at
    `arrivals`. The job that comes now is one of these, and is no reason to expect others."""
    count = sum(at - arrived <= EXPECTED_SECONDS for arrived in arrivals)
    most = isqrt(workers - 1) + 1 if workers else 0  # rounded up
    return max(0, min(most, count - 1))


def reserved_until(arrivals: Iterable[float], at: float) -> float:
    """Return when `reserved_gpus` may fall next; infinity if nothing stays free."""
    expected = [arrived for arrived in arrivals if at - arrived <= EXPECTED_SECONDS]
    return min(expected, default=inf) + EXPECTED_SECONDS + _JUST_AFTER_SECONDS
