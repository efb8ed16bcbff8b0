"""Why a task started where it did: what was chosen from, and the numbers that the choice was made of.

Values that are kept with each start, put into words when somebody reads them. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pool.errors import format_bytes
from pool.spec import WorkerId


class Rule(Enum):
    """Which rule of the placement chose the task (`scheduler.placement`)."""

    RESIDENT = "all its weights are there"
    CHEAPEST = "it costs least to bring its weights there"
    WAITED = "it waited too long to let others pass"
    DEADLINE = "its deadline comes near"
    PINNED = "it waited for this worker"
    IN_ORDER = "it was next in order"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that the task could have run on, and what that would have taken.

    wait_seconds   until that worker should be free
    extra_seconds  upload, patches, streaming and what running in parts adds
    run_seconds    with all weights resident, on that GPU
    """

    worker_id: WorkerId
    wait_seconds: float
    extra_seconds: float
    run_seconds: float

    @property
    def seconds(self) -> float:
        """Until the result would be there."""
        return self.wait_seconds + self.extra_seconds + self.run_seconds


@dataclass(frozen=True, slots=True)
class Why:
    """One choice.

    chosen      the worker it runs on, with what that is expected to take
    others      the best of the others that were looked at, soonest first; idle ones and busy ones
    idle, busy  workers that could be chosen, and those that ran something
    passed      times that later tasks had gone first
    note        what else there is to say, as a clause
    """

    rule: Rule
    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    idle: int = 0
    busy: int = 0
    upload_bytes: int = 0
    streamed_bytes: int = 0
    switches: int = 0
    slowdown: float = 1.0
    passed: int = 0
    note: str = ""

    @property
    def words(self) -> str:
        """The choice in a sentence."""
        note = f"{self.note}; " if self.note else ""
        among = f"{self.chosen.worker_id}, of {self.idle} idle and {self.busy} busy: {note}"
        run = f"run {self.chosen.run_seconds:.2f} s"
        if self.chosen.extra_seconds == 0.0:
            return f"{among}all weights are there, {run}"
        parts = f", in parts ({self.slowdown:.2f} times as long)" if self.slowdown != 1.0 else ""
        return (
            f"{among}upload {format_bytes(self.upload_bytes)} with {self.switches} patch switches and stream "
            f"{format_bytes(self.streamed_bytes)} in {self.chosen.extra_seconds:.2f} s, {run}{parts}"
        )
