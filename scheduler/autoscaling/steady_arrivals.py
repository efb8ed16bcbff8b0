"""The rate at which work keeps coming: what a quarter of the latest slots of time did not exceed.

A burst fills few slots and does not count as a rate: it is over when a node that it requests is up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

#: slots that count, and those that are needed before there is a rate
SLOTS = 12
LEAST_SLOTS = 3


class SteadyArrivals:
    """GPU-seconds that arrived in each of the latest slots, by level of memory."""

    def __init__(self, slot_seconds: float) -> None:
        self._slot_seconds = slot_seconds
        self._begun_at = 0.0
        self._current: list[float] = []
        self._slots: deque[list[float]] = deque(maxlen=SLOTS)

    def note(self, at: float, arrived: Sequence[float]) -> list[float]:
        """Take in the work that arrived since the last call; return the rate of each level. Time without calls was
        without arrivals. Other levels begin with nothing known."""
        if len(self._current) != len(arrived):
            self._current = [0.0] * len(arrived)
            self._slots.clear()
            self._begun_at = at
        for level, seconds in enumerate(arrived):
            self._current[level] += seconds
        passed = int((at - self._begun_at + 1e-9) / self._slot_seconds)
        if passed:
            self._begun_at += passed * self._slot_seconds
            self._slots.append(self._current)
            self._current = [0.0] * len(arrived)
            for _ in range(min(passed - 1, SLOTS)):
                self._slots.append([0.0] * len(arrived))
        if len(self._slots) < LEAST_SLOTS:
            return [0.0] * len(arrived)
        place = len(self._slots) // 4
        return [
            sorted(slot[level] for slot in self._slots)[place] / self._slot_seconds for level in range(len(arrived))
        ]
