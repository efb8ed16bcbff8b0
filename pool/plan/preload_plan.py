"""What of a coming task's weights goes to a GPU while another task runs there. Pure byte arithmetic.

The worker moves what is decided here, the scheduler assumes it, the simulator charges time for it: one truth, as
`pool.plan.residency` is for what moves before a run. Standard library only.

Rules
1. Nothing that the run holds moves: what is leased is neither shrunk nor patched anew. Its activations and scratch stay
   free, with a margin beside them, since they are estimates; so does the scratch that the arriving weights need.
2. What leaves is what the coming task's own plan would let leave when the run is over, in that order and no more of it
   than is needed; of what the run holds nothing.
3. What saves most seconds arrives first: the component with the most bytes on the bus.
4. Only components that the coming task will have whole: of one that streams in part, its own turn says which part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from modelpool.pool.core.errors import DoesNotFit
from modelpool.pool.plan.residency import Move, Residency, Resident, make_room, needed_bytes, upload_bytes_of
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse

#: of what a run holds beside weights, so much again is left free: a run that runs out of memory is made anew. An
#: assumption: estimates of activations that runs corrected are closer than that
MARGIN_PART = 8


@dataclass(slots=True, init=False, unsafe_hash=True)
class Held:
    """What a run that is under way holds.

    components  those that may not move
    run_bytes   what it may have beside weights: activations and scratch
    """

    components: Final[frozenset[ComponentKey]]
    run_bytes: Final[int]

    def __init__(self, components: frozenset[ComponentKey], run_bytes: int) -> None:
        self.components = components
        self.run_bytes = run_bytes


@dataclass(slots=True, init=False, unsafe_hash=True)
class Arrival:
    """Weights of one component that arrive beside a run.

    from_bytes    what is resident of it when the first of them arrives, in the patches of `use`
    to_bytes      what is when all have
    upload_bytes  as they cross the bus
    is_switch     some of it is there with other patches
    """

    use: Final[ComponentUse]
    from_bytes: Final[int]
    to_bytes: Final[int]
    upload_bytes: Final[int]
    is_switch: Final[bool]

    def __init__(
        self, use: ComponentUse, from_bytes: int, to_bytes: int, upload_bytes: int, is_switch: bool = False
    ) -> None:
        self.use = use
        self.from_bytes = from_bytes
        self.to_bytes = to_bytes
        self.upload_bytes = upload_bytes
        self.is_switch = is_switch

    def entry(self, uploaded_bytes: int) -> Resident:
        """What is resident of it when so much of it has crossed the bus."""
        grown_bytes = (self.to_bytes - self.from_bytes) * min(uploaded_bytes, self.upload_bytes) // self.upload_bytes
        use = self.use
        return Resident(use.component, self.from_bytes + grown_bytes, use.patch_digest, use.patched_bytes)


@dataclass(slots=True, init=False, unsafe_hash=True)
class AheadPlan:
    """What leaves, then what arrives, in order, beside a run."""

    evict: Final[tuple[Move, ...]]
    arrive: Final[tuple[Arrival, ...]]

    def __init__(self, evict: tuple[Move, ...] = (), arrive: tuple[Arrival, ...] = ()) -> None:
        self.evict = evict
        self.arrive = arrive

    @property
    def upload_bytes(self) -> int:
        """Bytes that cross the bus."""
        return sum([arrival.upload_bytes for arrival in self.arrive])

    @property
    def switches(self) -> int:
        """Components that get other patches."""
        return sum([arrival.is_switch for arrival in self.arrive])

    def after(self, now: Residency, uploaded_bytes: int | None = None) -> Residency:
        """What is on the GPU when so many bytes have crossed the bus (None: all). Nothing has left before the first."""
        left_bytes = self.upload_bytes if uploaded_bytes is None else uploaded_bytes
        if left_bytes <= 0:
            return now
        arrived: dict[ComponentKey, Resident] = {}
        for arrival in self.arrive:
            if left_bytes <= 0:
                break
            arrived[arrival.use.component] = arrival.entry(left_bytes)
            left_bytes -= arrival.upload_bytes
        lost = {move.component: move.bytes for move in self.evict}
        entries: list[Resident] = []
        for entry in now.entries:
            key = entry.component
            if key in arrived:
                continue
            lost_bytes = lost.get(key, 0)
            if not lost_bytes:
                entries.append(entry)
            elif entry.resident_bytes > lost_bytes:
                stays_bytes = entry.resident_bytes - lost_bytes
                entries.append(Resident(key, stays_bytes, entry.patch_digest, entry.patched_bytes))
        entries += [entry for entry in arrived.values() if entry.resident_bytes > 0]
        return Residency(now.capacity_bytes, tuple(entries))


#: nothing moves beside the run
NOTHING_AHEAD = AheadPlan()


def plan_ahead(
    now: Residency,
    held: Held,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    outlook: Outlook = NO_OUTLOOK,
) -> AheadPlan:
    """What to move beside a run for a task with `uses` and `activation_bytes` that is to come after it.

    `now` is what is there while the run goes on, with the whole capacity. Nothing when the task does not fit the GPU.
    """
    coming = _coming(now, uses, specs, activation_bytes, outlook)
    if coming is None:
        return NOTHING_AHEAD
    targets, lost = coming
    working_bytes = held.run_bytes + held.run_bytes // MARGIN_PART + needed_bytes(uses, 0)
    free_bytes = now.capacity_bytes - working_bytes
    for entry in now.entries:
        free_bytes -= entry.resident_bytes
    room_bytes = free_bytes
    leaving: list[Move] = []
    if lost:
        components = held.components
        leaving = [Move(key, lost_bytes) for key, lost_bytes in lost.items() if key not in components]
        for move in leaving:
            room_bytes += move.bytes
    before = {entry.component: entry for entry in now.entries}
    if len(uses) > 1:
        uses = sorted(uses, key=lambda use: -_missing_bytes(before.get(use.component), use, specs, targets))
    found: list[Arrival] = []
    for use in uses:
        there = before.get(use.component)
        arrival = None if use.component in held.components else _arrival(there, use, specs, targets, room_bytes)
        if arrival is not None:
            grown_bytes = arrival.to_bytes - (0 if there is None else there.resident_bytes)
            room_bytes -= grown_bytes
            free_bytes -= grown_bytes
            found.append(arrival)
    if not found:
        return NOTHING_AHEAD
    return AheadPlan(_as_needed(leaving, -free_bytes), tuple(found))


def _coming(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    outlook: Outlook,
) -> tuple[Mapping[ComponentKey, int], Mapping[ComponentKey, int]] | None:
    """What the task will have of each component when it runs, and what its plan lets leave of others, in order; None
    when it does not fit. Where there is room for all of it beside what is there the plan is known without making it."""
    whole = {use.component: specs[use.component].weight_bytes for use in uses}
    all_bytes = needed_bytes(uses, activation_bytes)
    for entry in now.entries:
        if entry.component not in whole:
            all_bytes += entry.resident_bytes
    for weight_bytes in whole.values():
        all_bytes += weight_bytes
    if all_bytes <= now.capacity_bytes:
        return whole, {}
    try:
        _, targets, lost = make_room(now, uses, specs, activation_bytes, outlook=outlook)
    except DoesNotFit:
        return None
    return targets, lost


def _arrival(
    before: Resident | None,
    use: ComponentUse,
    specs: Mapping[ComponentKey, ComponentSpec],
    targets: Mapping[ComponentKey, int],
    room_bytes: int,
) -> Arrival | None:
    """What arrives of one component where there is so much room; None where nothing does."""
    spec, target_bytes = specs[use.component], targets[use.component]
    there_bytes = from_bytes = 0 if before is None else before.resident_bytes
    is_switch = before is not None and before.patch_digest != use.patch_digest
    if before is not None and is_switch:
        from_bytes -= min(there_bytes, before.patched_bytes + use.patched_bytes)
    if target_bytes < spec.weight_bytes:
        return None
    to_bytes = min(target_bytes, there_bytes + room_bytes)
    if to_bytes <= from_bytes:
        return None
    upload_bytes = upload_bytes_of(None, use, spec, to_bytes - from_bytes)
    return Arrival(use, from_bytes, to_bytes, upload_bytes, is_switch) if upload_bytes else None


def _missing_bytes(
    before: Resident | None,
    use: ComponentUse,
    specs: Mapping[ComponentKey, ComponentSpec],
    targets: Mapping[ComponentKey, int],
) -> int:
    """Bytes on the bus that the coming task's plan has for a component."""
    return upload_bytes_of(before, use, specs[use.component], targets[use.component])


def _as_needed(leaving: Sequence[Move], missing_bytes: int) -> tuple[Move, ...]:
    """As much of `leaving`, in order, as makes up for what is missing."""
    moves = []
    for move in leaving:
        if missing_bytes <= 0:
            break
        moves.append(Move(move.component, min(move.bytes, missing_bytes)))
        missing_bytes -= move.bytes
    return tuple(moves)
