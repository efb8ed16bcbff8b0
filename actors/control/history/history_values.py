"""Values of the history: events, costs, and the batches in which they are written. Torch-free, ray-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

HOUR_SECONDS = 3600


class EventKind(StrEnum):
    """What happened."""

    POOL_STARTED = "pool_started"
    POOL_ENDED = "pool_ended"
    CONTROLLER_RESTARTED = "controller_restarted"
    NODES_PRESENT = "nodes_present"
    NODE_JOINED = "node_joined"
    NODE_LEFT = "node_left"
    NODE_DRAINING = "node_draining"
    NODE_DRAIN_WITHDRAWN = "node_drain_withdrawn"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    DRAIN_ORDERED = "drain_ordered"
    RESTART_ORDERED = "restart_ordered"
    WORKER_UP = "worker_up"
    WORKER_TAKEN_OVER = "worker_taken_over"
    WORKER_LOST = "worker_lost"
    WORKER_START_FAILED = "worker_start_failed"
    WORKER_ENDED = "worker_ended"
    DISRUPTIONS_BARRED = "disruptions_barred"
    DISRUPTIONS_ALLOWED = "disruptions_allowed"
    NODES_REQUESTED = "nodes_requested"
    NODES_GIVEN_UP = "nodes_given_up"
    GROUP_BACKS_OFF = "group_backs_off"
    GROUP_USABLE = "group_usable"
    LIMIT_REACHED = "limit_reached"
    TASK_FAILED = "task_failed"
    TASK_RETRIED = "task_retried"
    JOB_FAILED = "job_failed"
    JOBS_ON_HOLD = "jobs_on_hold"
    JOBS_CONTINUE = "jobs_continue"
    SUBMISSION_STUCK = "submission_stuck"
    SUBMISSION_CONTINUES = "submission_continues"
    HISTORY_RESUMED = "history_resumed"


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """Something that happened, or `count` equal things between `at` and `until`.

    at, until  wall-clock time, in Unix seconds
    kind       an EventKind, or a kind of a later version of modelpool
    node, worker, group  which it is about; "" for none
    same       events with an equal, non-empty text here are counted in one row for a while; not stored
    """

    at: float
    kind: str
    text: str
    node: str = ""
    worker: str = ""
    group: str = ""
    same: str = ""
    count: int = 1
    until: float = 0.0

    @property
    def last_at(self) -> float:
        """When it happened last."""
        return max(self.at, self.until)


class CostKey(NamedTuple):
    """What GPU time is counted by. `hour` is the number of whole hours since 1970. One is made for each run."""

    hour: int
    user: str
    model: str
    lora: str
    group: str


@dataclass(slots=True)
class CostSums:
    """GPU time and money of runs.

    runs, seconds       that were of use: they succeeded, or stopped with a state; loads included
    load_seconds        part of them
    failed_runs, failed_seconds  that ended with an error: charged to the user, too
    lost_runs, lost_seconds      that were lost with their worker, from their start: charged to nobody
    cost, failed_cost   money of the first, and of the two others
    """

    runs: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    failed_runs: int = 0
    failed_seconds: float = 0.0
    lost_runs: int = 0
    lost_seconds: float = 0.0
    cost: float = 0.0
    failed_cost: float = 0.0

    def add(self, other: CostSums) -> None:
        """Add the sums of `other`."""
        self.runs += other.runs
        self.seconds += other.seconds
        self.load_seconds += other.load_seconds
        self.failed_runs += other.failed_runs
        self.failed_seconds += other.failed_seconds
        self.lost_runs += other.lost_runs
        self.lost_seconds += other.lost_seconds
        self.cost += other.cost
        self.failed_cost += other.failed_cost

    @property
    def charged_seconds(self) -> float:
        """GPU time that the account of the user has, too."""
        return self.seconds + self.failed_seconds

    def values(self) -> tuple[float, ...]:
        """Return the sums in the order of SUM_FIELDS."""
        return tuple(getattr(self, name) for name in SUM_FIELDS)


SUM_FIELDS = tuple(each.name for each in fields(CostSums))


class RunEnd(StrEnum):
    """How a run ended, for its costs."""

    USED = "used"
    FAILED = "failed"
    LOST = "lost"


class RunCharge(NamedTuple):
    """The cost of one run. `price` is the money of a GPU-second. A tuple: one is made for each run."""

    key: CostKey
    end: RunEnd
    seconds: float
    load_seconds: float = 0.0
    price: float = 0.0

    def add_to(self, sums: CostSums) -> None:
        """Add it to sums."""
        seconds, end = self.seconds, self.end
        if end is RunEnd.USED:
            sums.runs += 1
            sums.seconds += seconds
            sums.load_seconds += self.load_seconds
            sums.cost += seconds * self.price
        elif end is RunEnd.FAILED:
            sums.failed_runs += 1
            sums.failed_seconds += seconds
            sums.failed_cost += seconds * self.price
        else:
            sums.lost_runs += 1
            sums.lost_seconds += seconds
            sums.failed_cost += seconds * self.price


@dataclass(slots=True)
class HistoryBatch:
    """The records of one transaction.

    node_costs  money of nodes by hour and group, with work or without
    level       of the account of the pool, whose money is in the history up to it; None: unchanged
    spool, sequence  of the last record of a spool that is in it, or in an earlier batch
    dropped     events for which there was no room in memory
    is_last     the pool ends in order
    """

    costs: dict[CostKey, CostSums] = field(default_factory=dict)
    node_costs: dict[tuple[int, str], float] = field(default_factory=dict)
    events: list[HistoryEvent] = field(default_factory=list)
    level: float | None = None
    spool: str = ""
    sequence: int = 0
    dropped: int = 0
    is_last: bool = False

    def __bool__(self) -> bool:
        return bool(self.costs or self.node_costs or self.events or self.dropped or self.is_last)

    def charge(self, charge: RunCharge) -> None:
        """Add the cost of a run."""
        sums = self.costs.get(charge.key)
        if sums is None:
            sums = self.costs[charge.key] = CostSums()
        charge.add_to(sums)


def charge_text(charge: RunCharge, key_texts: dict[CostKey, str]) -> str:
    """Return a charge as JSON. `key_texts` are the texts of the keys so far; the caller bounds them."""
    key_text = key_texts.get(charge.key)
    if key_text is None:
        key_text = key_texts[charge.key] = json.dumps(charge.key)
    return f'["c", {key_text}, "{charge.end}", {charge.seconds!r}, {charge.load_seconds!r}, {charge.price!r}]'


def event_text(event: HistoryEvent) -> str:
    """Return an event as JSON."""
    return json.dumps(["e", event.at, str(event.kind), event.text, event.node, event.worker, event.group, event.same])


def record_in_text(text: str) -> RunCharge | HistoryEvent:
    """Return what `charge_text` or `event_text` wrote. Raises ValueError if this version of modelpool reads it
    differently."""
    match json.loads(text):
        case [
            "c",
            [int(hour), str(user), str(model), str(lora), str(group)],
            str(end),
            int() | float() as seconds,
            int() | float() as load_seconds,
            int() | float() as price,
        ]:
            key = CostKey(hour, user, model, lora, group)
            return RunCharge(key, RunEnd(end), seconds, load_seconds, price)
        case ["e", int() | float() as at, str(kind), str(words), str(node), str(worker), str(group), str(same)]:
            return HistoryEvent(at, kind, words, node, worker, group, same)
        case other:
            raise ValueError(f"a record of a spool: found {str(other)[:100]}, expected a cost or an event")


def plain_event(event: HistoryEvent) -> Mapping[str, Any]:
    """Return an event as a dictionary for JSON, without empty fields."""
    found: dict[str, Any] = {"at": event.at, "kind": str(event.kind), "text": event.text}
    found |= {name: value for name in ("node", "worker", "group") if (value := getattr(event, name))}
    if event.count > 1:
        found |= {"count": event.count, "until": event.until}
    return found
