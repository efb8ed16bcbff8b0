"""Predicts the bytes that a task would move on a worker. Pure byte arithmetic over
`pool.weights.plan.eviction_plan.plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.eviction_plan import Residency, ResidencyPlan, Resident, plan, upload_bytes_of
from modelpool.scheduler.model.cost_classes import MOST_PREDICTIONS, CostClass, FullyResident, LoadEstimate
from modelpool.scheduler.model.nodes import Reads


def predict(
    cost_class: CostClass,
    used_entries: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> LoadEstimate:
    """Return the transfers of a run on a GPU with these entries of the components that it uses.

    Without leases, other resident components determine only the evictions: the plan is computed without them, and
    keeps the room that it leaves them. The cost class must fit in `capacity_bytes`.
    """
    is_cold, is_warm, fully_resident = True, False, cost_class.fully_resident
    for entry in used_entries:
        if entry is not None:
            is_cold = False
    load = None
    if is_cold:
        load = cost_class.cold.get(capacity_bytes)
    elif fully_resident is not None and used_entries == fully_resident.arrived:
        is_warm = True
        load = cost_class.warm.get(capacity_bytes)
    if load is None:
        load = predict_fully_resident(cost_class, used_entries, capacity_bytes, components)
        if is_warm and load is not None:
            cost_class.warm[capacity_bytes] = load
    if load is None:
        key = (capacity_bytes, used_entries)
        load = cost_class.predictions.get(key)
        if load is None:
            if len(cost_class.predictions) >= MOST_PREDICTIONS:
                cost_class.predictions.clear()
            load = cost_class.predictions[key] = predict_by_plan(cost_class, used_entries, capacity_bytes, components)
    if is_cold:
        cost_class.cold[capacity_bytes] = load
    return load


def predict_by_plan(
    cost_class: CostClass,
    used_entries: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> LoadEstimate:
    """`predict` by computing the plan: correct in all cases."""
    present = tuple(entry for entry in used_entries if entry is not None)
    mode = cost_class.mode(capacity_bytes)
    moves = plan(Residency(capacity_bytes, present), cost_class.uses, components, mode.activation_bytes)
    return LoadEstimate(
        upload_bytes=moves.upload_bytes,
        streamed_bytes=moves.streamed_bytes,
        switches=len(moves.switched),
        present_bytes=sum(entry.resident_bytes for entry in present),
        room_bytes=capacity_bytes - mode.activation_bytes - cost_class.scratch_bytes - moves.after.used_bytes,
        self_evicted_bytes=moves.evicted_bytes,
        arrived=moves.after.entries,
        mode=mode,
        reads=files_read(cost_class.uses, moves, components),
    )


def predict_fully_resident(
    cost_class: CostClass,
    used_entries: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> LoadEstimate | None:
    """`predict` if there is room for all components in full: the plan is then a sum. None if there is not, or if more
    is resident than a component has."""
    fully_resident = cost_class.fully_resident
    if fully_resident is None:
        fully_resident = cost_class.fully_resident = _fully_resident(cost_class.uses, components)
    mode = cost_class.mode(capacity_bytes)
    room_bytes = capacity_bytes - mode.activation_bytes - cost_class.scratch_bytes - fully_resident.weight_bytes
    if room_bytes < 0:
        return None
    uploaded_bytes = switches = present_bytes = 0
    reads: list[tuple[ComponentKey, int]] = []
    is_lora_read = False
    for place, (use, spec, loras) in enumerate(fully_resident.parts):
        before = used_entries[place]
        if before is None:
            read_bytes = spec.upload_bytes
        else:
            held_bytes, weight_bytes = before.resident_bytes, spec.weight_bytes
            present_bytes += held_bytes
            if before.patch_digest != use.patch_digest:
                switches += 1
            elif held_bytes == weight_bytes:
                continue
            if held_bytes > weight_bytes:
                return None
            read_bytes = upload_bytes_of(before, use, spec, weight_bytes)
        if read_bytes:
            uploaded_bytes += read_bytes
            reads.append((spec.key, read_bytes))
            if loras:
                reads += loras.items()
                is_lora_read = True
    files = tuple(dict(reads).items()) if is_lora_read else tuple(reads)  # several components may read one LoRA
    return LoadEstimate(uploaded_bytes, 0, switches, present_bytes, room_bytes, 0, fully_resident.arrived, mode, files)


def _fully_resident(uses: Iterable[ComponentUse], components: Mapping[ComponentKey, ComponentSpec]) -> FullyResident:
    parts = tuple((use, components[use.component], _lora_reads(use, components)) for use in uses)
    arrived = tuple(
        Resident(use.component, spec.weight_bytes, use.patch_digest, use.patched_bytes) for use, spec, _ in parts
    )
    return FullyResident(sum(spec.weight_bytes for _, spec, _ in parts), parts, arrived)


def _lora_reads(use: ComponentUse, components: Mapping[ComponentKey, ComponentSpec]) -> dict[ComponentKey, int]:
    """Bytes read of LoRAs when these patches are applied. LoRAs of unknown size are left out."""
    return {adapter: components[adapter].upload_bytes for adapter in use.adapters if adapter in components}


def files_read(
    uses: Iterable[ComponentUse], moves: ResidencyPlan, components: Mapping[ComponentKey, ComponentSpec]
) -> Reads:
    """The host reads of a run with these moves: uploaded or streamed bytes of components, and complete LoRAs of the
    patch sets that are applied. LoRAs of unknown size are left out."""
    uploads = {move.component: move.bytes for move in moves.upload}
    reads: dict[ComponentKey, int] = {}
    for use in uses:
        spec, after = components[use.component], moves.after.of(use.component)
        resident_bytes = 0 if after is None else after.resident_bytes
        streams_bytes = spec.upload_bytes * (spec.weight_bytes - resident_bytes) // spec.weight_bytes
        read_bytes = min(uploads.get(use.component, 0) + streams_bytes, spec.upload_bytes)
        if read_bytes:
            reads[use.component] = read_bytes
            reads.update(_lora_reads(use, components))
    return tuple(reads.items())
