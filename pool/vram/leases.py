"""Leases on components: what a run asks to have on the device, and which of it is held now.

Knows which components may not move and how much their runs may allocate beside them. Moves nothing and decides nothing
about what should be resident (`pool.vram.vram_manager`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from modelpool.pool.patcher.hooks import HookGroup
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.patcher.patcher_state import models_to_load
from modelpool.pool.plan.residency import ResidencyPlan
from modelpool.pool.specs.spec import ComponentKey, ComponentUse


@dataclass(frozen=True, slots=True)
class Lease:
    """A hold on components for the length of a run.

    plan             what was decided
    uploaded_bytes   what crossed the bus to bring it about
    patch_switches   components that were there with another patch set
    all_resident     every component was there already, whole and with the right patches
    planned_bytes    the most device memory that the plan allows for: weights, activations and scratch, those of the
                     leases around it included
    """

    plan: ResidencyPlan
    uploaded_bytes: int
    patch_switches: int
    all_resident: bool
    planned_bytes: int


#: a component with what one run needs of it
Wanted = tuple[ModelPatcher, ComponentUse]


def with_extras(patcher: ModelPatcher, passes: int = 1, groups: Iterable[HookGroup | None] = ()) -> tuple[Wanted, ...]:
    """A patcher and those that its runs need beside it, ControlNets and the like, each with what one run of `passes`
    passes needs of it. `groups` are the hooks of its conditions."""
    return tuple((one, one.use(passes)) for one in (patcher, *models_to_load(patcher, groups)))


def one_each(wanted: Sequence[Wanted]) -> list[Wanted]:
    """One entry a component, the first of its clones, with what all of them need."""
    firsts: dict[ComponentKey, Wanted] = {}
    for patcher, use in wanted:
        assert patcher.key == use.component, f"{use.component} is not the use of {patcher.key}"
        if patcher.key not in firsts:
            firsts[patcher.key] = (patcher, use)
            continue
        first, known = firsts[patcher.key]
        assert first.is_clone(patcher), f"two components are called {patcher.key}"
        most_bytes = max(known.scratch_bytes, use.scratch_bytes)
        firsts[patcher.key] = (first, replace(known, scratch_bytes=most_bytes))
    return list(firsts.values())


class HeldLeases:
    """The leases that are held now."""

    def __init__(self) -> None:
        self._counts: Counter[ComponentKey] = Counter()
        self._run_bytes = 0
        #: what was this process's or free when nothing but weights was here
        self._ours_at_first_bytes = 0

    def __contains__(self, key: ComponentKey) -> bool:
        return self._counts[key] > 0

    @property
    def keys(self) -> frozenset[ComponentKey]:
        """Components that may not move."""
        return frozenset(self._counts)

    @property
    def run_bytes(self) -> int:
        """What the runs of all held leases may have beside weights: activations and scratch."""
        return self._run_bytes

    def ours_bytes(self, seen_bytes: int) -> int:
        """What this process may have of the device: `seen_bytes` (its weights, and what is free) with what the runs of
        held leases have allocated, which is neither.

        Nobody counts that: it is taken to be what has gone since the first lease was taken, up to what the leases allow
        for. Where other programs took some of it meanwhile, this is too much by that.
        """
        if not self._counts:
            return seen_bytes
        self._ours_at_first_bytes = max(self._ours_at_first_bytes, seen_bytes)  # other programs have left
        return min(seen_bytes + self._run_bytes, self._ours_at_first_bytes)

    @contextmanager
    def holding(self, keys: Sequence[ComponentKey], run_bytes: int, seen_bytes: int) -> Iterator[None]:
        """One more lease, for the length of the block. `seen_bytes` as for `ours_bytes`."""
        if not self._counts:
            self._ours_at_first_bytes = seen_bytes
        self._counts.update(keys)
        self._run_bytes += run_bytes
        try:
            yield
        finally:
            self._counts = +(self._counts - Counter(keys))
            self._run_bytes -= run_bytes
