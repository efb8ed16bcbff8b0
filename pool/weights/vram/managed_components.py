"""`ManagedComponents`: the components of one GPU with their patchers, in the order of use.

Moves what it is told to; `pool.weights.vram.vram_manager` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec
from modelpool.pool.weights.patcher.graphed_calls import GraphStore
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes, Move, Residency, Resident, choose_modules
from modelpool.pool.weights.vram.leases import PatcherUse


class ManagedComponents:
    """The patchers by component, the least recently used first. Captured calls of evicted weights in `graphs` are
    dropped."""

    def __init__(self, graphs: GraphStore | None = None) -> None:
        self._graphs = graphs
        self._patchers: dict[ComponentKey, ModelPatcher] = {}
        #: the clone with the patches of the resident bytes: it is notified of evictions
        self._holders: dict[ComponentKey, ModelPatcher] = {}
        #: the sizes
        self.specs: dict[ComponentKey, ComponentSpec] = {}

    def __contains__(self, key: ComponentKey) -> bool:
        return key in self._patchers

    def __iter__(self) -> Iterator[ComponentKey]:
        """Iterate over a copy."""
        return iter(tuple(self._patchers))

    def __getitem__(self, key: ComponentKey) -> ModelPatcher:
        """Return the patcher of a component. Raises UnknownName."""
        if key not in self._patchers:
            raise unknown_name("component", key, self._patchers)
        return self._patchers[key]

    def get(self, key: ComponentKey) -> ModelPatcher | None:
        """Return the patcher of a component; None if it is not managed."""
        return self._patchers.get(key)

    def add(self, patcher: ModelPatcher) -> None:
        """Manage a component; nothing of it may be on the device yet. Adding it twice is an error."""
        assert patcher.key not in self._patchers, f"{patcher.key} is managed already"
        assert not patcher.resident_modules(), f"{patcher.key} has unaccounted bytes on the device"
        self._patchers = {patcher.key: patcher, **self._patchers}
        self.specs[patcher.key] = patcher.spec()

    def add_new(self, firsts: Sequence[PatcherUse]) -> None:
        """Add clones of the components of `firsts` that are not managed."""
        for patcher, _ in firsts:
            if patcher.key not in self._patchers:
                self.add(patcher.clone())

    def forget(self, key: ComponentKey) -> None:
        """Forget a component of which nothing is on the device."""
        self._holders.pop(key, None)
        del self._patchers[key], self.specs[key]

    def specs_with(self, firsts: Sequence[PatcherUse]) -> dict[ComponentKey, ComponentSpec]:
        """Return the sizes of all components, including new ones of `firsts`."""
        for patcher, _ in firsts:
            known = self._patchers.get(patcher.key, patcher)
            assert known.is_clone(patcher), f"two components are called {patcher.key}"
        return {**{p.key: p.spec() for p, _ in firsts if p.key not in self.specs}, **self.specs}

    def resident(self) -> tuple[Resident, ...]:
        """Return the resident bytes, read from the patchers."""
        entries = (patcher.resident() for patcher in self._patchers.values())
        return tuple(entry for entry in entries if entry.resident_bytes)

    def hold(self, patcher: ModelPatcher) -> None:
        """From now on the resident bytes of its component have the patches of this clone."""
        self._holders[patcher.key] = patcher

    def used(self, key: ComponentKey) -> None:
        """Note that the component is the most recently used one."""
        self._patchers[key] = self._patchers.pop(key)

    def modules(self, patcher: ModelPatcher, target_bytes: int, may_count: bool = True) -> Sequence[ModuleBytes]:
        """Return modules to choose from; with operation counts if the choice is partial. Unless `may_count`, with those
        that are known already."""
        is_partial = 0 < target_bytes < self.specs[patcher.key].weight_bytes
        counts = is_partial and (may_count or patcher.has_counted_flops)
        return patcher.modules_with_flops if counts else patcher.modules()

    def shrink_to(self, move: Move, after: Residency, may_count: bool = True) -> int:
        """Carry out an eviction of a plan. Returns the bytes evicted."""
        entry = after.of(move.component)
        return self.shrink(move.component, entry.resident_bytes if entry else 0, may_count)

    def shrink(self, key: ComponentKey, target_bytes: int = 0, may_count: bool = True) -> int:
        """Evict modules until at most `target_bytes` are resident. Returns the bytes evicted."""
        patcher = self._holders.get(key, self._patchers[key])
        modules = self.modules(patcher, target_bytes, may_count)
        kept = choose_modules(modules, target_bytes, patcher.resident_modules(), grow=False)
        if self._graphs is not None and kept < patcher.resident_modules():
            self._graphs.drop(key)
        report = patcher.evict_except(kept)
        if not patcher.resident_modules():
            self._holders.pop(key, None)
        return report.freed_bytes
