"""Errors for runs that do not fit next to resident weights, with suggestions.

Two kinds: DoesNotFit if the budget is too small, which only a user can change; RanOutOfMemory if it would be enough
without the memory taken by other programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.pool.values.core.errors import DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.values.specs.spec import ComponentUse
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.weights.plan.eviction_plan import Residency


def taken_by_others(refused: DoesNotFit, taken_bytes: int, in_run: bool = False) -> RanOutOfMemory:
    """Convert `refused` to RanOutOfMemory: `taken_bytes` of the budget are used elsewhere, and all of it would be
    enough. `in_run`: another run is in progress, which may have exceeded its plan."""
    who = "other programs, or the run around it," if in_run else "other programs"
    return RanOutOfMemory(f"{refused}; {who} have taken {format_bytes(taken_bytes)} of the device")


def does_not_fit_as_is(
    uses: Sequence[ComponentUse], now: Residency, run_bytes: int, budget_bytes: int
) -> DoesNotFit | RanOutOfMemory:
    """The error for a run with `uses` that needs `run_bytes` next to all resident weights, which is more than is free.

    `now` has the current capacity, `budget_bytes` is the capacity without other programs.
    """
    least_bytes, resident_bytes = now.used_bytes + run_bytes, now.used_bytes
    missing_bytes = least_bytes - now.capacity_bytes
    helps = "make a smaller image, or give it more device memory (vram)"
    if resident_bytes >= missing_bytes:
        resident = f"{format_bytes(resident_bytes)} of weights are resident"
        helps = f"{resident}; unload {format_bytes(missing_bytes)} of them, or {helps}"
    elif resident_bytes:
        resident = f"the {format_bytes(resident_bytes)} of weights that are resident"
        helps = f"unloading {resident} is not enough; {helps}"
    named = " with ".join(use.component for use in uses)
    refused = does_not_fit(named, least_bytes, now.capacity_bytes, helps)
    if now.capacity_bytes < least_bytes <= budget_bytes:
        return taken_by_others(refused, budget_bytes - now.capacity_bytes)
    return refused
