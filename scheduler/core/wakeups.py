"""Schedules ticks: times at which the core has to run without another event."""

from __future__ import annotations

from modelpool.scheduler.model.messages import Command, ScheduleTick

#: interval between two checks of an overdue run
LEAST_TICK_SECONDS = 0.05


class Ticks:
    """The pending `Tick`s. Requests them by `ScheduleTick`s that it appends to `out`."""

    def __init__(self, out: list[Command]) -> None:
        self._out = out
        #: due times, soonest first
        self._due: list[float] = []

    @property
    def due(self) -> float | None:
        """The time at which the next one is due; None if none is pending."""
        return self._due[0] if self._due else None

    def arrived(self) -> None:
        """The next one arrived."""
        self._due = self._due[1:]

    def request(self, seconds: float, at: float) -> None:
        """Request one within this time, but not sooner than LEAST_TICK_SECONDS. An earlier one than the pending ones is
        requested in addition to them."""
        due = at + max(LEAST_TICK_SECONDS, seconds)
        if not self._due or due < self._due[0] - LEAST_TICK_SECONDS:
            self._due.insert(0, due)
            self._out.append(ScheduleTick(due - at))
