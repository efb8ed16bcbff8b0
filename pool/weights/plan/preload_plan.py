"""Plan which weights of the next task to preload while the current task runs. Pure byte arithmetic.

The worker moves weights by this plan, the scheduler predicts with it, the simulator charges time for it: one source, as
`pool.weights.plan.eviction_plan` is for moves before a run. Standard library only.

Rules
1. Nothing that the current run uses moves: leased components are neither shrunk nor re-patched. Its activations and
   scratch stay free, with a margin because they are estimates, and so does the scratch of the arriving weights.
2. Evicted are the components that the next task's own plan would evict after the run, in that order and no more than
   needed; never components of the current run.
3. The component with the most bytes on the bus arrives first: it saves most seconds.
4. Only components that will be fully resident for the next task: for a partly streamed one, its own plan selects the
   part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.eviction_plan import (
    Move,
    Residency,
    Resident,
    make_room,
    needed_bytes,
    upload_bytes_of,
)

#: margin as a fraction of the activations and scratch of a run, which restarts if it runs out of memory. An assumption:
#: calibrated estimates of activations are closer than that
MARGIN_PART = 8


@dataclass(slots=True, unsafe_hash=True)
class RunningLease:
    """The components and memory that the current run uses.

    components  those that may not move
    run_bytes   its activations and scratch
    """

    components: Final[frozenset[ComponentKey]]
    run_bytes: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class Arrival:
    """Weights of one component that arrive during a run.

    from_bytes    resident bytes with the patches of `use` before the first upload
    to_bytes      resident bytes after the last one
    upload_bytes  bytes on the bus
    is_switch     a part of it is resident with other patches
    """

    use: Final[ComponentUse]
    from_bytes: Final[int]
    to_bytes: Final[int]
    upload_bytes: Final[int]
    is_switch: Final[bool] = False

    def entry(self, uploaded_bytes: int) -> Resident:
        """Return its resident part after `uploaded_bytes` have crossed the bus."""
        grown_bytes = (self.to_bytes - self.from_bytes) * min(uploaded_bytes, self.upload_bytes) // self.upload_bytes
        use = self.use
        return Resident(use.component, self.from_bytes + grown_bytes, use.patch_digest, use.patched_bytes)


@dataclass(slots=True, unsafe_hash=True)
class PreloadPlan:
    """Evictions, then arrivals, in order, during a run."""

    evict: Final[tuple[Move, ...]] = ()
    arrive: Final[tuple[Arrival, ...]] = ()

    @property
    def upload_bytes(self) -> int:
        """Bytes that cross the bus."""
        return sum([arrival.upload_bytes for arrival in self.arrive])

    @property
    def switches(self) -> int:
        """Number of components that get other patches."""
        return sum([arrival.is_switch for arrival in self.arrive])

    def after(self, now: Residency, uploaded_bytes: int | None = None) -> Residency:
        """Return the residency after `uploaded_bytes` have crossed the bus (None: all). Evictions happen with the first
        byte."""
        left_bytes = self.upload_bytes if uploaded_bytes is None else uploaded_bytes
        if left_bytes <= 0:
            return now
        arrived: dict[ComponentKey, Resident] = {}
        for arrival in self.arrive:
            if left_bytes <= 0:
                break
            arrived[arrival.use.component] = arrival.entry(left_bytes)
            left_bytes -= arrival.upload_bytes
        evicted = {move.component: move.bytes for move in self.evict}
        entries: list[Resident] = []
        for entry in now.entries:
            key = entry.component
            if key in arrived:
                continue
            evicted_bytes = evicted.get(key, 0)
            if not evicted_bytes:
                entries.append(entry)
            elif entry.resident_bytes > evicted_bytes:
                stays_bytes = entry.resident_bytes - evicted_bytes
                entries.append(Resident(key, stays_bytes, entry.patch_digest, entry.patched_bytes))
        entries += [entry for entry in arrived.values() if entry.resident_bytes > 0]
        return Residency(now.capacity_bytes, tuple(entries))


#: nothing moves during the run
NOTHING_TO_PRELOAD = PreloadPlan()


def plan_preload(
    now: Residency,
    held: RunningLease,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    hints: EvictionHints = NO_HINTS,
) -> PreloadPlan:
    """Plan the moves during a run for the next task, with `uses` and `activation_bytes`.

    `now` is the residency during the run, with the full capacity. Empty if the task does not fit the GPU.
    """
    coming = _coming(now, uses, specs, activation_bytes, hints)
    if coming is None:
        return NOTHING_TO_PRELOAD
    targets, evicted = coming
    working_bytes = held.run_bytes + held.run_bytes // MARGIN_PART + needed_bytes(uses, 0)
    free_bytes = now.capacity_bytes - working_bytes
    for entry in now.entries:
        free_bytes -= entry.resident_bytes
    room_bytes = free_bytes
    leaving: list[Move] = []
    if evicted:
        components = held.components
        leaving = [Move(key, evicted_bytes) for key, evicted_bytes in evicted.items() if key not in components]
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
        return NOTHING_TO_PRELOAD
    return PreloadPlan(_as_needed(leaving, -free_bytes), tuple(found))


def _coming(
    now: Residency,
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    activation_bytes: int,
    hints: EvictionHints,
) -> tuple[Mapping[ComponentKey, int], Mapping[ComponentKey, int]] | None:
    """Bytes of each component during the next task, and bytes that its plan evicts of others, in order; None if it does
    not fit. If everything fits without evictions, the plan is known without computing it."""
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
        _, targets, evicted = make_room(now, uses, specs, activation_bytes, hints=hints)
    except DoesNotFit:
        return None
    return targets, evicted


def _arrival(
    before: Resident | None,
    use: ComponentUse,
    specs: Mapping[ComponentKey, ComponentSpec],
    targets: Mapping[ComponentKey, int],
    room_bytes: int,
) -> Arrival | None:
    """The arrival of one component into `room_bytes`; None if nothing arrives."""
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
    """Bytes on the bus of a component in the next task's plan."""
    return upload_bytes_of(before, use, specs[use.component], targets[use.component])


def _as_needed(leaving: Sequence[Move], missing_bytes: int) -> tuple[Move, ...]:
    """The first moves of `leaving` that free `missing_bytes`."""
    moves = []
    for move in leaving:
        if missing_bytes <= 0:
            break
        moves.append(Move(move.component, min(move.bytes, missing_bytes)))
        missing_bytes -= move.bytes
    return tuple(moves)
