"""The work of the recent past, in slots of time: the capacity that would have kept up with it. Knows no nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

#: slots that are remembered
MOST_SLOTS = 512
#: precision of a capacity, as a part of the slowest GPU
PRECISION = 1.0 / 16.0


@dataclass(frozen=True, slots=True)
class WorkSlot:
    """A slot of time: GPU-seconds that waited at its begin, and that arrived during it."""

    begun_at: float
    seconds: float
    waiting: float
    arrived: float


@dataclass(frozen=True, slots=True)
class RecentWork:
    """The slots of one level of memory and those above it, oldest first; and the time for which work may queue."""

    level_bytes: float
    slots: tuple[WorkSlot, ...] = ()
    tolerated_seconds: float = 0.0

    def kept_up(self, capacity: float, since: float) -> bool:
        """Whether this capacity, from then on, would have worked off what waited then and what came since, and never
        let more queue than waited then, or than is tolerated."""
        if not self.slots or self.slots[0].begun_at > since:
            return False
        tolerated, waiting, most = self.tolerated_seconds * capacity, -1.0, 0.0
        for slot in self.slots:
            if slot.begun_at + slot.seconds <= since:
                continue
            if waiting < 0.0:
                waiting = slot.waiting
                most = max(waiting, tolerated)
            waiting = max(0.0, waiting + slot.arrived - capacity * slot.seconds)
            if waiting > most + 1e-9:
                return False
        return waiting <= tolerated + 1e-9

    def least(self, most: float, unit: float, since: float) -> float:
        """The least capacity up to `most` that kept up, to a part of `unit`; infinity if that did not either."""
        if not self.kept_up(most, since):
            return inf
        low, high = 0.0, most
        if self.kept_up(0.0, since):
            return 0.0
        while high - low > PRECISION * unit:
            middle = (low + high) / 2.0
            low, high = (low, middle) if self.kept_up(middle, since) else (middle, high)
        return high


class WorkHistory:
    """Keeps the slots of all levels."""

    def __init__(self) -> None:
        self._at = 0.0
        self._waiting: dict[float, float] = {}
        self._slots: dict[float, deque[WorkSlot]] = {}

    def pass_time(self, at: float, levels: Sequence[tuple[float, float, float]]) -> None:
        """`levels`: memory, GPU-seconds that arrived for it and above since the last call, GPU-seconds that wait now. A
        new level begins with nothing known."""
        seconds = at - self._at
        slots: dict[float, deque[WorkSlot]] = {}
        for level_bytes, arrived, _ in levels:
            known = self._slots.get(level_bytes)
            slots[level_bytes] = deque(maxlen=MOST_SLOTS) if known is None else known
            waiting = self._waiting.get(level_bytes)
            if waiting is not None and seconds > 0.0:
                slots[level_bytes].append(WorkSlot(self._at, seconds, waiting, arrived))
        self._slots, self._at = slots, at
        self._waiting = {level_bytes: waiting for level_bytes, _, waiting in levels}

    def recent(self, tolerated_seconds: float) -> tuple[RecentWork, ...]:
        """The slots, as values."""
        return tuple(
            RecentWork(level_bytes, tuple(slots), tolerated_seconds) for level_bytes, slots in self._slots.items()
        )
