"""`VramManager`: the one owner of weights on a GPU. Leases over `pool.residency.plan`.

Knows the components of one GPU and in which order they were last used. What should move is `plan`'s decision; how a
component moves is its patcher's. Not thread safe: one process per GPU, one run at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pool.patcher import ModelPatcher, WeightsTarget
from pool.residency import Residency, ResidencyPlan, choose_modules, plan
from pool.spec import ComponentKey, ComponentSpec, ComponentUse


@dataclass(frozen=True, slots=True)
class Lease:
    """A hold on components for the length of a run.

    plan             what was decided
    uploaded_bytes   what crossed the bus to bring it about
    patch_switches   components that were there with another patch set
    all_resident     every component was there already, whole and with the right patches
    """

    plan: ResidencyPlan
    uploaded_bytes: int
    patch_switches: int
    all_resident: bool


class VramManager:
    """Which components are on this GPU, and making room for the next run.

    Invariant: the resident bytes of all patchers stay within `capacity_bytes`, and while a lease is held they leave
    room for its activations and scratch.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._patchers: dict[ComponentKey, ModelPatcher] = {}  # least recently used first
        self._specs: dict[ComponentKey, ComponentSpec] = {}
        self._leased: Counter[ComponentKey] = Counter()

    def add(self, patcher: ModelPatcher) -> None:
        """Take charge of a component; nothing of it may be on the device yet. Naming one again is an error."""
        assert patcher.key not in self._patchers, f"{patcher.key} is managed already"
        assert not patcher.resident_modules(), f"{patcher.key} has bytes on the device that nobody accounts for"
        self._patchers = {patcher.key: patcher, **self._patchers}
        self._specs[patcher.key] = patcher.spec()

    def __contains__(self, key: ComponentKey) -> bool:
        return key in self._patchers

    def residency(self) -> Residency:
        """What is on the GPU now: the truth, read off the patchers."""
        entries = (p.resident() for p in self._patchers.values())
        return Residency(self.capacity_bytes, tuple(e for e in entries if e.resident_bytes))

    @contextmanager
    def lease(self, wanted: Sequence[tuple[ModelPatcher, ComponentUse]], activation_bytes: int) -> Iterator[Lease]:
        """Make room, bring the weights in, and keep them there until the block is left.

        `wanted` are clones of managed patchers, each with the use that `ModelPatcher.use` gives for it. Whatever
        happens inside or on the way in, the residency stays exact and nothing stays leased.
        Raises DoesNotFit when no eviction would be enough, torch.OutOfMemoryError when the device says so all the same.
        """
        uses = [use for _, use in wanted]
        decided = plan(self.residency(), uses, self._specs, activation_bytes, frozenset(self._leased))
        for move in decided.evict:  # all that leaves, before anything arrives
            self._shrink(move.component, decided.after)
        uploaded_bytes, switches = 0, 0
        for patcher, use in wanted:
            target = self._target(patcher, use, decided.after)
            report = patcher.realize(target)
            uploaded_bytes += report.uploaded_bytes
            switches += report.switched
            self._patchers[use.component] = self._patchers.pop(use.component)  # most recently used
        keys = [u.component for u in uses]
        self._leased.update(keys)
        try:
            yield Lease(decided, uploaded_bytes, switches, uploaded_bytes == 0 and decided.streamed_bytes == 0)
        finally:
            self._leased = +(self._leased - Counter(keys))

    def unload_all(self) -> None:
        """Take every byte off the device that is not leased."""
        for key, patcher in self._patchers.items():
            if not self._leased[key]:
                patcher.unload()

    def _shrink(self, key: ComponentKey, after: Residency) -> None:
        patcher = self._patchers[key]
        entry = after.of(key)
        kept = choose_modules(
            [m for m in patcher.modules() if m.name in patcher.resident_modules()],
            entry.resident_bytes if entry else 0,
            patcher.resident_modules(),
        )
        patcher.shrink(kept)

    def _target(self, patcher: ModelPatcher, use: ComponentUse, after: Residency) -> WeightsTarget:
        entry = after.of(use.component)
        modules = choose_modules(patcher.modules(), entry.resident_bytes if entry else 0, patcher.resident_modules())
        return WeightsTarget(modules, patcher.patches)
