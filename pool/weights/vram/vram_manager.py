"""`VramManager`: the single owner of weights on one GPU. Leases over `pool.weights.plan.eviction_plan.plan`.

Tracks the components of one GPU, their order of use and their pins. `plan` decides what moves; the patcher of a
component moves it. Not thread-safe: one process per GPU, one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.values.core.errors import DoesNotFit, UserError, format_bytes
from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.patcher.graphed_calls import GraphStore
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget, realize_in_steps
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.weights.plan.eviction_plan import (
    Residency,
    ResidencyPlan,
    choose_modules,
    needed_bytes,
    plan,
)
from modelpool.pool.weights.plan.policy_plan import PlanRequest, fixed_bytes, plan_under_policy
from modelpool.pool.weights.plan.preload_plan import RunningLease, plan_preload
from modelpool.pool.weights.vram.leases import HeldLeases, Lease, PatcherUse, merged_uses, with_dependents
from modelpool.pool.weights.vram.managed_components import ManagedComponents
from modelpool.pool.weights.vram.memory_errors import does_not_fit_as_is, taken_by_others
from modelpool.pool.weights.vram.pins import Pins

__all__ = ["Lease", "PatcherUse", "VramManager", "with_dependents"]


@dataclass(frozen=True, slots=True)
class MoveTotals:
    """Totals of the moves that carried out a plan."""

    uploaded_bytes: int = 0
    switches: int = 0


class VramManager:
    """Weights on this GPU, and making room for the next run.

    Invariants: the resident bytes of all patchers stay within `capacity_bytes`, and while leases are held they leave
    room for the activations and scratch of all of them. Leased bytes do not move. Pinned bytes (`pins`) are evicted
    only by explicit calls (`unload`, `unload_all`, `remove`, `close`).
    """

    def __init__(
        self,
        capacity_bytes: int,
        rules: ResidencyRules | None = None,
        free_bytes: Callable[[], int] | None = None,
        graphs: GraphStore | None = None,
    ) -> None:
        """`free_bytes` returns the memory that the device could still give to this process; None if unknown. The memory
        of `graphs` is counted, and freed before anything is evicted."""
        self.capacity_bytes = capacity_bytes
        self._rules = rules or ResidencyRules()
        self._free_bytes = free_bytes
        self._graphs = graphs
        if graphs is not None:
            # a graph holds the activations of a call in addition to the activations of a planned run
            graphs.has_room = lambda: self.room_bytes >= self._leases.run_bytes
        #: the managed components; leases add the components of runs
        self.components = ManagedComponents(graphs)
        self._leases = HeldLeases()
        #: pins and priorities, set by the callers
        self.pins = Pins(self.components.specs)

    def remove(self, key: ComponentKey) -> None:
        """Unload a component and forget it. Raises UserError if a run uses it, UnknownName if it is not managed."""
        self.unload(key)
        self.pins.forget(key)
        self.components.forget(key)

    def is_idle(self, key: ComponentKey) -> bool:
        """Whether nothing of the component is on the device and no run uses it. Raises UnknownName."""
        return not self.components[key].resident().resident_bytes and key not in self._leases

    def residency(self) -> Residency:
        """Return the current residency, read from the patchers."""
        return Residency(self.capacity_bytes, self.components.resident())

    def activation_room(
        self, uses: Sequence[ComponentUse], staying_bytes: int | None = None, new: Iterable[ComponentSpec] = ()
    ) -> int:
        """Return the bytes that a run with `uses` could have for its activations now, if at most `staying_bytes` of
        weights stay; None: if everything evictable is evicted. Negative if not even the scratch of its weights fits.

        `new` are sizes of components of the run that are not managed yet: if nothing may stream, they take room as the
        others do.
        """
        now = self._now()
        room_bytes = now.capacity_bytes + self.graph_bytes - needed_bytes(uses, 0)
        if staying_bytes is not None:
            return room_bytes - staying_bytes
        specs = {**{spec.key: spec for spec in new}, **self.components.specs}
        keys = set() if self._rules.may_stream else {use.component for use in uses}
        whole_bytes = sum(specs[key].weight_bytes for key in keys if key in specs)
        return room_bytes - fixed_bytes(now, self._leases.keys, self._floors(), but=keys) - whole_bytes

    @property
    def leased(self) -> frozenset[ComponentKey]:
        """Components that are currently leased."""
        return self._leases.keys

    @property
    def room_bytes(self) -> int:
        """Bytes that could be loaded now next to resident weights and the allowance of held leases."""
        now = self._now()
        return max(0, now.capacity_bytes - now.used_bytes)

    @property
    def keeps_all(self) -> bool:
        """Whether weights stay after runs, and may take all memory."""
        return self._rules.keeps_idle and self._rules.weights_share >= 1

    def has_room(self, wanted: Sequence[PatcherUse], run_bytes: int) -> bool:
        """Whether all weights of a run fit next to resident weights and the runs of held leases, with `run_bytes` for
        its activations and scratch: nothing would leave, stream, or be divided for it."""
        missing_bytes = sum(
            patcher.spec().weight_bytes - patcher.resident().resident_bytes for patcher, _ in merged_uses(wanted)
        )
        return self.keeps_all and missing_bytes + run_bytes <= self.room_bytes

    @contextmanager
    def lease(
        self,
        wanted: Sequence[PatcherUse],
        activation_bytes: int,
        needed_next: Sequence[ComponentKey] = (),
        most_weight_bytes: int | None = None,
        alike: bool = False,
    ) -> Iterator[Lease]:
        """Make room, load the weights, and keep them until the block is left.

        `wanted` are clones, each with its `ModelPatcher.use` (`with_dependents` collects a run's clones); of clones of
        one component the first is loaded, the others stream their patches. Components that are not managed are added if
        the run fits. `needed_next` are components expected to be needed afterwards, soonest first; at most
        `most_weight_bytes` of weights are resident during the lease, except for those that may not leave. `alike`:
        their bytes alone decide which modules are resident, not those that were there before. Leases may be nested:
        each has its own room. A load that fails is rolled back: what arrived is evicted, what was evicted for it stays
        away, nothing is leased, and the residency is exact. Raises DoesNotFit if no eviction would be enough,
        RanOutOfMemory if it would be without the memory of other programs, torch.OutOfMemoryError if the device runs
        out nevertheless.
        """
        firsts = merged_uses(wanted)
        uses, leased = [use for _, use in firsts], self._leases.keys
        why_whole = "" if self._rules.may_stream else "the policy does not allow streaming"
        hints = self._outlook(needed_next)
        ask = PlanRequest(
            uses, self.components.specs_with(firsts), activation_bytes, leased, hints, most_weight_bytes, why_whole
        )
        decided, kept_bytes = self._decide_with_graphs(ask), sum(patcher.product_bytes for patcher, _ in firsts)
        if kept_bytes:
            ask, decided = self._with_products(ask, decided, kept_bytes)
            kept_bytes = kept_bytes if ask.activation_bytes > activation_bytes else 0
        moved = self._apply(decided, firsts, alike)
        planned_bytes = decided.after.used_bytes + self._leases.run_bytes + ask.run_bytes
        is_there = moved.uploaded_bytes == 0 and decided.streamed_bytes == 0
        with ExitStack() as leasing:
            leasing.enter_context(self._leasing([use.component for use in uses], ask.run_bytes))
            for patcher, _ in firsts if kept_bytes else ():
                leasing.enter_context(patcher.keeping_products(patcher.product_bytes))
            yield Lease(decided, moved.uploaded_bytes, moved.switches, is_there, planned_bytes, kept_bytes)

    @property
    def graph_bytes(self) -> int:
        """Device memory of captured calls."""
        return 0 if self._graphs is None else self._graphs.held_bytes

    def drop_graphs(self) -> int:
        """Drop all captured calls. Returns the bytes that they held."""
        return 0 if self._graphs is None else self._graphs.drop_all()

    def _decide_with_graphs(self, ask: PlanRequest) -> ResidencyPlan:
        """The plan; without captured calls if something would have to leave or stream for them."""
        if not self.graph_bytes:
            return self._decide(ask)
        try:
            decided = self._decide(ask)
            if not decided.evict and not decided.streamed_bytes:
                return decided
        except (DoesNotFit, RanOutOfMemory):
            pass
        self.drop_graphs()
        return self._decide(ask)

    def _with_products(
        self, ask: PlanRequest, decided: ResidencyPlan, kept_bytes: int
    ) -> tuple[PlanRequest, ResidencyPlan]:
        """The request and the plan with room for the factors of products, if no more weights stream for it: these would
        cross the bus in every pass, as the factors do. Otherwise `ask` and `decided`."""
        more = replace(ask, activation_bytes=ask.activation_bytes + kept_bytes)
        try:
            with_room = self._decide(more)
        except (DoesNotFit, RanOutOfMemory):
            return ask, decided
        return (more, with_room) if with_room.streamed_bytes <= decided.streamed_bytes else (ask, decided)

    @contextmanager
    def lease_as_is(self, wanted: Sequence[PatcherUse], activation_bytes: int) -> Iterator[None]:
        """Keep resident weights where they are until the block is left; move nothing. The rest streams.

        Raises DoesNotFit, with a suggestion, if that leaves too little for the run; RanOutOfMemory if it would be
        enough without the memory of other programs.
        """
        firsts = merged_uses(wanted)
        uses = [use for _, use in firsts]
        now, run_bytes = self._now(), needed_bytes(uses, activation_bytes)
        if now.used_bytes + run_bytes > now.capacity_bytes and self.drop_graphs():
            now = self._now()
        if now.used_bytes + run_bytes > now.capacity_bytes:
            raise does_not_fit_as_is(uses, now, run_bytes, self._budget_bytes)
        self.components.add_new(firsts)
        with self._leasing([use.component for use in uses], run_bytes):
            yield

    def preload(
        self,
        wanted: Sequence[PatcherUse],
        activation_bytes: int,
        needed_next: Sequence[ComponentKey] = (),
        kept: Iterable[ComponentKey] = (),
    ) -> Generator[int, None, None]:
        """Load what the next task will lease, during the runs that hold leases now, step by step, as
        `pool.weights.plan.preload_plan` decides at the first step. Each step yields its bytes on the bus. Components in
        `kept` are not evicted for it.

        Loaded weights stay, whether all steps are made or not, and are like any unleased weights. Nothing moves if the
        policy keeps no weights between runs. If a step fails, what arrived of its component is evicted again. Raises
        torch.OutOfMemoryError if the device runs out.
        """
        if not self._rules.keeps_idle or self._rules.weights_share < 1:
            return
        firsts, now, held = (
            merged_uses(wanted),
            self._now(),
            RunningLease(self._leases.keys.union(kept), self._leases.run_bytes),
        )
        now = replace(now, capacity_bytes=now.capacity_bytes + held.run_bytes)
        uses, specs = [use for _, use in firsts], self.components.specs_with(firsts)
        hints = self._outlook(needed_next if self._rules.may_stream else ())
        decided = plan_preload(now, held, uses, specs, activation_bytes, hints)
        if not decided.arrive:
            return
        self.components.add_new(firsts)
        after, patchers = decided.after(now), {patcher.key: patcher for patcher, _ in firsts}
        for move in decided.evict:
            self.components.shrink_to(move, after, may_count=False)  # in a slice of a run
        for arrival in decided.arrive:
            key = arrival.use.component
            patcher = patchers[key]
            self.components.hold(patcher)
            self.components.used(key)
            modules = choose_modules(patcher.modules(), arrival.to_bytes, patcher.resident_modules())
            yield from realize_in_steps(patcher, WeightsTarget(modules, patcher.patches))

    def load(self, patcher: ModelPatcher, most_bytes: int | None = None) -> int:
        """Load weights of a component until `most_bytes` of it are resident, or as many as fit; None: all of it.
        Nothing is evicted. Returns the bytes that arrived, 0 if there is no room.

        Resident weights get the patches of `patcher`. Raises DoesNotFit for None if not all of it fits, and if a run
        uses it with other patches; otherwise fails as `lease` does.
        """
        firsts = merged_uses([(patcher, patcher.use())])
        (_, use), key, before = firsts[0], patcher.key, patcher.resident()
        specs, now = self.components.specs_with(firsts), self._now()
        asked_bytes = specs[key].weight_bytes if most_bytes is None else min(most_bytes, specs[key].weight_bytes)
        target_bytes = max(before.resident_bytes, asked_bytes)
        is_there = before.resident_bytes == target_bytes and before.patch_digest == use.patch_digest
        has_room = now.used_bytes + use.scratch_bytes <= now.capacity_bytes
        if target_bytes == 0 or is_there or (most_bytes is not None and not has_room):
            return 0
        ask = PlanRequest(
            [use],
            {**specs, key: replace(specs[key], weight_bytes=target_bytes)},  # a plan for the requested part
            activation_bytes=0,
            leased=self._leases.keys | {entry.component for entry in now.entries if entry.component != key},
            hints=EvictionHints(pinned_bytes={key: before.resident_bytes}),
            why_whole="" if most_bytes is not None else "nothing is evicted for it",
        )
        self._apply(self._decide_with_graphs(ask), firsts)
        return patcher.resident().resident_bytes - before.resident_bytes

    def unload(self, key: ComponentKey, least_bytes: int | None = None) -> int:
        """Evict at least `least_bytes` (None: all) of a component, or all that is resident. Returns the bytes evicted.
        Raises UserError if a run uses it, UnknownName if it is not managed."""
        entry = self.components[key].resident()
        if key in self._leases:
            raise UserError(f"{key}: a run is using it; unload it when the run has ended")
        left_bytes = 0 if least_bytes is None else max(0, entry.resident_bytes - least_bytes)
        return self.components.shrink(key, left_bytes)

    def free(self, size_bytes: int) -> int:
        """Evict idle components in the order of plans until `size_bytes` are evicted or none is left that may be.
        Returns the bytes evicted."""
        now = self.residency()
        leased, hints = self._leases.keys, self._outlook(())
        kept_bytes = max(now.used_bytes - max(0, size_bytes), fixed_bytes(now, leased, hints.pinned_bytes))
        decided = plan(replace(now, capacity_bytes=kept_bytes), (), self.components.specs, 0, leased, hints)
        return sum(self.components.shrink_to(move, decided.after) for move in decided.evict)

    def free_idle(self, but: Iterable[ComponentKey] = ()) -> int:
        """Evict every component that is neither leased, pinned nor in `but`. Returns the bytes evicted."""
        kept = {*but, *self.pins.pinned, *self._leases.keys}
        return sum(self.components.shrink(key) for key in self.components if key not in kept)

    def unload_all(self) -> int:
        """Evict everything that is not leased, pinned or not. Returns the bytes evicted."""
        return sum(self.components.shrink(key) for key in self.components if key not in self._leases)

    def close(self) -> None:
        """Evict everything and forget all components. No lease may be held. Idempotent."""
        assert not self._leases.keys, f"closed while {set(self._leases.keys)} are leased"
        self.unload_all()
        for key in self.components:
            self.pins.forget(key)
            self.components.forget(key)

    @property
    def _budget_bytes(self) -> int:
        """Budget of weights and one more run, without other programs."""
        return self.capacity_bytes - self._leases.run_bytes

    def _seen_bytes(self, used_bytes: int) -> int:
        """Resident weights plus free memory of the device; the full budget if unknown."""
        return self.capacity_bytes if self._free_bytes is None else used_bytes + max(0, self._free_bytes())

    def _now(self) -> Residency:
        """The residency, with the capacity for weights and one more run: less than the budget if other programs use
        some."""
        now = self.residency()
        ours_bytes = self._leases.ours_bytes(self._seen_bytes(now.used_bytes))
        capacity_bytes = min(self.capacity_bytes, ours_bytes) - self._leases.run_bytes - self.graph_bytes
        return replace(now, capacity_bytes=max(0, capacity_bytes))

    def _decide(self, ask: PlanRequest) -> ResidencyPlan:
        """The plan. Raises DoesNotFit, and RanOutOfMemory if the budget would be enough without other programs."""
        now = self._now()
        try:
            return plan_under_policy(now, ask, self._rules)
        except DoesNotFit as refused:
            taken_bytes = self._budget_bytes - now.capacity_bytes
            if taken_bytes <= 0:
                raise
            plan_under_policy(replace(now, capacity_bytes=self._budget_bytes), ask, self._rules)
            raise taken_by_others(refused, taken_bytes, in_run=bool(self._leases.keys)) from refused

    def _outlook(self, needed_next: Sequence[ComponentKey]) -> EvictionHints:
        return EvictionHints(tuple(dict.fromkeys(needed_next)), self._floors(), self.pins.priorities)

    def _floors(self) -> dict[ComponentKey, int]:
        """Bytes that plans leave of each pinned component: complete modules, so up to one more than pinned."""
        return {key: self._floor_of(key, held_bytes) for key, held_bytes in self.pins.pinned.items()}

    def _floor_of(self, key: ComponentKey, held_bytes: int) -> int:
        if held_bytes <= 0:
            return 0
        largest_bytes = max((m.resident_bytes for m in self.components[key].modules()), default=0)
        return min(held_bytes + largest_bytes, self.components.specs[key].weight_bytes)

    def _apply(self, decided: ResidencyPlan, firsts: Sequence[PatcherUse], alike: bool = False) -> MoveTotals:
        """Carry out a plan: all evictions before any upload. Atomic: rolled back on errors. `alike` as for `lease`."""
        self.components.add_new(firsts)
        before = {patcher.key: patcher.resident_modules() for patcher, _ in firsts}
        uploaded_bytes, switches, freed_bytes = 0, 0, 0
        try:
            for move in decided.evict:
                freed_bytes += self.components.shrink_to(move, decided.after)
            for patcher, use in firsts:
                entry = decided.after.of(use.component)
                target_bytes = entry.resident_bytes if entry else 0
                there = frozenset[str]() if alike else patcher.resident_modules()
                modules = choose_modules(self.components.modules(patcher, target_bytes), target_bytes, there)
                self.components.hold(patcher)
                report = patcher.realize(WeightsTarget(modules, patcher.patches))
                uploaded_bytes += report.uploaded_bytes
                switches += report.switched
                self.components.used(use.component)
        except BaseException as error:
            with ExitStack() as rolling_back:  # each, whatever the others raise
                for patcher, _ in firsts:
                    rolling_back.callback(patcher.evict_except, before[patcher.key])
            if freed_bytes:
                error.add_note(
                    f"the load was rolled back; {format_bytes(freed_bytes)} that were evicted for it stay away"
                )
            raise
        return MoveTotals(uploaded_bytes, switches)

    @contextmanager
    def _leasing(self, keys: Sequence[ComponentKey], run_bytes: int) -> Iterator[None]:
        seen_bytes = self._seen_bytes(self.residency().used_bytes)
        try:
            with self._leases.holding(keys, run_bytes, seen_bytes):
                yield
        finally:
            if not self._rules.keeps_idle:
                for key in keys:
                    if key not in self._leases:
                        self.components.shrink(key, self._floors().get(key, 0))
