"""Why a plan is as it is: one plain sentence for each eviction and each component that streams. Pure and torch-free.

Decides nothing: the rules are those of `pool.plan.residency`, and what could have given way is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from modelpool.pool.core.errors import format_bytes
from modelpool.pool.plan.residency import Claim, Residency, ResidencyPlan, claims, plan
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse

#: a component of the task itself gives up bytes
OWN_SHRINKS = "activations, scratch and the weights named before it need the room"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why `bytes` of resident weights of a component leave the GPU, or are not brought to it and stream (`streams`)."""

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
    outlook: Outlook = NO_OUTLOOK,
) -> tuple[Reason, ...]:
    """The reasons of the plan that `pool.plan.residency.plan` makes of the same arguments: its evictions in order, then
    the
    components that stream in the order of `uses`. Empty when nothing leaves and nothing streams.

    Raises DoesNotFit as `plan` does.
    """
    moves = plan(now, uses, specs, activation_bytes, leased, outlook)
    wanted = frozenset(use.component for use in uses)
    words = _Words(now, moves, claims(now, uses, specs, activation_bytes, leased, outlook), specs, wanted)
    reasons = [
        Reason(
            move.component, move.bytes, False, OWN_SHRINKS if move.component in wanted else words.leaves(move.component)
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
    """The sentences of one plan. `ordered` is all that could give way, first the first to go."""

    now: Residency
    moves: ResidencyPlan
    ordered: tuple[Claim, ...]
    specs: Mapping[ComponentKey, ComponentSpec]
    used: frozenset[ComponentKey]

    def leaves(self, key: ComponentKey) -> str:
        """A component that the task does not use gives up bytes."""
        index = self._index(key)
        assert index is not None, f"{key} was evicted and could not give way"
        claim, rival = self.ordered[index], self._rival(index)
        if rival is None:
            return "the task needs the room, and all that could give way before it did"
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
        """Bytes of a component of the task do not come to the GPU."""
        index = self._index(key)
        rival = None if index is None or self._lost_bytes(self.ordered[index]) == 0 else self._rival(index)
        if index is None or rival is None:
            return "no room is left beside activations, scratch, what must stay and the weights named before it"
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

    def _lost_bytes(self, claim: Claim) -> int:
        """What the claim gave up: evicted, or not brought."""
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

    def _rival(self, index: int) -> Claim | None:
        """The first behind `index` that gave up less than it could have."""
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
