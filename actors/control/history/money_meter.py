"""`MoneyMeter`: the money that nodes have cost since it was written last, from the account of a pool. Pure.

The account (`Autoscaler.spent`) outlives a controller with its memory, which the journal keeps, and which a new
controller gets some time after its start. The history keeps the level of the account up to which it has counted. So the
money of the time between two controllers is counted, once, and with what the pool says itself.
"""

from __future__ import annotations

#: a controller that has got no memory of an earlier one by then gets none
MEMORY_SECONDS = 30.0


class MoneyMeter:
    """The meter of one controller."""

    def __init__(self) -> None:
        #: the account up to here is in the history; None: not known yet
        self.level: float | None = None
        self._stored: float | None = None
        self._memory: float | None = None

    def opened(self, level: float) -> None:
        """The history is open: an earlier controller has counted up to this level."""
        self._stored = level

    def remembered(self, spent: float) -> None:
        """The account has taken over this from an earlier controller."""
        if self.level is None:
            self._memory = spent
        elif spent:  # late: counted from 0 so far
            self.level += self._stored or spent

    def advance(self, spent: float, seconds: float) -> float:
        """Return the money of the account, now `spent`, that is not in the history yet; `seconds` after the start."""
        if self.level is None:
            level = self._start_level(seconds)
            if level is None:
                return 0.0
            self.level = level
        money = max(0.0, spent - self.level)
        self.level = max(self.level, spent)
        return money

    def _start_level(self, seconds: float) -> float | None:
        """Return the level that the account begins with; None while it is not known."""
        if self._stored is None:
            return None
        if not self._stored:  # what was spent before there was a history is not of this hour
            return self._memory or 0.0
        if self._memory is None:
            return 0.0 if seconds >= MEMORY_SECONDS else None
        return self._stored if self._memory else 0.0
