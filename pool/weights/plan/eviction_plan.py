"""Plans which bytes of which components are on one GPU, and what a task moves. Pure byte arithmetic.

The worker executes these plans, the scheduler predicts with them, the simulator charges time for them: one source.
Standard library only. Knows sizes, not torch modules. `pool.weights.plan.residency_reasons` explains plans in words.

Rules
1. A task needs its activations and the scratch of its largest component free; weights get the rest.
2. Any component can run with no byte resident (fully streamed), so a task fits exactly if rule 1 leaves nothing
   negative for leased and pinned bytes. These are never evicted.
3. No more bytes are evicted than needed, in this order:
   a. lower priority first: set by the user, who may know more than any rule;
   b. components that no expected task needs, before expected ones: they may not return at all;
   c. of the expected ones, the one needed last (Belady): its room serves all others for longest. If every byte of room
   costs the same to bring back this is the optimum;
   d. of the rest, the lowest value: bytes on the bus per byte of room, divided by the age. This is GreedyDual without
   its memory: age is counted in bytes used since, so it needs no clock, and a component that costs half as much to
   bring back (stored in half the bytes) leaves at half the age. At equal costs this is LRU. Patches do not count: the
   next use may need others, and in simulations of many models no surcharge for patched weights, up or down, moved fewer
   bytes.
4. A component of one pass costs the same on the bus loaded or streamed. The bytes that it would load are eviction
   candidates as in 3: a text encoder that is not needed soon does not evict weights that are. Without hints it is
   loaded: what was just used has the highest value under 3d. (On the sequences of benchmarks/vram.py, always streaming
   it without a hint saved a twentieth of the bytes on independent requests, and cost a quarter more if one model is
   requested several times in a row.)
5. With nothing leased or pinned, the bytes on the bus of a task depend on its own entries and the capacity alone,
   except for rounding by a byte per component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from modelpool.pool.values.core.errors import does_not_fit
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.moves import Move, ResidencyPlan
from modelpool.pool.values.specs.resident import Residency, Resident
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.partial_loads import ModuleBytes, choose_modules

__all__ = [
    "EvictionCandidate",
    "ModuleBytes",
    "Move",
    "Residency",
    "ResidencyPlan",
    "Resident",
    "choose_modules",
    "eviction_candidates",
    "needed_bytes",
    "plan",
    "upload_bytes_of",
]

#: a component that was just used has the age of capacity / YOUTH_PART bytes. From benchmarks/vram.py: 1/64 to 1/16 of
#: the capacity differ by 3% in bytes moved; at 1/4, expensive components are hardly ever evicted, which cost up to a
#: third more
YOUTH_PART = 32


def needed_bytes(uses: Iterable[ComponentUse], activation_bytes: int) -> int:
    """Return the smallest budget in which a task runs: its activations and its largest scratch."""
    most_bytes = 0
    for use in uses:
        if use.scratch_bytes > most_bytes:
            most_bytes = use.scratch_bytes
    return activation_bytes + most_bytes


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Bytes that a task could evict: of another component, or those that it would load for its single pass.

    order  compares candidates: lower is evicted first
    """

    component: ComponentKey
    bytes: int
    order: tuple[int, int, float]


def plan(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey] = frozenset(),
    hints: EvictionHints = NO_HINTS,
) -> ResidencyPlan:
    """Plan the moves so that a task with `uses` and `activation_bytes` can run on `now`.

    Components get bytes in the order of `uses`. A leased component that the task does not use stays unchanged; one that
    it uses may grow but is neither shrunk nor re-patched. Pins apply to resident bytes: a component below its pin is
    not loaded for it. Raises DoesNotFit if activations, scratch, leased and pinned bytes exceed the capacity, or if a
    leased component would have to change its patches.
    """
    others, targets, evicted = make_room(now, uses, specs, activation_bytes, leased, hints)
    evict = [Move(key, evicted_bytes) for key, evicted_bytes in evicted.items()]
    if evicted:
        others = _after(others, evicted)
    upload: list[Move] = []
    switched: list[ComponentKey] = []
    streamed_bytes = 0
    arrived: list[Resident] = []
    for use in uses:
        spec, target_bytes = specs[use.component], targets[use.component]
        before = now.of(use.component)
        if before is not None and before.resident_bytes > target_bytes:
            evict.append(Move(use.component, before.resident_bytes - target_bytes))
        uploaded_bytes = upload_bytes_of(before, use, spec, target_bytes)
        if uploaded_bytes:
            upload.append(Move(use.component, uploaded_bytes))
        if before is not None and before.patch_digest != use.patch_digest:
            switched.append(use.component)
        streamed_bytes += use.passes * _on_the_bus(spec, spec.weight_bytes - target_bytes)
        if target_bytes:
            arrived.append(Resident(use.component, target_bytes, use.patch_digest, use.patched_bytes))
    after = Residency(now.capacity_bytes, (*others, *arrived))
    return ResidencyPlan(tuple(evict), tuple(upload), tuple(switched), after, streamed_bytes)


