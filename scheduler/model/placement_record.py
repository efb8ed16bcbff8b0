"""The reasons why a task started on its worker: the options of the placement and the numbers that decided.

Values that are kept with each start and formatted only when read. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue


class PlacementRule(Enum):
    """The placement rule that chose the task (`scheduler.decisions.placement.expected_completion` has the rules)."""

    RESIDENT = "all its weights are resident"
    CHEAPEST = "it costs least to load"
    WAITED = "it waited too long to let others pass"
    LOST = "its last run was lost with its worker"
    CONTINUED = "it continues on more or fewer GPUs"
    PASS_STOPPED = "a pass waits for it, or was stopped for it"
    DEADLINE = "its deadline is near"
    PINNED = "it waited for this worker"
    IN_ORDER = "it was next in order"


@dataclass(slots=True, unsafe_hash=True)
class PlacementOption(WireValue):
    """A worker that the task could have run on, and the expected times there.

    wait_seconds   until that worker should be free
    extra_seconds  upload, patches, streaming and the slowdown of a divided run
    run_seconds    with all weights resident, on that GPU
    """

    worker_id: Final[WorkerId]
    wait_seconds: Final[float]
    extra_seconds: Final[float]
    run_seconds: Final[float]

    @property
    def seconds(self) -> float:
        """Seconds until the result would exist."""
        return self.wait_seconds + self.extra_seconds + self.run_seconds


@dataclass(slots=True, unsafe_hash=True)
class WaitEvaluation(WireValue):
    """The evaluation with which a placement let a task wait for a busy worker. Kept raw: placements are frequent, and
    few evaluations are read.

    idle, idle_extra_seconds  the worker on which it could have started, and its load time there
    busy                      the busy workers considered: name, seconds until it should be free, load time there
    """

    at: Final[float]
    idle: Final[WorkerId]
    idle_extra_seconds: Final[float]
    busy: Final[tuple[tuple[WorkerId, float, float], ...]]


@dataclass(slots=True, unsafe_hash=True)
class Why(WireValue):
    """The record of one placement decision.

    chosen       the worker it runs on, with the expected times
    others       the best of the other workers considered, soonest first; idle and busy ones
    idle, busy   workers that could be chosen, and those that were busy
    passed       times that later tasks went first
    note         further reasons, as a clause
    ahead_bytes  expected bytes that were preloaded for such a task during the previous run
    """

    rule: Final[PlacementRule]
    chosen: Final[PlacementOption]
    others: Final[tuple[PlacementOption, ...]] = ()
    idle: Final[int] = 0
    busy: Final[int] = 0
    upload_bytes: Final[int] = 0
    streamed_bytes: Final[int] = 0
    switches: Final[int] = 0
    slowdown: Final[float] = 1.0
    passed: Final[int] = 0
    note: Final[str] = ""
    ahead_bytes: Final[int] = 0

    @property
    def words(self) -> str:
        """The decision in a sentence."""
        return f"{self.chosen.worker_id}, {self.figures}"

    @property
    def figures(self) -> str:
        """The sentence without the worker's name."""
        among = f"of {self.idle} idle and {self.busy} busy: " + (f"{self.note}; " if self.note else "")
        run = f"run {self.chosen.run_seconds:.2f} s"
        ahead = f", {format_bytes(self.ahead_bytes)} preloaded during the previous run" if self.ahead_bytes else ""
        if self.chosen.extra_seconds == 0.0:
            return f"{among}all weights resident{ahead}, {run}"
        parts = f", divided ({self.slowdown:.2f} times as long)" if self.slowdown != 1.0 else ""
        moved = ", ".join(self._moved()) or "set up"
        text = f"{among}{moved} in {self.chosen.extra_seconds:.2f} s{ahead}, {run}{parts}"
        spared = self._spared_wait()
        if spared is None:
            return text
        return f"{text}; {spared.worker_id}, busy for {spared.wait_seconds:.2f} s, would take {spared.seconds:.2f} s"

    @property
    def brief(self) -> str:
        """The decision in a few words: the transfers, and the wait that they avoid."""
        if self.chosen.extra_seconds == 0.0:
            return "all resident"
        moved = self._moved() + (["divided"] if self.slowdown != 1.0 else [])
        moved = moved or [f"{self.chosen.extra_seconds:.2f} s to set up"]
        spared = self._spared_wait()
        if spared is not None:
            moved.append(f"would have waited {spared.wait_seconds:.1f} s for {spared.worker_id}")
        return ", ".join(moved)

    def _moved(self) -> list[str]:
        """Transfers and patch switches, without those that are zero."""
        moved = [f"upload {format_bytes(self.upload_bytes)}"] if self.upload_bytes else []
        moved += [f"stream {format_bytes(self.streamed_bytes)}"] if self.streamed_bytes else []
        return moved + ([f"{self.switches} patch switch{'' if self.switches == 1 else 'es'}"] if self.switches else [])

    def _spared_wait(self) -> PlacementOption | None:
        """The soonest busy worker with less to load that the task did not wait for."""
        cheaper = (c for c in self.others if c.wait_seconds > 0.0 and c.extra_seconds < self.chosen.extra_seconds)
        return min(cheaper, key=lambda c: (c.seconds, c.worker_id), default=None)


@dataclass(slots=True, unsafe_hash=True)
class PreloadNote:
    """The story's record of a preload for a task during another's run."""

    hidden_bytes: Final[int]
    worker_id: Final[WorkerId]

    @property
    def words(self) -> str:
        """The record in a sentence."""
        return f"{format_bytes(self.hidden_bytes)} preloaded to {self.worker_id} during its run"


@dataclass(slots=True, unsafe_hash=True)
class TaskStart:
    """The story's record of one attempt at a task, as it was sent to a worker on `node`; "" if the node is unknown."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    attempt: Final[int]
    why: Final[Why]
    node: Final[NodeId] = NO_NODE

    @property
    def words(self) -> str:
        """The start in a sentence."""
        return f"attempt {self.attempt} on {self.worker_id}#{self.incarnation}, {self.why.figures}"
