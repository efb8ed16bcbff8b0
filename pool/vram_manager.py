"""`VramManager`: the one owner of weights on a GPU. Leases over `pool.residency.plan`.

Knows the components of one GPU, in which order they were last used, and what somebody wants kept. What should move is
`plan`'s decision; how a component moves is its patcher's. Not thread safe: one process per GPU, one run at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from pool.devices.vram_policy import ResidencyRules
from pool.errors import DoesNotFit, UserError, does_not_fit, format_bytes, unknown_name
from pool.out_of_memory import RanOutOfMemory
from pool.outlook import Outlook
from pool.patcher import ModelPatcher, WeightsTarget
from pool.patcher_extras import models_to_load
from pool.residency import ModuleBytes, Move, Residency, ResidencyPlan, choose_modules, needed_bytes, plan
from pool.spec import ComponentKey, ComponentSpec, ComponentUse
from pool.weight_hooks.hooks import HookGroup


@dataclass(frozen=True, slots=True)
class Lease:
    """A hold on components for the length of a run.

    plan             what was decided
    uploaded_bytes   what crossed the bus to bring it about
    patch_switches   components that were there with another patch set
    all_resident     every component was there already, whole and with the right patches
    planned_bytes    the most device memory that the plan allows for: weights, activations and scratch
    """

    plan: ResidencyPlan
    uploaded_bytes: int
    patch_switches: int
    all_resident: bool
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What bringing components to a plan took."""

    uploaded_bytes: int = 0
    switches: int = 0


#: a component with what one run needs of it
Wanted = tuple[ModelPatcher, ComponentUse]


