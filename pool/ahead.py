"""What of a coming task's weights goes to a GPU while another task runs there. Pure byte arithmetic.

The worker moves what is decided here, the scheduler assumes it, the simulator charges time for it: one truth, as
`pool.residency` is for what moves before a run. Standard library only.

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
from dataclasses import replace
from typing import NamedTuple

from pool.errors import DoesNotFit
from pool.outlook import NO_OUTLOOK, Outlook
from pool.residency import Move, Residency, Resident, needed_bytes, plan, upload_bytes_of
from pool.spec import ComponentKey, ComponentSpec, ComponentUse

#: of what a run holds beside weights, so much again is left free: a run that runs out of memory is made anew. An
#: assumption: estimates of activations that runs corrected are closer than that
MARGIN_PART = 8


class Held(NamedTuple):
    """What a run that is under way holds.

    components  those that may not move
    run_bytes   what it may have beside weights: activations and scratch
    """

    components: frozenset[ComponentKey]
    run_bytes: int


class Arrival(NamedTuple):
    """Weights of one component that arrive beside a run.

    from_bytes    what is resident of it when the first of them arrives, in the patches of `use`
    to_bytes      what is when all have
    upload_bytes  as they cross the bus
    is_switch     some of it is there with other patches
    """

    use: ComponentUse
    from_bytes: int
    to_bytes: int
    upload_bytes: int
    is_switch: bool = False

    def entry(self, uploaded_bytes: int) -> Resident:
        """What is resident of it when so much of it has crossed the bus."""
        grown_bytes = (self.to_bytes - self.from_bytes) * min(uploaded_bytes, self.upload_bytes) // self.upload_bytes
        use = self.use
        return Resident(use.component, self.from_bytes + grown_bytes, use.patch_digest, use.patched_bytes)


class AheadPlan(NamedTuple):
    """What leaves, then what arrives, in order, beside a run."""

    evict: tuple[Move, ...] = ()
    arrive: tuple[Arrival, ...] = ()

    @property
    def upload_bytes(self) -> int:
        """Bytes that cross the bus."""
        return sum(arrival.upload_bytes for arrival in self.arrive)

    @property
    def switches(self) -> int:
        """Components that get other patches."""
        return sum(arrival.is_switch for arrival in self.arrive)

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
        stays = (
            replace(entry, resident_bytes=entry.resident_bytes - lost[entry.component])
            if entry.component in lost
            else entry
            for entry in now.entries
            if entry.component not in arrived
        )
        entries = (*stays, *arrived.values())
        return Residency(now.capacity_bytes, tuple(entry for entry in entries if entry.resident_bytes > 0))


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
    before = {entry.component: entry for entry in now.entries}
    coming = _coming(now, before, uses, specs, activation_bytes, outlook)
    if coming is None:
        return NOTHING_AHEAD
    targets, evict = coming
    working_bytes = held.run_bytes + held.run_bytes // MARGIN_PART + needed_bytes(uses, 0)
    free_bytes = room_bytes = now.capacity_bytes - working_bytes - sum([e.resident_bytes for e in now.entries])
    leaving: list[Move] = []
    if evict:
        fixed = held.components.union(targets)
        leaving = [move for move in evict if move.component not in fixed]
        room_bytes += sum([move.bytes for move in leaving])
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
    before: Mapping[ComponentKey, Resident],
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    outlook: Outlook,
) -> tuple[Mapping[ComponentKey, int], Sequence[Move]] | None:
    """What the task will have of each component when it runs, and what its plan lets leave; None when it does not fit.
    Where there is room for all of it beside what is there the plan is known without making it. `before` has the
    entries of `now`."""
    whole = {use.component: specs[use.component].weight_bytes for use in uses}
    stays_bytes = sum([entry.resident_bytes for key, entry in before.items() if key not in whole])
    if stays_bytes + sum(whole.values()) + needed_bytes(uses, activation_bytes) <= now.capacity_bytes:
        return whole, ()
    try:
        moves = plan(now, uses, specs, activation_bytes, outlook=outlook)
    except DoesNotFit:
        return None
    after = {entry.component: entry.resident_bytes for entry in moves.after.entries}
    return {key: after.get(key, 0) for key in whole}, moves.evict


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
    start = Resident(use.component, from_bytes, use.patch_digest) if from_bytes else None
    upload_bytes = upload_bytes_of(start, use, spec, to_bytes)
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
