"""When the core wants to be woken though nothing happens. Knows times, and not what they are for."""

from __future__ import annotations

from modelpool.scheduler.tables.messages import Command, LookAgain

#: between two looks at a run that is overdue
LEAST_TICK_SECONDS = 0.05


class Ticks:
    """The `Tick`s that are on their way. Asks for them by `LookAgain`s that it appends to `out`."""

    def __init__(self, out: list[Command]) -> None:
        self._out = out
        #: when they are due, soonest first
        self._due: list[float] = []

    @property
    def due(self) -> float | None:
        """When the next one is due; None when none was asked for."""
        return self._due[0] if self._due else None

    def came(self) -> None:
        """The next one is here."""
        self._due = self._due[1:]

    def ask_after(self, seconds: float, at: float) -> None:
        """Have one within so long, and no sooner than makes sense. An earlier one than those on their way is asked for
        beside them."""
        due = at + max(LEAST_TICK_SECONDS, seconds)
        if not self._due or due < self._due[0] - LEAST_TICK_SECONDS:
            self._due.insert(0, due)
            self._out.append(LookAgain(due - at))