def make_room(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey] = frozenset(),
    hints: EvictionHints = NO_HINTS,
) -> tuple[list[Resident], dict[ComponentKey, int], dict[ComponentKey, int]]:
    """The allocation part of `plan`: the entries of components that the task does not use, as they are now; the bytes
    of each component that it uses; and the bytes evicted of the others, in order.

    Raises DoesNotFit as `plan` does.
    """
    others, held, targets, room_bytes = _allot(now, uses, specs, activation_bytes, leased, hints)
    missing_bytes = -room_bytes
    for entry in others:
        missing_bytes += entry.resident_bytes
    if missing_bytes <= 0:
        return others, targets, {}
    evicted = _evict(_eviction_candidates(now, others, held, uses, specs, targets, hints), missing_bytes)
    for key in targets:
        targets[key] -= evicted.pop(key, 0)
    return others, targets, evicted


def eviction_candidates(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey] = frozenset(),
    hints: EvictionHints = NO_HINTS,
) -> tuple[EvictionCandidate, ...]:
    """Return the eviction candidates of the task, the first to be evicted first: `plan` evicts from them until there is
    room.

    Raises DoesNotFit as `plan` does.
    """
    others, held, targets, _ = _allot(now, uses, specs, activation_bytes, leased, hints)
    found = _eviction_candidates(now, others, held, uses, specs, targets, hints)
    return tuple(
        [
            EvictionCandidate(key, free_bytes, (priority, named, worth))
            for priority, named, worth, _, key, free_bytes in found
        ]
    )


def _allot(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey],
    hints: EvictionHints,
) -> tuple[list[Resident], dict[ComponentKey, int], dict[ComponentKey, int], int]:
    """Entries of components that the task does not use and the bytes of them that must stay; bytes of each component
    that it uses if all others are evicted; and the room that this leaves to the others, including bytes that must stay.

    Raises DoesNotFit.
    """
    wanted = [u.component for u in uses]
    others = [e for e in now.entries if e.component not in wanted]
    room_bytes = now.capacity_bytes - needed_bytes(uses, activation_bytes)
    held: dict[ComponentKey, int] = {}
    pinned_bytes: dict[ComponentKey, int] = {}
    held_bytes = floor_bytes = 0
    if leased or hints.pinned_bytes:
        held = _held(others, leased, hints)
        pinned_bytes = {u.component: _own_floor(now, u, leased, hints) for u in uses}
        held_bytes, floor_bytes = sum(held.values()), sum(pinned_bytes.values())
    if room_bytes < held_bytes + floor_bytes:
        raise _too_small(now, uses, activation_bytes, leased, {**held, **pinned_bytes})
    targets = _share(room_bytes - held_bytes, uses, specs, pinned_bytes)
    return others, held, targets, room_bytes - sum(targets.values())


def _held(others: Iterable[Resident], leased: frozenset[ComponentKey], hints: EvictionHints) -> dict[ComponentKey, int]:
    """Bytes of components that the task does not use and that must stay."""
    pinned_bytes = hints.pinned_bytes
    return {
        e.component: e.resident_bytes
        if e.component in leased
        else max(0, min(e.resident_bytes, pinned_bytes.get(e.component, 0)))
        for e in others
    }


def _own_floor(now: Residency, use: ComponentUse, leased: frozenset[ComponentKey], hints: EvictionHints) -> int:
    """Bytes of a component that the task uses and that must stay."""
    before = now.of(use.component)
    if before is None:
        return 0
    if use.component not in leased:
        return max(0, min(before.resident_bytes, hints.pinned_bytes.get(use.component, 0)))
    if before.patch_digest != use.patch_digest:
        raise does_not_fit(
            f"{use.component} with other patches", before.resident_bytes, 0, "it is leased with the patches it has"
        )
    return before.resident_bytes


def _too_small(
    now: Residency,
    uses: Sequence[ComponentUse],
    activation_bytes: int,
    leased: frozenset[ComponentKey],
    held: Mapping[ComponentKey, int],
) -> ValueError:
    scratch_bytes = max((u.scratch_bytes for u in uses), default=0)
    leased_bytes = sum(held_bytes for key, held_bytes in held.items() if key in leased)
    floor_bytes = sum(held.values()) - leased_bytes
    return does_not_fit(
        " with ".join(u.component for u in uses),
        activation_bytes + scratch_bytes + leased_bytes + floor_bytes,
        now.capacity_bytes,
        f"activations {activation_bytes} B, working set of the largest layer {scratch_bytes} B, "
        f"leased {leased_bytes} B, pinned {floor_bytes} B",
    )


