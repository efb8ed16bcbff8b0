"""`VramManager`: the one owner of weights on a GPU. Leases over `pool.plan.residency.plan`.

Knows the components of one GPU, in which order they were last used, and what somebody wants kept. What should move is
`plan`'s decision; how a component moves is its patcher's. Not thread safe: one process per GPU, one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from modelpool.pool.core.errors import DoesNotFit, UserError, format_bytes, unknown_name
from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.patcher.model_patcher import ModelPatcher, WeightsTarget, realizing
from modelpool.pool.plan.policy_plan import Ask, fixed_bytes, ruled_plan
from modelpool.pool.plan.preload_plan import Held, plan_ahead
from modelpool.pool.plan.residency import (
    ModuleBytes,
    Move,
    Residency,
    ResidencyPlan,
    choose_modules,
    needed_bytes,
    plan,
)
from modelpool.pool.specs.outlook import Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.vram.leases import HeldLeases, Lease, Wanted, one_each, with_extras
from modelpool.pool.vram.no_room import no_room_as_is, taken_by_others
from modelpool.pool.vram.pins import Wishes

__all__ = ["Lease", "VramManager", "Wanted", "with_extras"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What bringing components to a plan took."""

    uploaded_bytes: int = 0
    switches: int = 0


class VramManager:
    """Which components are on this GPU, and making room for the next run.

    Invariants: the resident bytes of all patchers stay within `capacity_bytes`, and while leases are held they leave
    room for the activations and scratch of all of them. Leased bytes do not move. What is held (`wishes`) leaves only
    on demand of a person (`unload`, `unload_all`, `remove`, `close`).
    """

    def __init__(
        self,
        capacity_bytes: int,
        rules: ResidencyRules | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`free_bytes` says what the device could still give to this process now; None where nobody can say."""
        self.capacity_bytes = capacity_bytes
        self._rules = rules or ResidencyRules()
        self._free_bytes = free_bytes
        self._patchers: dict[ComponentKey, ModelPatcher] = {}  # least recently used first
        #: the clone whose patches the resident bytes carry: it hears when they leave
        self._holders: dict[ComponentKey, ModelPatcher] = {}
        self._specs: dict[ComponentKey, ComponentSpec] = {}
        self._leases = HeldLeases()
        #: what somebody wants kept, to be changed by whoever wants it
        self.wishes = Wishes(self._specs)

    def add(self, patcher: ModelPatcher) -> None:
        """Take charge of a component; nothing of it may be on the device yet. Naming one again is an error."""
        assert patcher.key not in self._patchers, f"{patcher.key} is managed already"
        assert not patcher.resident_modules(), f"{patcher.key} has bytes on the device that nobody accounts for"
        self._patchers = {patcher.key: patcher, **self._patchers}
        self._specs[patcher.key] = patcher.spec()

    def remove(self, key: ComponentKey) -> None:
        """Take a component off the device and forget it. Raises UserError when a run uses it, UnknownName when it is
        not managed."""
        self.unload(key)
        self._forget(key)

    def __contains__(self, key: ComponentKey) -> bool:
        return key in self._patchers

    def residency(self) -> Residency:
        """What is on the GPU now: the truth, read off the patchers."""
        entries = (p.resident() for p in self._patchers.values())
        return Residency(self.capacity_bytes, tuple(e for e in entries if e.resident_bytes))

    def activation_room(
        self, uses: Sequence[ComponentUse], staying_bytes: int | None = None, new: Iterable[ComponentSpec] = ()
    ) -> int:
        """Bytes that a run with `uses` could have for its activations now, when no more than `staying_bytes` of weights
        stay; None: if everything that may leave does. Below 0 when not even its weights' scratch fits.

        `new` are the sizes of those components of the run that nobody has added: where nothing may stream they take
        room as the others do.
        """
        now = self._now()
        room_bytes = now.capacity_bytes - needed_bytes(uses, 0)
        if staying_bytes is not None:
            return room_bytes - staying_bytes
        specs = {**{spec.key: spec for spec in new}, **self._specs}
        keys = set() if self._rules.may_stream else {use.component for use in uses}
        whole_bytes = sum(specs[key].weight_bytes for key in keys if key in specs)
        return room_bytes - fixed_bytes(now, self._leases.keys, self._floors(), but=keys) - whole_bytes

    @property
    def leased(self) -> frozenset[ComponentKey]:
        """Components that runs hold now."""
        return self._leases.keys

    @property
    def room_bytes(self) -> int:
        """What could be put on the device now beside the weights that are there, and what held leases may allocate."""
        now = self._now()
        return max(0, now.capacity_bytes - now.used_bytes)

    @contextmanager
    def lease(
        self,
        wanted: Sequence[Wanted],
        activation_bytes: int,
        needed_next: Sequence[ComponentKey] = (),
        most_weight_bytes: int | None = None,
    ) -> Iterator[Lease]:
        """Make room, bring the weights in, and keep them there until the block is left.

        `wanted` are clones, each with the use that `ModelPatcher.use` gives for it (`with_extras` finds those that a
        run needs together); of clones of one component the first is brought in, the others stream their patches.
        Components that nobody added are taken charge of when the run fits. `needed_next` are those that are expected to
        be needed here afterwards, soonest first; no more than `most_weight_bytes` of weights are resident while the
        lease is held, those that may not leave excepted. Leases may be nested: each has room of its own.
        A load that fails is rolled back: what arrived leaves again, what left for it stays away, nothing is leased, and
        the residency is exact. Raises DoesNotFit when no eviction would be enough, RanOutOfMemory when it would be
        without what other programs have taken, torch.OutOfMemoryError when the device says so all the same.
        """
        firsts = one_each(wanted)
        uses, leased = [use for _, use in firsts], self._leases.keys
        why_whole = "" if self._rules.may_stream else "the policy is not to stream any"
        outlook = self._outlook(needed_next)
        ask = Ask(uses, self._specs_with(firsts), activation_bytes, leased, outlook, most_weight_bytes, why_whole)
        decided = self._decide(ask)
        moved = self._bring_about(decided, firsts)
        planned_bytes = decided.after.used_bytes + self._leases.run_bytes + ask.run_bytes
        is_there = moved.uploaded_bytes == 0 and decided.streamed_bytes == 0
        with self._leasing([use.component for use in uses], ask.run_bytes):
            yield Lease(decided, moved.uploaded_bytes, moved.switches, is_there, planned_bytes)

    @contextmanager
    def lease_as_is(self, wanted: Sequence[Wanted], activation_bytes: int) -> Iterator[None]:
        """Keep what is resident where it is until the block is left; move nothing. What is not resident streams.

        Raises DoesNotFit when that leaves too little for the run, with what would help; RanOutOfMemory when it would be
        enough without what other programs have taken.
        """
        firsts = one_each(wanted)
        uses = [use for _, use in firsts]
        now, run_bytes = self._now(), needed_bytes(uses, activation_bytes)
        if now.used_bytes + run_bytes > now.capacity_bytes:
            raise no_room_as_is(uses, now, run_bytes, self._budget_bytes)
        self._take_charge(firsts)
        with self._leasing([use.component for use in uses], run_bytes):
            yield

    def bring_ahead(
        self,
        wanted: Sequence[Wanted],
        activation_bytes: int,
        needed_next: Sequence[ComponentKey] = (),
        kept: Iterable[ComponentKey] = (),
    ) -> Generator[int, None, None]:
        """Bring in what a task that is to come will lease, beside the runs that hold leases now, step by step: what
        `pool.plan.preload_plan` decides at the first. Each step yields the bytes that it brought over the bus. Nothing
        of `kept`
        leaves for it.

        What arrived stays, whether all steps are made or not, and is like all that nobody leases. Nothing moves where
        the policy leaves no weights between runs. When a step fails, what arrived of its component leaves again.
        Raises torch.OutOfMemoryError when the device says so.
        """
        if not self._rules.keeps_idle or self._rules.weights_share < 1:
            return
        firsts, now, held = one_each(wanted), self._now(), Held(self._leases.keys.union(kept), self._leases.run_bytes)
        now = replace(now, capacity_bytes=now.capacity_bytes + held.run_bytes)
        uses, specs = [use for _, use in firsts], self._specs_with(firsts)
        outlook = self._outlook(needed_next if self._rules.may_stream else ())
        decided = plan_ahead(now, held, uses, specs, activation_bytes, outlook)
        if not decided.arrive:
            return
        self._take_charge(firsts)
        after, patchers = decided.after(now), {patcher.key: patcher for patcher, _ in firsts}
        for move in decided.evict:
            self._shrink_to(move, after)
        for arrival in decided.arrive:
            key = arrival.use.component
            patcher = self._holders[key] = patchers[key]
            self._patchers[key] = self._patchers.pop(key)  # as if it had been used
            modules = choose_modules(patcher.modules(), arrival.to_bytes, patcher.resident_modules())
            yield from realizing(patcher, WeightsTarget(modules, patcher.patches))

    def load(self, patcher: ModelPatcher, most_bytes: int | None = None) -> int:
        """Bring weights of a component in until `most_bytes` of it are resident, or as many as there is room for; None:
        all of it. Whatever is on the device stays there. Returns the bytes that arrived, 0 when there is no room.

        What is there of it gets the patches of `patcher`. Raises DoesNotFit for None when not all of it fits beside
        what is there, and when a run uses it with other patches; else fails as `lease` does.
        """
        firsts = one_each([(patcher, patcher.use())])
        (_, use), key, before = firsts[0], patcher.key, patcher.resident()
        specs, now = self._specs_with(firsts), self._now()
        asked_bytes = specs[key].weight_bytes if most_bytes is None else min(most_bytes, specs[key].weight_bytes)
        target_bytes = max(before.resident_bytes, asked_bytes)
        is_there = before.resident_bytes == target_bytes and before.patch_digest == use.patch_digest
        has_room = now.used_bytes + use.scratch_bytes <= now.capacity_bytes
        if target_bytes == 0 or is_there or (most_bytes is not None and not has_room):
            return 0
        ask = Ask(
            [use],
            {**specs, key: replace(specs[key], weight_bytes=target_bytes)},  # a plan for the part that is asked for
            activation_bytes=0,
            leased=self._leases.keys | {entry.component for entry in now.entries if entry.component != key},
            outlook=Outlook(floors={key: before.resident_bytes}),
            why_whole="" if most_bytes is not None else "nothing leaves for it",
        )
        self._bring_about(self._decide(ask), firsts)
        return patcher.resident().resident_bytes - before.resident_bytes

    def unload(self, key: ComponentKey, least_bytes: int | None = None) -> int:
        """Take at least `least_bytes` (None: all) of a component off the device, or what there is. Returns the bytes
        that left. Raises UserError when a run uses it, UnknownName when it is not managed."""
        if self._known(key) in self._leases:
            raise UserError(f"{key}: a run is using it; expected to be asked to unload it when the run has ended")
        entry = self._patchers[key].resident()
        left_bytes = 0 if least_bytes is None else max(0, entry.resident_bytes - least_bytes)
        return self._shrink(key, left_bytes)

    def free(self, size_bytes: int) -> int:
        """Let idle components leave, in the order in which plans would let them, until `size_bytes` have left or none
        are left that may. Returns the bytes that left."""
        now = self.residency()
        leased, outlook = self._leases.keys, self._outlook(())
        kept_bytes = max(now.used_bytes - max(0, size_bytes), fixed_bytes(now, leased, outlook.floors))
        decided = plan(replace(now, capacity_bytes=kept_bytes), (), self._specs, 0, leased, outlook)
        return sum(self._shrink_to(move, decided.after) for move in decided.evict)

    def free_idle(self, but: Iterable[ComponentKey] = ()) -> int:
        """Let every component leave that is neither leased, held nor in `but`. Returns the bytes that left."""
        kept = {*but, *self.wishes.held, *self._leases.keys}
        return sum(self._shrink(key, 0) for key in tuple(self._patchers) if key not in kept)

    def unload_all(self) -> int:
        """Take every byte off the device that is not leased, held or not. Returns the bytes that left."""
        return sum(self._shrink(key, 0) for key in tuple(self._patchers) if key not in self._leases)

    def close(self) -> None:
        """Take every byte off the device and forget all components. No lease may be held. Idempotent."""
        assert not self._leases.keys, f"closed while {set(self._leases.keys)} are leased"
        self.unload_all()
        for key in tuple(self._patchers):
            self._forget(key)

    def _forget(self, key: ComponentKey) -> None:
        self.wishes.forget(key)
        self._holders.pop(key, None)
        del self._patchers[key], self._specs[key]

    def _known(self, key: ComponentKey) -> ComponentKey:
        if key not in self._patchers:
            raise unknown_name("component", key, self._patchers)
        return key

    @property
    def _budget_bytes(self) -> int:
        """What weights and one more run may take, other programs apart."""
        return self.capacity_bytes - self._leases.run_bytes

    def _seen_bytes(self, used_bytes: int) -> int:
        """Weights that are here, and what the device could still give; the whole budget where nobody can say."""
        return self.capacity_bytes if self._free_bytes is None else used_bytes + max(0, self._free_bytes())

    def _now(self) -> Residency:
        """What is on the GPU, and what weights and one more run have room for: less than the budget where other
        programs took some."""
        now = self.residency()
        ours_bytes = self._leases.ours_bytes(self._seen_bytes(now.used_bytes))
        return replace(now, capacity_bytes=max(0, min(self.capacity_bytes, ours_bytes) - self._leases.run_bytes))

    def _specs_with(self, firsts: Sequence[Wanted]) -> dict[ComponentKey, ComponentSpec]:
        """The sizes of all components, with those of `firsts` that are new."""
        for patcher, _ in firsts:
            known = self._patchers.get(patcher.key, patcher)
            assert known.is_clone(patcher), f"two components are called {patcher.key}"
        return {**{p.key: p.spec() for p, _ in firsts if p.key not in self._specs}, **self._specs}

    def _take_charge(self, firsts: Sequence[Wanted]) -> None:
        """Add those of `firsts` that are new."""
        for patcher, _ in firsts:
            if patcher.key not in self._patchers:
                self.add(patcher.clone())

    def _decide(self, ask: Ask) -> ResidencyPlan:
        """The plan. Raises DoesNotFit, and RanOutOfMemory where the budget would do without other programs."""
        now = self._now()
        try:
            return ruled_plan(now, ask, self._rules)
        except DoesNotFit as refused:
            taken_bytes = self._budget_bytes - now.capacity_bytes
            if taken_bytes <= 0:
                raise
            ruled_plan(replace(now, capacity_bytes=self._budget_bytes), ask, self._rules)
            raise taken_by_others(refused, taken_bytes, in_run=bool(self._leases.keys)) from refused

    def _outlook(self, needed_next: Sequence[ComponentKey]) -> Outlook:
        return Outlook(tuple(dict.fromkeys(needed_next)), self._floors(), self.wishes.priorities)

    def _floors(self) -> dict[ComponentKey, int]:
        """What plans are to leave of each held component: whole modules, so up to one more than what is held."""
        return {key: self._floor_of(key, held_bytes) for key, held_bytes in self.wishes.held.items()}

    def _floor_of(self, key: ComponentKey, held_bytes: int) -> int:
        if held_bytes <= 0:
            return 0
        largest_bytes = max((m.resident_bytes for m in self._patchers[key].modules()), default=0)
        return min(held_bytes + largest_bytes, self._specs[key].weight_bytes)

    def _bring_about(self, decided: ResidencyPlan, firsts: Sequence[Wanted]) -> Moved:
        """Do what was decided: all that leaves, before anything arrives. Whole, or rolled back."""
        self._take_charge(firsts)
        before = {patcher.key: patcher.resident_modules() for patcher, _ in firsts}
        uploaded_bytes, switches, freed_bytes = 0, 0, 0
        try:
            for move in decided.evict:
                freed_bytes += self._shrink_to(move, decided.after)
            for patcher, use in firsts:
                entry = decided.after.of(use.component)
                target_bytes = entry.resident_bytes if entry else 0
                modules = choose_modules(self._modules(patcher, target_bytes), target_bytes, patcher.resident_modules())
                self._holders[use.component] = patcher
                report = patcher.realize(WeightsTarget(modules, patcher.patches))
                uploaded_bytes += report.uploaded_bytes
                switches += report.switched
                self._patchers[use.component] = self._patchers.pop(use.component)  # most recently used
        except BaseException as error:
            with ExitStack() as rolling_back:  # each, whatever the others raise
                for patcher, _ in firsts:
                    rolling_back.callback(patcher.shrink, before[patcher.key])
            if freed_bytes:
                error.add_note(f"the load was rolled back; {format_bytes(freed_bytes)} that left for it stay away")
            raise
        return Moved(uploaded_bytes, switches)

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
                        self._shrink(key, self._floors().get(key, 0))

    def _modules(self, patcher: ModelPatcher, target_bytes: int) -> Sequence[ModuleBytes]:
        """What to choose from; with the work of each module where the choice is not all or nothing."""
        is_partial = 0 < target_bytes < self._specs[patcher.key].weight_bytes
        return patcher.worked_modules if is_partial else patcher.modules()

    def _shrink_to(self, move: Move, after: Residency) -> int:
        entry = after.of(move.component)
        return self._shrink(move.component, entry.resident_bytes if entry else 0)

    def _shrink(self, key: ComponentKey, target_bytes: int) -> int:
        """Let modules leave until at most `target_bytes` are resident. Returns the bytes that left."""
        patcher = self._holders.get(key, self._patchers[key])
        modules = self._modules(patcher, target_bytes)
        kept = choose_modules(modules, target_bytes, patcher.resident_modules(), grow=False)
        report = patcher.shrink(kept)
        if not patcher.resident_modules():
            self._holders.pop(key, None)
        return report.freed_bytes
