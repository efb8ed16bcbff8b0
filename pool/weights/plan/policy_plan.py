"""Plans under a VRAM policy: the share of memory that weights may take, and runs that must not stream.

Pure arithmetic around `pool.weights.plan.eviction_plan.plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.values.core.errors import DoesNotFit, does_not_fit
from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.eviction_plan import Residency, ResidencyPlan, needed_bytes, plan


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Arguments of a plan.

    uses, specs, activation_bytes, leased, hints  as for `plan`
    most_weight_bytes  maximum resident bytes, except for what may not leave; None: as many as fit
    why_whole          reason why no weights may stream; empty if they may
    """

    uses: Sequence[ComponentUse]
    specs: Mapping[ComponentKey, ComponentSpec]
    activation_bytes: int
    leased: frozenset[ComponentKey]
    hints: EvictionHints
    most_weight_bytes: int | None = None
    why_whole: str = ""

    @property
    def run_bytes(self) -> int:
        """Bytes needed in addition to weights."""
        return needed_bytes(self.uses, self.activation_bytes)


def plan_under_policy(now: Residency, ask: PlanRequest, rules: ResidencyRules) -> ResidencyPlan:
    """Return the plan for a request under `rules`. Raises DoesNotFit as `plan` does, and if all weights must be
    resident and do not fit."""
    capped = _capped(now, ask, rules)
    decided = plan(capped, ask.uses, ask.specs, ask.activation_bytes, ask.leased, ask.hints)
    if not decided.streamed_bytes or not ask.why_whole:
        return decided
    # hints may let single-pass components stream to keep others: drop the hints if nothing may stream
    hints = replace(ask.hints, needed_next=(), priorities={})
    decided = plan(capped, ask.uses, ask.specs, ask.activation_bytes, ask.leased, hints)
    if decided.streamed_bytes:
        keys = [use.component for use in ask.uses]
        whole_bytes = sum(ask.specs[key].weight_bytes for key in keys)
        stays_bytes = fixed_bytes(now, ask.leased, ask.hints.pinned_bytes, but=keys)
        least_bytes = whole_bytes + stays_bytes + ask.run_bytes
        raise must_be_resident(ask.uses, least_bytes, capped.capacity_bytes, ask.why_whole)
    return decided


def fixed_bytes(
    now: Residency,
    leased: frozenset[ComponentKey],
    pinned_bytes: Mapping[ComponentKey, int],
    but: Collection[ComponentKey] = (),
) -> int:
    """Return the resident bytes that may not leave, leased or pinned, of components that are not in `but`."""
    return sum(
        entry.resident_bytes
        if entry.component in leased
        else min(entry.resident_bytes, pinned_bytes.get(entry.component, 0))
        for entry in now.entries
        if entry.component not in but
    )


def _capped(now: Residency, ask: PlanRequest, rules: ResidencyRules) -> Residency:
    """`now` with its capacity reduced so that weights stay within `rules` and the request."""
    if ask.most_weight_bytes is None and rules.weights_share >= 1:
        return now
    room_bytes = now.capacity_bytes - ask.run_bytes
    allowed_bytes = int(max(0, room_bytes) * rules.weights_share)
    if ask.most_weight_bytes is not None:
        allowed_bytes = min(allowed_bytes, ask.most_weight_bytes)
    stays_bytes = fixed_bytes(now, ask.leased, ask.hints.pinned_bytes)
    return replace(now, capacity_bytes=min(now.capacity_bytes, ask.run_bytes + max(allowed_bytes, stays_bytes)))


def must_be_resident(uses: Sequence[ComponentUse], least_bytes: int, budget_bytes: int, why: str) -> DoesNotFit:
    """The error for weights of `uses` that must be fully resident, for the reason `why`, and need `least_bytes`."""
    named = " with ".join(use.component for use in uses)
    return does_not_fit(named, least_bytes, budget_bytes, f"with all weights resident: {why}")
