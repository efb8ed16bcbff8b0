"""The reasons why nodes were requested or given up: the rule of the decision and the figures that it was based on.

Values that are kept with each decision and formatted only when read. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.wire_value import WireValue


class ScalingRule(Enum):
    """The rule that decided (`scheduler.autoscaling.wanted`)."""

    MINIMUM = "the group's min_nodes"
    PINNED = "pinned components have too few workers"
    NO_WORKER = "no worker can run the waiting work"
    BACKLOG = "the work that it takes over lasts longer than its start and its cold load"
    DEADLINE = "a deadline requires it"
    IDLE = "idling cost as much as restoring it"
    SURPLUS = "the other nodes would have kept up without it"
    ROOM = "work that no other GPU can run needs its place"
    BUDGET = "max_cost is reached"
    FAILED = "it did not start"


@dataclass(frozen=True, slots=True)
class ScalingWhy(WireValue):
    """The record of one decision.

    nodes    number of nodes: above 0 requested, below 0 given up
    node     the name of the node that is given up; "" for requests
    figures  names (with units) and values, in the order in which they are read
    others   groups that were not chosen, each with the reason
    at       time of the decision
    """

    rule: ScalingRule
    group: str
    nodes: int
    node: str = ""
    figures: tuple[tuple[str, float], ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    at: float = 0.0

    @property
    def words(self) -> str:
        """The record as text."""
        count = f"{counted(abs(self.nodes), 'node')} of {self.group}"
        act = f"requested {count}" if self.nodes > 0 else f"gave up {count}"
        if self.node:
            act += f" ({self.node})"
        figures = ", ".join(f"{name} {value:.6g}" for name, value in self.figures)
        others = "; ".join(f"not {name}: {reason}" for name, reason in self.others)
        return act + f": {self.rule.value}" + (f" ({figures})" if figures else "") + (f"; {others}" if others else "")
