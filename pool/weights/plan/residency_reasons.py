"""Explains a plan: one sentence for each eviction and each component that streams. Pure and torch-free.

Takes the rules and the eviction candidates from `pool.weights.plan.eviction_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from modelpool.pool.values.core.errors import format_bytes
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.eviction_plan import (
    EvictionCandidate,
    Residency,
    ResidencyPlan,
    eviction_candidates,
    plan,
)

#: reason for evicting part of a component of the task itself
TASK_NEEDS_ROOM = "activations, scratch and the weights listed before it need the room"


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why `bytes` of a component are evicted or, with `streams`, are streamed instead of loaded."""

    component: ComponentKey
    bytes: int
    streams: bool
    why: str

    def __str__(self) -> str:
        done = "of it streams" if self.streams else "of it leaves"
        return f"{self.component}: {format_bytes(self.bytes)} {done}: {self.why}"


def explain(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey] = frozenset(),
    hints: EvictionHints = NO_HINTS,
) -> tuple[Reason, ...]:
    """Return the reasons of the plan that `pool.weights.plan.eviction_plan.plan` makes of the same arguments: its
    evictions in order, then the streamed components in the order of `uses`. Empty if nothing is evicted or streamed.

    Raises DoesNotFit as `plan` does.
    """
    moves = plan(now, uses, specs, activation_bytes, leased, hints)
    wanted = frozenset(use.component for use in uses)
    words = _Words(now, moves, eviction_candidates(now, uses, specs, activation_bytes, leased, hints), specs, wanted)
    reasons = [
        Reason(
            move.component,
            move.bytes,
            False,
            TASK_NEEDS_ROOM if move.component in wanted else words.leaves(move.component),
        )
        for move in moves.evict
    ]
    for use in uses:
        streamed_bytes = specs[use.component].weight_bytes - _resident_bytes(moves.after, use.component)
        if streamed_bytes:
            reasons.append(Reason(use.component, streamed_bytes, True, words.streams(use.component)))
    return tuple(reasons)


@dataclass(frozen=True, slots=True)
class _Words:
    """Builds the sentences of one plan. `ordered` are all eviction candidates, the first to be evicted first."""

    now: Residency
    moves: ResidencyPlan
    ordered: tuple[EvictionCandidate, ...]
    specs: Mapping[ComponentKey, ComponentSpec]
    used: frozenset[ComponentKey]

    def leaves(self, key: ComponentKey) -> str:
        """Reason for evicting a component that the task does not use."""
        index = self._index(key)
        assert index is not None, f"{key} was evicted but is not a candidate"
        claim, rival = self.ordered[index], self._rival(index)
        if rival is None:
            return "the task needs the room, and all earlier candidates are evicted"
        if claim.order[0] < rival.order[0]:
            return f"its priority {claim.order[0]} is below that of {rival.component}, {rival.order[0]}"
        if claim.order[1]:
            return f"it is needed later than {rival.component}"
        if rival.order[1]:
            return f"no expected task needs it, and one needs {rival.component}"
        if rival.order[2] == inf:
            return f"nothing is known to need it, and the task itself uses {rival.component}"
        return f"{self._worth(key)}; {rival.component} is worth more: {self._worth(rival.component)}"

    def streams(self, key: ComponentKey) -> str:
        """Reason for streaming a component of the task."""
        index = self._index(key)
        rival = None if index is None or self._lost_bytes(self.ordered[index]) == 0 else self._rival(index)
        if index is None or rival is None:
            return "no room is left by activations, scratch, pinned weights and the weights listed before it"
        claim = self.ordered[index]
        if claim.order[0] < rival.order[0]:
            better = f"has priority {rival.order[0]}, above {claim.order[0]}"
        elif claim.order[1]:
            better = "is needed sooner than it is again"
        else:
            better = "is expected to be needed, as it is not"
        return f"one pass costs the same streamed or loaded; loaded it would push out {rival.component}, which {better}"

    def _index(self, key: ComponentKey) -> int | None:
        return next((index for index, claim in enumerate(self.ordered) if claim.component == key), None)

    def _lost_bytes(self, claim: EvictionCandidate) -> int:
        """Bytes of the candidate that were evicted or not loaded."""
        evicted = next((move.bytes for move in self.moves.evict if move.component == claim.component), None)
        if evicted is not None:
            return evicted
        if claim.component not in self.used:
            return 0
        return (
            claim.bytes
            - _resident_bytes(self.moves.after, claim.component)
            + _resident_bytes(self.now, claim.component)
        )

    def _rival(self, index: int) -> EvictionCandidate | None:
        """The first candidate after `index` that was not evicted completely."""
        return next((c for c in self.ordered[index + 1 :] if self._lost_bytes(c) < c.bytes), None)

    def _worth(self, key: ComponentKey) -> str:
        spec = self.specs.get(key)
        price = 1.0 if spec is None else spec.upload_bytes / spec.weight_bytes
        keys = [e.component for e in self.now.entries]
        since_bytes = sum(e.resident_bytes for e in self.now.entries[keys.index(key) + 1 :])
        return (
            f"{price:.2f} B on the bus bring a byte of its room back, and {format_bytes(since_bytes)} were used since"
        )


def _resident_bytes(residency: Residency, key: ComponentKey) -> int:
    entry = residency.of(key)
    return 0 if entry is None else entry.resident_bytes
