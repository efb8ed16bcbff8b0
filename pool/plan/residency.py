"""Which bytes of which components are on one GPU, and what a task would move. Pure byte arithmetic.

The worker executes these plans, the scheduler predicts with them, the simulator charges time for them: one truth.
Standard library only. Knows sizes, not modules of torch. `pool.plan.residency_reasons` says in words why a plan is as
it is.

Rules
1. A task needs its activations and the scratch of its hungriest component free; weights get what is left.
2. Any component can run with no byte resident (all streamed), so a task fits exactly when rule 1 leaves nothing
   negative for what is leased and for floors. These are never touched.
3. No more bytes leave than are needed. Who gives way, in this order:
   a. lower priority first: somebody said so, and may know more than any rule;
   b. what no expected task needs, before what one does: it is not known to come back at all;
   c. of what is expected, the one needed last (Belady): its room serves all others for longest. Where every byte of
      room costs the same to bring back this is the optimum;
   d. of the rest, the least worth: bytes on the bus that bring a byte of room back, over how long ago it was used. This
      is GreedyDual without its memory: age is counted in bytes used since, so it needs no clock, and what costs half as
      much to bring back (stored in half the bytes) leaves at half the age. At equal prices it is least recently used
      first. Patches do not count: the next use may want others, and in simulations of many models no surcharge for what
      is patched, up or down, moved fewer bytes.
4. A component of one pass costs the bus the same loaded or streamed. What it would bring to the GPU gives way as in 3,
   beside what is there: a text encoder that nobody needs soon does not push out weights that somebody does. That
   nothing is known is no reason to stream it: what is just used is worth the most under 3d. (On the sequences of
   benchmarks/vram.py, always streaming it without a hint saved a twentieth of the bytes on independent requests, and
   cost a quarter more where one model is asked for several times in a row.)
5. With nothing leased and no floors, the bytes on the bus of a task depend on its own entries and the capacity alone,
   rounding by a byte a component apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from modelpool.pool.core.errors import does_not_fit
from modelpool.pool.plan.streaming_order import ModuleBytes, choose_modules
from modelpool.pool.specs.moves import Move, ResidencyPlan
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.resident import Residency, Resident
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse

__all__ = [
    "Claim",
    "ModuleBytes",
    "Move",
    "Residency",
    "ResidencyPlan",
    "Resident",
    "choose_modules",
    "claims",
    "needed_bytes",
    "plan",
    "upload_bytes_of",
]

#: what was just used has the age of capacity / YOUTH_PART bytes. From benchmarks/vram.py: 1/64 to 1/16 of the capacity
#: differ by 3% in bytes moved; at 1/4, what is dear to bring back hardly ever leaves, which cost up to a third more
YOUTH_PART = 32


def needed_bytes(uses: Iterable[ComponentUse], activation_bytes: int) -> int:
    """The smallest budget that a task runs in: its activations and its largest scratch."""
    most_bytes = 0
    for use in uses:
        if use.scratch_bytes > most_bytes:
            most_bytes = use.scratch_bytes
    return activation_bytes + most_bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes that could give way to a task: of another component, or what the task would bring for its one pass.

    order  compares with that of other claims: lower gives way first
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
    outlook: Outlook = NO_OUTLOOK,
) -> ResidencyPlan:
    """What to move so that a task with `uses` and `activation_bytes` can run on `now`.

    Components get bytes in the order of `uses`. A leased component that the task does not use stays as it is; one that
    it does use may grow but is neither shrunk nor patched anew. Floors hold for the bytes that are there: a component
    below its floor is not loaded for it.
    Raises DoesNotFit when activations, scratch, leased bytes and floors exceed the capacity, or when a leased component
    would have to change its patches.
    """
    others, targets, lost = make_room(now, uses, specs, activation_bytes, leased, outlook)
    evict = [Move(key, lost_bytes) for key, lost_bytes in lost.items()]
    if lost:
        others = _after(others, lost)
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
    outlook: Outlook = NO_OUTLOOK,
) -> tuple[list[Resident], dict[ComponentKey, int], dict[ComponentKey, int]]:
    """The part of `plan` that says who gets room: entries of components that the task does not use, as they are now;
    bytes that each component has that it uses; and bytes that leave of the others, in order.

    Raises DoesNotFit as `plan` does.
    """
    others, held, targets, room_bytes = _shared_out(now, uses, specs, activation_bytes, leased, outlook)
    missing_bytes = -room_bytes
    for entry in others:
        missing_bytes += entry.resident_bytes
    if missing_bytes <= 0:
        return others, targets, {}
    lost = _give_way(_claims(now, others, held, uses, specs, targets, outlook), missing_bytes)
    for key in targets:
        targets[key] -= lost.pop(key, 0)
    return others, targets, lost


def claims(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey] = frozenset(),
    outlook: Outlook = NO_OUTLOOK,
) -> tuple[Claim, ...]:
    """What could give way to the task, first the first to go: what `plan` takes from until there is room enough.

    Raises DoesNotFit as `plan` does.
    """
    others, held, targets, _ = _shared_out(now, uses, specs, activation_bytes, leased, outlook)
    found = _claims(now, others, held, uses, specs, targets, outlook)
    return tuple(
        [Claim(key, free_bytes, (priority, named, worth)) for priority, named, worth, _, key, free_bytes in found]
    )


def _shared_out(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    leased: frozenset[ComponentKey],
    outlook: Outlook,
) -> tuple[list[Resident], dict[ComponentKey, int], dict[ComponentKey, int], int]:
    """Entries of components that the task does not use and what of them must stay; bytes for each that it uses if all
    others make way; and the room that this leaves to the others, with what must stay.

    Raises DoesNotFit.
    """
    wanted = [u.component for u in uses]
    others = [e for e in now.entries if e.component not in wanted]
    room_bytes = now.capacity_bytes - needed_bytes(uses, activation_bytes)
    held: dict[ComponentKey, int] = {}
    floors: dict[ComponentKey, int] = {}
    held_bytes = floor_bytes = 0
    if leased or outlook.floors:
        held = _held(others, leased, outlook)
        floors = {u.component: _own_floor(now, u, leased, outlook) for u in uses}
        held_bytes, floor_bytes = sum(held.values()), sum(floors.values())
    if room_bytes < held_bytes + floor_bytes:
        raise _too_small(now, uses, activation_bytes, leased, {**held, **floors})
    targets = _share(room_bytes - held_bytes, uses, specs, floors)
    return others, held, targets, room_bytes - sum(targets.values())


def _held(others: Iterable[Resident], leased: frozenset[ComponentKey], outlook: Outlook) -> dict[ComponentKey, int]:
    """Bytes of components that the task does not use and that must stay."""
    floors = outlook.floors
    return {
        e.component: e.resident_bytes
        if e.component in leased
        else max(0, min(e.resident_bytes, floors.get(e.component, 0)))
        for e in others
    }


def _own_floor(now: Residency, use: ComponentUse, leased: frozenset[ComponentKey], outlook: Outlook) -> int:
    """Bytes of a component that the task uses and that must stay."""
    before = now.of(use.component)
    if before is None:
        return 0
    if use.component not in leased:
        return max(0, min(before.resident_bytes, outlook.floors.get(use.component, 0)))
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
        f"leased {leased_bytes} B, floors of what is to stay {floor_bytes} B",
    )


def _share(
    weights_bytes: int,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    floors: Mapping[ComponentKey, int],
) -> dict[ComponentKey, int]:
    """Leased floors first, then top up in the order given."""
    targets: dict[ComponentKey, int] = {}
    left_bytes = weights_bytes - sum(floors.values()) if floors else weights_bytes
    for use in uses:
        floor_bytes = floors[use.component] if floors else 0
        extra_bytes = specs[use.component].weight_bytes - floor_bytes
        if extra_bytes > left_bytes:
            extra_bytes = left_bytes
        if extra_bytes < 0:
            extra_bytes = 0
        targets[use.component] = floor_bytes + extra_bytes
        left_bytes -= extra_bytes
    return targets


#: priority, whether it is expected, worth, place in the order given, component, bytes
_Claim: TypeAlias = tuple[int, bool, float, int, ComponentKey, int]


def _claims(
    now: Residency,
    others: Sequence[Resident],
    held: Mapping[ComponentKey, int],
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    targets: Mapping[ComponentKey, int],
    outlook: Outlook,
) -> list[_Claim]:
    """What `targets` could make give way, first the first to go.

    A second plan on what the first one leaves takes the same arrivals from the same place: evictions make the others
    that stay younger, never older, and put no arrival behind one of them.
    """
    places = {key: place for place, key in enumerate(outlook.needed_next)}
    priorities = outlook.priorities
    found: list[_Claim] = []
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
    """Bytes on the bus that bring one byte of room back; 1 where the sizes are not known."""
    return 1.0 if spec is None else spec.upload_bytes / spec.weight_bytes


def _give_way(ordered: Iterable[_Claim], missing_bytes: int) -> dict[ComponentKey, int]:
    """What each gives up, in order; together `missing_bytes`."""
    lost: dict[ComponentKey, int] = {}
    for _, _, _, _, key, free_bytes in ordered:
        if free_bytes >= missing_bytes:
            lost[key] = missing_bytes
            return lost
        lost[key] = free_bytes
        missing_bytes -= free_bytes
    raise AssertionError(f"{missing_bytes} bytes are missing beside all that could give way")


def _after(others: Iterable[Resident], lost: Mapping[ComponentKey, int]) -> list[Resident]:
    """`others` with what each has left."""
    kept: list[Resident] = []
    for e in others:
        left_bytes = e.resident_bytes - lost.get(e.component, 0)
        if left_bytes == e.resident_bytes:
            kept.append(e)
        elif left_bytes:
            kept.append(Resident(e.component, left_bytes, e.patch_digest, e.patched_bytes))
    return kept


def upload_bytes_of(before: Resident | None, use: ComponentUse, spec: ComponentSpec, target_bytes: int) -> int:
    """Bytes on the bus to bring `before` to `target_bytes` with the patches of `use`."""
    if before is None:
        return _on_the_bus(spec, target_bytes)
    arriving_bytes = max(0, target_bytes - before.resident_bytes)
    if before.patch_digest != use.patch_digest:
        touched_bytes = before.patched_bytes + use.patched_bytes
        arriving_bytes += min(before.resident_bytes, target_bytes, touched_bytes)
    return _on_the_bus(spec, min(arriving_bytes, spec.weight_bytes))


def _on_the_bus(spec: ComponentSpec, resident_bytes: int) -> int:
    """`resident_bytes` of compute dtype as they cross the bus in storage dtype, rounded up."""
    return -(-resident_bytes * spec.upload_bytes // spec.weight_bytes)
