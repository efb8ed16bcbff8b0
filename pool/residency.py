"""Which bytes of which components are on one GPU, and what a task would move. Pure byte arithmetic.

The worker executes these plans, the scheduler predicts with them, the simulator charges time for them: one truth.
Standard library only. Knows sizes, not modules of torch; the choice of modules is by name and bytes.

Rules
1. A task needs its activations and the scratch of its hungriest component free; weights get what is left.
2. Any component can run with no byte resident (all streamed), so a task fits exactly when rule 1 leaves nothing
   negative.
3. Evict least recently used first, and no more bytes than needed; never what is leased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pool.errors import does_not_fit
from pool.outlook import NO_OUTLOOK, Outlook
from pool.spec import UNPATCHED, ComponentKey, ComponentSpec, ComponentUse


@dataclass(frozen=True, slots=True)
class Resident:
    """The part of one component that is on the GPU."""

    component: ComponentKey
    resident_bytes: int
    #: the patch set that these bytes carry
    patch_digest: str = UNPATCHED
    #: bytes of the modules that this patch set touches, resident or not
    patched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Residency:
    """What is on one GPU: at most one entry a component, least recently used first. Only entries with bytes."""

    capacity_bytes: int
    entries: tuple[Resident, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes of weights on the GPU."""
        return sum(e.resident_bytes for e in self.entries)

    def of(self, component: ComponentKey) -> Resident | None:
        """The entry of `component`, or None when no byte of it is resident."""
        for entry in self.entries:
            if entry.component == component:
                return entry
        return None


@dataclass(frozen=True, slots=True)
class Move:
    """`bytes` of weights of one component that leave the GPU or arrive on it."""

    component: ComponentKey
    bytes: int


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
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
    return activation_bytes + max((u.scratch_bytes for u in uses), default=0)


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
    it does use may grow but is neither shrunk nor patched anew.
    Raises DoesNotFit when activations, scratch and leased bytes exceed the capacity, or when a leased component would
    have to change its patches.
    """
    wanted = {u.component for u in uses}
    held_bytes = _leased_bytes(now, wanted, leased)
    weights_bytes = now.capacity_bytes - needed_bytes(uses, activation_bytes) - held_bytes
    floors = {u.component: _leased_floor(now, u, leased) for u in uses}
    if weights_bytes < sum(floors.values()):
        raise _too_small(now, uses, activation_bytes, held_bytes + sum(floors.values()))

    targets = _share(weights_bytes, uses, specs, floors)
    kept, evict = _keep_recent(now, wanted, leased, weights_bytes - sum(targets.values()))
    upload: list[Move] = []
    switched: list[ComponentKey] = []
    streamed_bytes = 0
    arrived: list[Resident] = []
    for use in uses:
        spec, target_bytes = specs[use.component], targets[use.component]
        before = now.of(use.component)
        if before is not None and before.resident_bytes > target_bytes:
            evict.append(Move(use.component, before.resident_bytes - target_bytes))
        uploaded_bytes = _upload_bytes(before, use, spec, target_bytes)
        if uploaded_bytes:
            upload.append(Move(use.component, uploaded_bytes))
        if before is not None and before.patch_digest != use.patch_digest:
            switched.append(use.component)
        streamed_bytes += use.passes * _on_the_bus(spec, spec.weight_bytes - target_bytes)
        if target_bytes:
            arrived.append(Resident(use.component, target_bytes, use.patch_digest, use.patched_bytes))
    after = Residency(now.capacity_bytes, (*kept, *arrived))
    return ResidencyPlan(tuple(evict), tuple(upload), tuple(switched), after, streamed_bytes)


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """One module's own weights: bytes when resident (compute dtype) and on the bus (storage dtype).

    flops  multiplications and additions of one pass through it at a usual size; 0 where nobody counted
    """

    name: str
    resident_bytes: int
    upload_bytes: int
    flops: int = 0


def choose_modules(modules: Sequence[ModuleBytes], target_bytes: int, now: frozenset[str]) -> frozenset[str]:
    """The modules that should be resident: at most `target_bytes` together.

    What is there already stays before anything new comes, largest first, so that a second choice with the same target
    moves nothing; ties by name.
    """
    if target_bytes >= sum(m.resident_bytes for m in modules):
        return frozenset(m.name for m in modules)
    left_bytes = target_bytes
    chosen: set[str] = set()
    for module in sorted(modules, key=lambda m: (m.name not in now, -m.resident_bytes, m.name)):
        if module.resident_bytes <= left_bytes:
            chosen.add(module.name)
            left_bytes -= module.resident_bytes
    return frozenset(chosen)


def _leased_bytes(now: Residency, wanted: set[ComponentKey], leased: frozenset[ComponentKey]) -> int:
    """Bytes of leased components that the task does not use."""
    if not leased:
        return 0
    return sum(e.resident_bytes for e in now.entries if e.component in leased and e.component not in wanted)


def _leased_floor(now: Residency, use: ComponentUse, leased: frozenset[ComponentKey]) -> int:
    before = now.of(use.component) if use.component in leased else None
    if before is None:
        return 0
    if before.patch_digest != use.patch_digest:
        raise does_not_fit(
            f"{use.component} with other patches", before.resident_bytes, 0, "it is leased with the patches it has"
        )
    return before.resident_bytes


def _too_small(now: Residency, uses: Sequence[ComponentUse], activation_bytes: int, held_bytes: int) -> ValueError:
    scratch_bytes = max((u.scratch_bytes for u in uses), default=0)
    return does_not_fit(
        " with ".join(u.component for u in uses),
        activation_bytes + scratch_bytes + held_bytes,
        now.capacity_bytes,
        f"activations {activation_bytes} B, working set of the largest layer {scratch_bytes} B, leased {held_bytes} B",
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


def _keep_recent(
    now: Residency, wanted: set[ComponentKey], leased: frozenset[ComponentKey], room_bytes: int
) -> tuple[list[Resident], list[Move]]:
    """Of the components that the task does not use: what stays within `room_bytes`, and what leaves for it.

    The most recently used stays; the one at the edge leaves in part. Leased ones stay and are not charged to the room.
    """
    others = [e for e in now.entries if e.component not in wanted]
    if sum(e.resident_bytes for e in others if e.component not in leased) <= room_bytes:
        return others, []
    kept: list[Resident] = []
    evict: list[Move] = []
    for entry in reversed(others):
        stays_bytes = entry.resident_bytes
        if entry.component not in leased:
            stays_bytes = min(stays_bytes, room_bytes)
            room_bytes -= stays_bytes
        if stays_bytes == entry.resident_bytes:
            kept.insert(0, entry)
            continue
        evict.insert(0, Move(entry.component, entry.resident_bytes - stays_bytes))
        if stays_bytes:
            kept.insert(0, Resident(entry.component, stays_bytes, entry.patch_digest, entry.patched_bytes))
    return kept, evict


def _upload_bytes(before: Resident | None, use: ComponentUse, spec: ComponentSpec, target_bytes: int) -> int:
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
