"""A plan under the rules of a policy: how much of the room weights may take, and runs that must not stream any.

Pure arithmetic around `pool.plan.residency.plan`; knows neither patchers nor devices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.pool.core.errors import DoesNotFit, does_not_fit
from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.plan.residency import Residency, ResidencyPlan, needed_bytes, plan
from modelpool.pool.specs.outlook import Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plan is to be made for.

    uses, specs, activation_bytes, leased, outlook  as for `plan`
    most_weight_bytes  resident at once, what may not leave excepted; None: as many as fit
    why_whole          why no weights may stream; empty where they may
    """

    uses: Sequence[ComponentUse]
    specs: Mapping[ComponentKey, ComponentSpec]
    activation_bytes: int
    leased: frozenset[ComponentKey]
    outlook: Outlook
    most_weight_bytes: int | None = None
    why_whole: str = ""

    @property
    def run_bytes(self) -> int:
        """What is needed beside weights."""
        return needed_bytes(self.uses, self.activation_bytes)


def ruled_plan(now: Residency, ask: Ask, rules: ResidencyRules) -> ResidencyPlan:
    """The plan for `ask` under `rules`. Raises DoesNotFit as `plan` does, and where all weights have to be resident and
    cannot be."""
    capped = _capped(now, ask, rules)
    decided = plan(capped, ask.uses, ask.specs, ask.activation_bytes, ask.leased, ask.outlook)
    if not decided.streamed_bytes or not ask.why_whole:
        return decided
    # hints let what is used once stream, to keep what is wanted more: where nothing may stream they have to give way
    outlook = replace(ask.outlook, needed_next=(), priorities={})
    decided = plan(capped, ask.uses, ask.specs, ask.activation_bytes, ask.leased, outlook)
    if decided.streamed_bytes:
        keys = [use.component for use in ask.uses]
        whole_bytes = sum(ask.specs[key].weight_bytes for key in keys)
        stays_bytes = fixed_bytes(now, ask.leased, ask.outlook.floors, but=keys)
        least_bytes = whole_bytes + stays_bytes + ask.run_bytes
        raise must_be_whole(ask.uses, least_bytes, capped.capacity_bytes, ask.why_whole)
    return decided


def fixed_bytes(
    now: Residency,
    leased: frozenset[ComponentKey],
    floors: Mapping[ComponentKey, int],
    but: Collection[ComponentKey] = (),
) -> int:
    """Resident bytes that may not leave, leased or below a floor, of components that are not in `but`."""
    return sum(
        entry.resident_bytes if entry.component in leased else min(entry.resident_bytes, floors.get(entry.component, 0))
        for entry in now.entries
        if entry.component not in but
    )


def _capped(now: Residency, ask: Ask, rules: ResidencyRules) -> Residency:
    """`now` with a capacity that leaves weights no more than `rules` and `ask` allow."""
    if ask.most_weight_bytes is None and rules.weights_share >= 1:
        return now
    room_bytes = now.capacity_bytes - ask.run_bytes
    allowed_bytes = int(max(0, room_bytes) * rules.weights_share)
    if ask.most_weight_bytes is not None:
        allowed_bytes = min(allowed_bytes, ask.most_weight_bytes)
    stays_bytes = fixed_bytes(now, ask.leased, ask.outlook.floors)
    return replace(now, capacity_bytes=min(now.capacity_bytes, ask.run_bytes + max(allowed_bytes, stays_bytes)))


def must_be_whole(uses: Sequence[ComponentUse], least_bytes: int, budget_bytes: int, why: str) -> DoesNotFit:
    """All weights of `uses` have to be resident, `why`, for which `least_bytes` are needed."""
    named = " with ".join(use.component for use in uses)
    return does_not_fit(named, least_bytes, budget_bytes, f"with all weights resident: {why}")
