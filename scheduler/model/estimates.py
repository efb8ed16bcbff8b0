"""Robust estimate of a quantity from its last measurements, some of which are wrong. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

#: measurements that count. Of seven, four agree on a change, and three may be wrong
REMEMBERED = 7
#: the larger of two measurements counts as at most this many times the smaller: runs are late for many reasons (a first
#: run compiles kernels, a machine pauses), and early for none
MOST_APART = 1.5


class Estimate:
    """The median of the last measurements.

    One outlier, by any factor, moves it no further than to its neighbour; a lasting change is the median after four.
    (An exponential average that learns a change in five measurements takes in a third of each outlier.)
    """

    __slots__ = ("_ascending", "_latest", "value")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ascending: list[float] = []
        #: None until something was measured
        self.value: float | None = None

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def measurements(self) -> tuple[float, ...]:
        """The measurements that count, oldest first."""
        return tuple(self._latest)

    def fill(self, measurements: Iterable[float]) -> None:
        """Take in measurements from before, unless there are newer ones."""
        if not self._latest:
            for measured in measurements:
                self.add(measured)

    def add(self, measured: float) -> None:
        """Take in one measurement."""
        latest, ascending = self._latest, self._ascending
        if len(latest) == REMEMBERED:
            oldest = latest.popleft()
            if oldest == measured:  # the same values remain
                latest.append(measured)
                return
            del ascending[bisect_left(ascending, oldest)]
        latest.append(measured)
        insort(ascending, measured)
        middle, odd = divmod(len(ascending), 2)
        if odd:
            self.value = ascending[middle]
        else:
            lower, upper = ascending[middle - 1 : middle + 1]
            self.value = (lower + min(upper, MOST_APART * lower)) / 2
