"""`SubmissionAge`: for how long a submission has been acknowledged, by two clocks. Pure."""

from __future__ import annotations


class SubmissionAge:
    """The age of one submission. It grows while the machine is off or sleeps, by the wall clock, and never shrinks, as
    the monotonic clock does not: a wall clock that is set back gives no job its deadline again."""

    __slots__ = ("_read_at", "_seconds", "created_at")

    def __init__(self, created_at: float) -> None:
        """`created_at` is its acknowledgement on the wall clock, in Unix seconds."""
        self.created_at = created_at
        self._seconds = 0.0
        #: when the age was read last, on the monotonic clock; None before
        self._read_at: float | None = None

    def seconds(self, wall_seconds: float, monotonic_seconds: float) -> float:
        """Return the age, at these times of the two clocks: at least the age at the call before, and what has passed
        since."""
        since = 0.0 if self._read_at is None else monotonic_seconds - self._read_at
        self._seconds = max(wall_seconds - self.created_at, self._seconds + since)
        self._read_at = monotonic_seconds
        return self._seconds
