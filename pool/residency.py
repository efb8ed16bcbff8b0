"""Which bytes of which components are on one GPU, and what a task would move. Pure byte arithmetic.

The worker executes these plans, the scheduler predicts with them, the simulator charges time for them: one truth.
Standard library only. Knows sizes, not modules of torch. `pool.residency_reasons` says in words why a plan is as it is.

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
from typing import NamedTuple, TypeAlias

from pool.errors import does_not_fit
from pool.outlook import NO_OUTLOOK, Outlook
from pool.resident import Residency, Resident
from pool.spec import ComponentKey, ComponentSpec, ComponentUse
from pool.streaming_order import ModuleBytes, choose_modules

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


class Move(NamedTuple):
    """`bytes` of weights of one component that leave the GPU or arrive on it."""

    component: ComponentKey
    bytes: int


class ResidencyPlan(NamedTuple):
    """A move from one residency to the next: evict first, then upload.

    evict            weights that leave, in order
    upload           weights that arrive or arrive again with other patches; bytes as they cross the bus
    switched         components that were resident with another patch set
    after            residency while the task runs and when it has run
    streamed_bytes   bytes that cross the bus during the run, over all its passes
    """

    evict: tuple[Move, ...]
    upload: tuple[Move, ...]
    switched: tuple[ComponentKey, ...]
    after: Residency
    streamed_bytes: int

    @property
    def upload_bytes(self) -> int:
        """Bytes that cross the bus before the run."""
        return sum(m.bytes for m in self.upload)

    @property
    def evicted_bytes(self) -> int:
        """Bytes of weights that leave."""
        return sum(m.bytes for m in self.evict)

    @property
    def all_resident(self) -> bool:
        """Nothing to upload and nothing to stream."""
        return not self.upload and self.streamed_bytes == 0


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
    others, held, targets, room_bytes = _shared_out(now, uses, specs, activation_bytes, leased, outlook)
    evict: list[Move] = []
    missing_bytes = sum([e.resident_bytes for e in others]) - room_bytes
    if missing_bytes > 0:
        lost = _give_way(_claims(now, others, held, uses, specs, targets, outlook), missing_bytes)
        targets = {key: target_bytes - lost.pop(key, 0) for key, target_bytes in targets.items()}
        evict += [Move(key, lost_bytes) for key, lost_bytes in lost.items()]
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
    return tuple(
        Claim(key, free_bytes, order)
        for order, _, key, free_bytes in _claims(now, others, held, uses, specs, targets, outlook)
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
    floors = dict.fromkeys(wanted, 0)
    held_bytes = 0
    if leased or outlook.floors:
        held = _held(others, leased, outlook)
        floors = {u.component: _own_floor(now, u, leased, outlook) for u in uses}
        held_bytes = sum(held.values())
    if room_bytes < held_bytes + sum(floors.values()):
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
    targets = dict(floors)
    left_bytes = weights_bytes - sum(targets.values())
    for use in uses:
        extra_bytes = min(left_bytes, specs[use.component].weight_bytes - targets[use.component])
        targets[use.component] += max(0, extra_bytes)
        left_bytes -= max(0, extra_bytes)
    return targets


#: (priority, whether it is expected, worth), place in the order given, component, bytes
_Claim: TypeAlias = tuple[tuple[int, bool, float], int, ComponentKey, int]


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
            named = key in places
            worth = -places[key] if named else _price(specs.get(key)) / age_bytes
            found.append(((priorities.get(key, 0), named, worth), index, key, free_bytes))
    for index, use in enumerate(uses, len(others)):
        key, before = use.component, now.of(use.component) if use.passes == 1 else None
        arriving_bytes = targets[key] - (0 if before is None else before.resident_bytes)
        if use.passes == 1 and arriving_bytes > 0:
            named = key in places
            found.append(((priorities.get(key, 0), named, -places[key] if named else inf), index, key, arriving_bytes))
    found.sort()
    return found


def _price(spec: ComponentSpec | None) -> float:
    """Bytes on the bus that bring one byte of room back; 1 where the sizes are not known."""
    return 1.0 if spec is None else spec.upload_bytes / spec.weight_bytes


def _give_way(ordered: Iterable[_Claim], missing_bytes: int) -> dict[ComponentKey, int]:
    """What each gives up, in order; together `missing_bytes`."""
    lost: dict[ComponentKey, int] = {}
    for _, _, key, free_bytes in ordered:
        lost[key] = min(free_bytes, missing_bytes)
        missing_bytes -= lost[key]
        if missing_bytes == 0:
            return lost
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