def _share(
    weights_bytes: int,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    pinned_bytes: Mapping[ComponentKey, int],
) -> dict[ComponentKey, int]:
    """Leased and pinned bytes first, then fill up in the order of `uses`."""
    targets: dict[ComponentKey, int] = {}
    left_bytes = weights_bytes - sum(pinned_bytes.values()) if pinned_bytes else weights_bytes
    for use in uses:
        floor_bytes = pinned_bytes[use.component] if pinned_bytes else 0
        extra_bytes = specs[use.component].weight_bytes - floor_bytes
        if extra_bytes > left_bytes:
            extra_bytes = left_bytes
        if extra_bytes < 0:
            extra_bytes = 0
        targets[use.component] = floor_bytes + extra_bytes
        left_bytes -= extra_bytes
    return targets


#: priority, whether it is expected, value, index, component, bytes
_Candidate: TypeAlias = tuple[int, bool, float, int, ComponentKey, int]


def _eviction_candidates(
    now: Residency,
    others: Sequence[Resident],
    held: Mapping[ComponentKey, int],
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    targets: Mapping[ComponentKey, int],
    hints: EvictionHints,
) -> list[_Candidate]:
    """Candidates for eviction, including bytes of `targets`, the first to be evicted first.

    A second plan on the result of the first evicts the same arrivals at the same position: evictions make the remaining
    components younger, never older, and never move an arrival behind one of them.
    """
    places = {key: place for place, key in enumerate(hints.needed_next)}
    priorities = hints.priorities
    found: list[_Candidate] = []
    age_bytes = now.capacity_bytes // YOUTH_PART + 1
    for index in range(len(others) - 1, -1, -1):
        entry = others[index]
        key, free_bytes = entry.component, entry.resident_bytes
        age_bytes += free_bytes
        if held:
            free_bytes -= held[key]
        if free_bytes:
            place = places.get(key)
            worth = _price(specs.get(key)) / age_bytes if place is None else float(-place)
            priority = priorities.get(key, 0) if priorities else 0
            found.append((priority, place is not None, worth, index, key, free_bytes))
    for index, use in enumerate(uses, len(others)):
        if use.passes != 1:
            continue
        key, before = use.component, now.of(use.component)
        arriving_bytes = targets[key] - (0 if before is None else before.resident_bytes)
        if arriving_bytes > 0:
            place = places.get(key)
            worth = inf if place is None else float(-place)
            found.append((priorities.get(key, 0), place is not None, worth, index, key, arriving_bytes))
    found.sort()
    return found


def _price(spec: ComponentSpec | None) -> float:
    """Bytes on the bus to bring back one byte of room; 1 if the sizes are unknown."""
    return 1.0 if spec is None else spec.upload_bytes / spec.weight_bytes


def _evict(ordered: Iterable[_Candidate], missing_bytes: int) -> dict[ComponentKey, int]:
    """Bytes evicted of each candidate, in order; together `missing_bytes`."""
    evicted: dict[ComponentKey, int] = {}
    for _, _, _, _, key, free_bytes in ordered:
        if free_bytes >= missing_bytes:
            evicted[key] = missing_bytes
            return evicted
        evicted[key] = free_bytes
        missing_bytes -= free_bytes
    raise AssertionError(f"{missing_bytes} bytes are missing after evicting all candidates")


def _after(others: Iterable[Resident], evicted: Mapping[ComponentKey, int]) -> list[Resident]:
    """`others` without the evicted bytes."""
    kept: list[Resident] = []
    for e in others:
        left_bytes = e.resident_bytes - evicted.get(e.component, 0)
        if left_bytes == e.resident_bytes:
            kept.append(e)
        elif left_bytes:
            kept.append(Resident(e.component, left_bytes, e.patch_digest, e.patched_bytes))
    return kept


def upload_bytes_of(before: Resident | None, use: ComponentUse, spec: ComponentSpec, target_bytes: int) -> int:
    """Return the bytes on the bus to bring `before` to `target_bytes` with the patches of `use`."""
    if before is None:
        return _on_the_bus(spec, target_bytes)
    arriving_bytes = max(0, target_bytes - before.resident_bytes)
    if before.patch_digest != use.patch_digest:
        touched_bytes = before.patched_bytes + use.patched_bytes
        arriving_bytes += min(before.resident_bytes, target_bytes, touched_bytes)
    return _on_the_bus(spec, min(arriving_bytes, spec.weight_bytes))


def _on_the_bus(spec: ComponentSpec, resident_bytes: int) -> int:
    """Convert `resident_bytes` in compute dtype to bytes on the bus in storage dtype, rounded up."""
    return -(-resident_bytes * spec.upload_bytes // spec.weight_bytes)