class VramManager:
    """Which components are on this GPU, and making room for the next run.

    Invariants: the resident bytes of all patchers stay within `capacity_bytes`, and while a lease is held they leave
    room for its activations and scratch. Leased bytes do not move. What is held (`hold`) leaves only on demand of a
    person (`unload`, `unload_all`, `remove`, `close`).
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
        self._leased: Counter[ComponentKey] = Counter()
        self._held: dict[ComponentKey, int] = {}
        self._priorities: dict[ComponentKey, int] = {}

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
        for known in (self._patchers, self._specs, self._held, self._priorities):
            known.pop(key, None)

    def __contains__(self, key: ComponentKey) -> bool:
        return key in self._patchers

    def residency(self) -> Residency:
        """What is on the GPU now: the truth, read off the patchers."""
        entries = (p.resident() for p in self._patchers.values())
        return Residency(self.capacity_bytes, tuple(e for e in entries if e.resident_bytes))

    def hold(self, key: ComponentKey, size_bytes: int | None = None) -> None:
        """From now on plans leave at least `size_bytes` (None: all) of what is resident of a component where it is.

        Nothing is brought in by it. Runs for which too little is left do not fit. Raises UnknownName.
        """
        spec = self._specs[self._known(key)]
        self._held[key] = spec.weight_bytes if size_bytes is None else min(size_bytes, spec.weight_bytes)

    def release(self, key: ComponentKey) -> None:
        """End a `hold`. Does nothing where there is none."""
        self._held.pop(key, None)

    def prioritize(self, key: ComponentKey, priority: int) -> None:
        """Let a component leave before others (below 0) or after them (above 0), whatever else is known; 0 is as usual.
        Raises UnknownName."""
        self._priorities[self._known(key)] = priority

    def activation_room(self, uses: Sequence[ComponentUse], staying_bytes: int | None = None) -> int:
        """Bytes that a run with `uses` could have for its activations now, when no more than `staying_bytes` of weights
        stay; None: if everything that may leave does. Below 0 when not even its weights' scratch fits."""
        now = self._now()
        room_bytes = now.capacity_bytes - needed_bytes(uses, 0)
        if staying_bytes is not None:
            return room_bytes - staying_bytes
        keys = set() if self._rules.may_stream else {use.component for use in uses}
        whole_bytes = sum(self._specs[key].weight_bytes for key in keys if key in self._specs)
        return room_bytes - self._fixed_bytes(now, but=keys) - whole_bytes

    @property
    def room_bytes(self) -> int:
        """What could be put on the device now beside the weights that are there."""
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
        Components that nobody added are taken charge of. `needed_next` are those that are expected to be needed here
        afterwards, soonest first; no more than `most_weight_bytes` of weights are resident while the lease is held,
        those that may not leave excepted.
        A load that fails is rolled back: what arrived leaves again, what left for it stays away, nothing is leased, and
        the residency is exact. Raises DoesNotFit when no eviction would be enough, RanOutOfMemory when it would be
        without what other programs have taken, torch.OutOfMemoryError when the device says so all the same.
        """
        firsts = self._firsts(wanted)
        uses = [use for _, use in firsts]
        decided = self._decide(uses, self._specs, activation_bytes, needed_next, most_weight_bytes)
        if decided.streamed_bytes and not self._rules.may_stream:
            whole_bytes = sum(self._specs[u.component].weight_bytes for u in uses)
            raise does_not_fit(
                " with ".join(u.component for u in uses),
                whole_bytes + needed_bytes(uses, activation_bytes),
                decided.after.capacity_bytes,
                "with all weights resident: the policy is not to stream any",
            )
        moved = self._bring_about(decided, firsts)
        keys = [use.component for use in uses]
        planned_bytes = decided.after.used_bytes + needed_bytes(uses, activation_bytes)
        is_there = moved.uploaded_bytes == 0 and decided.streamed_bytes == 0
        with self._leasing(keys):
            yield Lease(decided, moved.uploaded_bytes, moved.switches, is_there, planned_bytes)

    @contextmanager
    def lease_as_is(self, wanted: Sequence[Wanted], activation_bytes: int) -> Iterator[None]:
        """Keep what is resident where it is until the block is left; move nothing. What is not resident streams.

        Raises DoesNotFit when that leaves too little for the run, with what would have to leave.
        """
        uses = [use for _, use in self._firsts(wanted)]
        now = self._now()
        missing_bytes = now.used_bytes + needed_bytes(uses, activation_bytes) - now.capacity_bytes
        if missing_bytes > 0:
            raise does_not_fit(
                " with ".join(u.component for u in uses),
                now.used_bytes + needed_bytes(uses, activation_bytes),
                now.capacity_bytes,
                f"{format_bytes(now.used_bytes)} of weights are resident; unload {format_bytes(missing_bytes)} of them",
            )
        with self._leasing([use.component for use in uses]):
            yield

    def load(self, patcher: ModelPatcher, most_bytes: int | None = None) -> int:
        """Bring weights of a component in until `most_bytes` (None: all) of it are resident, or as many as there is
        room for when all that may leave has left. What is there already stays. Returns the bytes that arrived.

        Fails as `lease` does.
        """
        firsts = self._firsts([(patcher, patcher.use())])
        spec, before_bytes = self._specs[patcher.key], patcher.resident().resident_bytes
        target_bytes = max(
            before_bytes, min(spec.weight_bytes, spec.weight_bytes if most_bytes is None else most_bytes)
        )
        if target_bytes == 0:
            return 0
        part = replace(spec, weight_bytes=target_bytes)  # a plan for the part that is asked for
        uses = [use for _, use in firsts]
        self._bring_about(self._decide(uses, {**self._specs, patcher.key: part}, 0), firsts)
        return patcher.resident().resident_bytes - before_bytes

    def unload(self, key: ComponentKey, least_bytes: int | None = None) -> int:
        """Take at least `least_bytes` (None: all) of a component off the device, or what there is. Returns the bytes
        that left. Raises UserError when a run uses it, UnknownName when it is not managed."""
        if self._leased[self._known(key)]:
            raise UserError(f"{key}: a run is using it; expected to be asked to unload it when the run has ended")
        entry = self._patchers[key].resident()
        left_bytes = 0 if least_bytes is None else max(0, entry.resident_bytes - least_bytes)
        return self._shrink(key, left_bytes)

    def free(self, size_bytes: int) -> int:
        """Let idle components leave, in the order in which plans would let them, until `size_bytes` have left or none
        are left that may. Returns the bytes that left."""
        now = self.residency()
        fixed_bytes = self._fixed_bytes(now)
        kept_bytes = max(now.used_bytes - max(0, size_bytes), fixed_bytes)
        decided = plan(
            replace(now, capacity_bytes=kept_bytes), (), self._specs, 0, frozenset(+self._leased), self._outlook(())
        )
        return sum(self._shrink_to(move, decided.after) for move in decided.evict)

    def free_idle(self, but: Iterable[ComponentKey] = ()) -> int:
        """Let every component leave that is neither leased, held nor in `but`. Returns the bytes that left."""
        kept = {*but, *self._held, *(+self._leased)}
        return sum(self._shrink(key, 0) for key in tuple(self._patchers) if key not in kept)

    def unload_all(self) -> int:
        """Take every byte off the device that is not leased, held or not. Returns the bytes that left."""
        return sum(self._shrink(key, 0) for key in tuple(self._patchers) if not self._leased[key])

    def close(self) -> None:
        """Take every byte off the device and forget all components. No lease may be held. Idempotent."""
        assert not +self._leased, f"closed while {set(+self._leased)} are leased"
        self.unload_all()
        for known in (self._patchers, self._specs, self._held, self._priorities):
            known.clear()

    def _known(self, key: ComponentKey) -> ComponentKey:
        if key not in self._patchers:
            raise unknown_name("component", key, self._patchers)
        return key

    def _now(self) -> Residency:
        """What is on the GPU, and what there is room for: less than the budget where other programs took some."""
        now = self.residency()
        if self._free_bytes is None:
            return now
        return replace(now, capacity_bytes=min(self.capacity_bytes, now.used_bytes + max(0, self._free_bytes())))

    def _firsts(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """One entry a component, with what all its clones need; components that are new are taken charge of."""
        firsts: dict[ComponentKey, Wanted] = {}
        for patcher, use in wanted:
            assert patcher.key == use.component, f"{use.component} is not the use of {patcher.key}"
            if patcher.key not in self._patchers:
                self.add(patcher.clone())
            assert self._patchers[patcher.key].is_clone(patcher), f"two components are called {patcher.key}"
            if patcher.key not in firsts:
                firsts[patcher.key] = (patcher, use)
            else:
                first, known = firsts[patcher.key]
                most_bytes = max(known.scratch_bytes, use.scratch_bytes)
                firsts[patcher.key] = (first, replace(known, scratch_bytes=most_bytes))
        return list(firsts.values())

    def _decide(
        self,
        uses: Sequence[ComponentUse],
        specs: Mapping[ComponentKey, ComponentSpec],
        activation_bytes: int,
        needed_next: Sequence[ComponentKey] = (),
        most_weight_bytes: int | None = None,
    ) -> ResidencyPlan:
        now, leased, outlook = self._now(), frozenset(+self._leased), self._outlook(needed_next)
        capped = self._capped(now, uses, activation_bytes, most_weight_bytes)
        try:
            return plan(capped, uses, specs, activation_bytes, leased, outlook)
        except DoesNotFit as refused:
            taken_bytes = self.capacity_bytes - now.capacity_bytes
            if taken_bytes <= 0:
                raise
            plan(replace(now, capacity_bytes=self.capacity_bytes), uses, specs, activation_bytes, leased, outlook)
            raise RanOutOfMemory(
                f"{refused}; other programs have taken {format_bytes(taken_bytes)} of the device"
            ) from refused

    def _capped(
        self, now: Residency, uses: Sequence[ComponentUse], activation_bytes: int, most_weight_bytes: int | None
    ) -> Residency:
        """`now` with a capacity that leaves weights no more than the policy and `most_weight_bytes` allow."""
        if most_weight_bytes is None and self._rules.weights_share >= 1:
            return now
        run_bytes = needed_bytes(uses, activation_bytes)
        room_bytes = now.capacity_bytes - run_bytes
        allowed_bytes = int(max(0, room_bytes) * self._rules.weights_share)
        if most_weight_bytes is not None:
            allowed_bytes = min(allowed_bytes, most_weight_bytes)
        fixed_bytes = self._fixed_bytes(now)
        return replace(now, capacity_bytes=min(now.capacity_bytes, run_bytes + max(allowed_bytes, fixed_bytes)))

    def _fixed_bytes(self, now: Residency, but: Collection[ComponentKey] = ()) -> int:
        """Resident bytes that may not leave, leased or held, of components that are not in `but`."""
        floors = self._floors()
        return sum(
            entry.resident_bytes
            if self._leased[entry.component]
            else min(entry.resident_bytes, floors.get(entry.component, 0))
            for entry in now.entries
            if entry.component not in but
        )

    def _outlook(self, needed_next: Sequence[ComponentKey]) -> Outlook:
        return Outlook(tuple(dict.fromkeys(needed_next)), self._floors(), dict(self._priorities))

    def _floors(self) -> dict[ComponentKey, int]:
        """What plans are to leave of each held component: whole modules, so up to one more than what is held."""
        return {key: self._floor_of(key, held_bytes) for key, held_bytes in self._held.items()}

    def _floor_of(self, key: ComponentKey, held_bytes: int) -> int:
        if held_bytes <= 0:
            return 0
        largest_bytes = max((m.resident_bytes for m in self._patchers[key].modules()), default=0)
        return min(held_bytes + largest_bytes, self._specs[key].weight_bytes)

    def _bring_about(self, decided: ResidencyPlan, firsts: Sequence[Wanted]) -> Moved:
        """Do what was decided: all that leaves, before anything arrives. Whole, or rolled back."""
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
    def _leasing(self, keys: Sequence[ComponentKey]) -> Iterator[None]:
        self._leased.update(keys)
        try:
            yield
        finally:
            self._leased = +(self._leased - Counter(keys))
            if not self._rules.keeps_idle:
                for key in keys:
                    if not self._leased[key]:
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


def with_extras(patcher: ModelPatcher, passes: int = 1, groups: Iterable[HookGroup | None] = ()) -> tuple[Wanted, ...]:
    """A patcher and those that its runs need beside it, ControlNets and the like, each with what one run of `passes`
    passes needs of it. `groups` are the hooks of its conditions."""
    return tuple((one, one.use(passes)) for one in (patcher, *models_to_load(patcher, groups)))
