"""`SubmissionAges`: for how long submissions have been acknowledged, by two clocks. Pure."""

from __future__ import annotations

from collections.abc import Container


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


class SubmissionAges:
    """The ages of submissions, by id."""

    __slots__ = ("_ages",)

    def __init__(self) -> None:
        self._ages: dict[str, SubmissionAge] = {}

    def __len__(self) -> int:
        return len(self._ages)

    def seconds(self, submission_id: str, created_at: float, wall_seconds: float, monotonic_seconds: float) -> float:
        """Return the age of a submission, as `SubmissionAge.seconds`. Another one had the id before if its `created_at`
        differs."""
        age = self._ages.get(submission_id)
        if age is None or age.created_at != created_at:
            age = self._ages[submission_id] = SubmissionAge(created_at)
        return age.seconds(wall_seconds, monotonic_seconds)

    def keep(self, submission_ids: Container[str]) -> None:
        """Forget all others."""
        self._ages = {name: age for name, age in self._ages.items() if name in submission_ids}
