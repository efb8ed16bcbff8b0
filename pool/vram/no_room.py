"""What is raised when a run finds no room beside the weights that have to be there, with what would help.

Two kinds: DoesNotFit where the budget is too small, which only a person can change; RanOutOfMemory where it would be
enough without what other programs have taken. Decides neither who leaves nor what is tried next.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.pool.core.errors import DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.plan.residency import Residency
from modelpool.pool.specs.spec import ComponentUse


def taken_by_others(refused: DoesNotFit, taken_bytes: int, in_run: bool = False) -> RanOutOfMemory:
    """`refused` as what it is when `taken_bytes` of the budget are gone, and all of it would do. `in_run`: another run
    is under way, which may have taken more than was planned for it."""
    who = "other programs, or the run around it," if in_run else "other programs"
    return RanOutOfMemory(f"{refused}; {who} have taken {format_bytes(taken_bytes)} of the device")


def no_room_as_is(
    uses: Sequence[ComponentUse], now: Residency, run_bytes: int, budget_bytes: int
) -> DoesNotFit | RanOutOfMemory:
    """A run with `uses` needs `run_bytes` beside all weights that are there, and there is less.

    `now` has the room there is, `budget_bytes` is what there would be without other programs.
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
