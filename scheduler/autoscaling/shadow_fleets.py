"""Fleets of every smaller size that receive the same work in imagination: would fewer GPUs have kept up?

For each capacity a queue of GPU-seconds: what arrives is added, what this capacity works off is taken away. A capacity
is enough as long as its queue is worked off within a tolerated time. Knows no nodes and no tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from modelpool.scheduler.autoscaling.outlook import EnoughCapacity

#: capacities that are distinguished
MOST_STEPS = 1024


class ShadowFleet:
    """The queues of one level of memory. Capacities are multiples of a unit, from 0."""

    def __init__(self, level_bytes: float, unit: float, at: float) -> None:
        self.level_bytes = level_bytes
        self.unit = unit
        #: by capacity in units: GPU-seconds that would wait, and the last time at which they were too many
        self._waiting: list[float] = [0.0]
        self._short_at: list[float] = [at]

    def pass_time(self, at: float, seconds: float, arrived: float, capacity: float, tolerated_seconds: float) -> None:
        """In the last `seconds`, `arrived` GPU-seconds of work came. `capacity` is that of the actual fleet."""
        count = min(MOST_STEPS, ceil(capacity / self.unit - 1e-9) + 1)
        while len(self._waiting) < count:
            self._waiting.append(self._waiting[-1])
            self._short_at.append(self._short_at[-1])
        del self._waiting[count:], self._short_at[count:]
        waiting, unit = self._waiting, self.unit
        for units in range(count):
            left = waiting[units] + arrived - units * unit * seconds
            waiting[units] = left = left if left > 0.0 else 0.0
            if left > tolerated_seconds * units * unit:
                self._short_at[units] = at

    def enough(self) -> EnoughCapacity:
        """Since when each capacity has been enough."""
        steps: list[tuple[float, float]] = []
        for units, short_at in enumerate(self._short_at):
            if not steps or short_at < steps[-1][0]:
                steps.append((short_at, units * self.unit))
        return EnoughCapacity(self.level_bytes, tuple(steps))


class ShadowFleets:
    """The queues of all levels of memory."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at
        self._fleets: dict[float, ShadowFleet] = {}

    def pass_time(
        self, at: float, unit: float, levels: Sequence[tuple[float, float, float]], tolerated_seconds: float
    ) -> None:
        """`levels`: memory, GPU-seconds that arrived for it and above since the last call, capacity with it. A new unit
        or level begins with nothing known."""
        seconds = at - self._at
        self._at = at
        fleets: dict[float, ShadowFleet] = {}
        for level_bytes, arrived, capacity in levels:
            fleet = self._fleets.get(level_bytes)
            if fleet is None or fleet.unit != unit:
                fleet = ShadowFleet(level_bytes, unit, at)
            fleet.pass_time(at, seconds, arrived, capacity, tolerated_seconds)
            fleets[level_bytes] = fleet
        self._fleets = fleets

    def enough(self) -> tuple[EnoughCapacity, ...]:
        """Since when each capacity of each level has been enough."""
        return tuple(fleet.enough() for fleet in self._fleets.values())
