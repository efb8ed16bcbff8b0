"""Leases on components: what a run needs on the device, and which leases are held.

Tracks which components may not move and how much their runs may allocate. `pool.weights.vram.vram_manager` decides what
should be resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse
from modelpool.pool.weights.patcher.hooks import HookGroup
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, models_to_load
from modelpool.pool.weights.plan.eviction_plan import ResidencyPlan


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease on components for the length of a run.

    plan             the plan that was carried out
    uploaded_bytes   bytes that it moved over the bus
    patch_switches   components that were resident with another patch set
    all_resident     every component was already fully resident with the right patches
    planned_bytes    maximum device memory that the plan allows for: weights, activations and scratch, outer leases
                     included
    kept_bytes       of that, for factors of LoRAs that its runs keep on the device
    """

    plan: ResidencyPlan
    uploaded_bytes: int
    patch_switches: int
    all_resident: bool
    planned_bytes: int
    kept_bytes: int = 0


#: a patcher with its use in one run
PatcherUse = tuple[ModelPatcher, ComponentUse]


def with_dependents(
    patcher: ModelPatcher, passes: int = 1, groups: Iterable[HookGroup | None] = ()
) -> tuple[PatcherUse, ...]:
    """Return a patcher and those that its runs also need (ControlNets, ...), each with its use for a run of `passes`
    passes. `groups` are the hooks of its conditions."""
    return tuple((one, one.use(passes)) for one in (patcher, *models_to_load(patcher, groups)))


def merged_uses(wanted: Sequence[PatcherUse]) -> list[PatcherUse]:
    """Return one entry per component: its first clone with the largest needs of all clones."""
    firsts: dict[ComponentKey, PatcherUse] = {}
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
    """The leases that are currently held."""

    def __init__(self) -> None:
        self._counts: Counter[ComponentKey] = Counter()
        self._run_bytes = 0
        #: memory of this process plus free memory, at a time when it held only weights
        self._ours_at_first_bytes = 0

    def __contains__(self, key: ComponentKey) -> bool:
        return self._counts[key] > 0

    @property
    def keys(self) -> frozenset[ComponentKey]:
        """Components that may not move."""
        return frozenset(self._counts)

    @property
    def run_bytes(self) -> int:
        """Activations and scratch of the runs of all held leases."""
        return self._run_bytes

    def ours_bytes(self, seen_bytes: int) -> int:
        """Return the device memory available to this process: `seen_bytes` (its weights and free memory) plus the
        allocations of the runs of held leases, which are neither.

        These are not counted: they are assumed to be what has disappeared since the first lease was taken, up to the
        allowance of the leases. If other programs took some of it meanwhile, the result is too large by that.
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
