"""Predicts the bytes that a task would move on a worker. Pure byte arithmetic over pool.plan.residency.plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelpool.pool.plan.residency import Residency, ResidencyPlan, Resident, plan, upload_bytes_of
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.scheduler.tables.cost_classes import MOST_PREDICTIONS, Setup, Signature, Whole
from modelpool.scheduler.tables.nodes import Reads


def predict(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup:
    """What a run would move on a GPU with these entries of the components that it uses.

    With nothing leased, what is resident of other components decides what is evicted and nothing else: the plan is made
    without them, and the room that it leaves them is kept. The signature must fit in `capacity_bytes`.
    """
    is_cold, is_warm, whole = True, False, signature.whole
    for entry in seen:
        if entry is not None:
            is_cold = False
    setup = None
    if is_cold:
        setup = signature.cold.get(capacity_bytes)
    elif whole is not None and seen == whole.arrived:
        is_warm = True
        setup = signature.warm.get(capacity_bytes)
    if setup is None:
        setup = predict_whole(signature, seen, capacity_bytes, components)
        if is_warm and setup is not None:
            signature.warm[capacity_bytes] = setup
    if setup is None:
        key = (capacity_bytes, seen)
        setup = signature.predictions.get(key)
        if setup is None:
            if len(signature.predictions) >= MOST_PREDICTIONS:
                signature.predictions.clear()
            setup = signature.predictions[key] = predict_by_plan(signature, seen, capacity_bytes, components)
    if is_cold:
        signature.cold[capacity_bytes] = setup
    return setup


def predict_by_plan(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup:
    """`predict`, by asking the plan itself: right for all cases."""
    own = tuple(entry for entry in seen if entry is not None)
    way = signature.way(capacity_bytes)
    moves = plan(Residency(capacity_bytes, own), signature.uses, components, way.activation_bytes)
    return Setup(
        upload_bytes=moves.upload_bytes,
        streamed_bytes=moves.streamed_bytes,
        switches=len(moves.switched),
        own_bytes=sum(entry.resident_bytes for entry in own),
        room_bytes=capacity_bytes - way.activation_bytes - signature.scratch_bytes - moves.after.used_bytes,
        shrunk_bytes=moves.evicted_bytes,
        arrived=moves.after.entries,
        way=way,
        reads=files_read(signature.uses, moves, components),
    )


def predict_whole(
    signature: Signature,
    seen: tuple[Resident | None, ...],
    capacity_bytes: int,
    components: Mapping[ComponentKey, ComponentSpec],
) -> Setup | None:
    """`predict`, where there is room for all components whole: then a plan is a sum, made here without asking for one.
    None where there is not, or where more is resident than a component has."""
    whole = signature.whole
    if whole is None:
        whole = signature.whole = _whole(signature.uses, components)
    way = signature.way(capacity_bytes)
    room_bytes = capacity_bytes - way.activation_bytes - signature.scratch_bytes - whole.weight_bytes
    if room_bytes < 0:
        return None
    uploaded_bytes = switches = own_bytes = 0
    reads: list[tuple[ComponentKey, int]] = []
    is_lora_read = False
    for place, (use, spec, loras) in enumerate(whole.parts):
        before = seen[place]
        if before is None:
            read_bytes = spec.upload_bytes
        else:
            held_bytes, weight_bytes = before.resident_bytes, spec.weight_bytes
            own_bytes += held_bytes
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
    files = tuple(dict(reads).items()) if is_lora_read else tuple(reads)  # several may read one LoRA
    return Setup(uploaded_bytes, 0, switches, own_bytes, room_bytes, 0, whole.arrived, way, files)


def _whole(uses: Iterable[ComponentUse], components: Mapping[ComponentKey, ComponentSpec]) -> Whole:
    parts = tuple((use, components[use.component], _lora_reads(use, components)) for use in uses)
    arrived = tuple(
        Resident(use.component, spec.weight_bytes, use.patch_digest, use.patched_bytes) for use, spec, _ in parts
    )
    return Whole(sum(spec.weight_bytes for _, spec, _ in parts), parts, arrived)


def _lora_reads(use: ComponentUse, components: Mapping[ComponentKey, ComponentSpec]) -> dict[ComponentKey, int]:
    """What is read of LoRAs where these patches are applied anew. Those of unknown size are left out."""
    return {adapter: components[adapter].upload_bytes for adapter in use.adapters if adapter in components}


def files_read(
    uses: Iterable[ComponentUse], moves: ResidencyPlan, components: Mapping[ComponentKey, ComponentSpec]
) -> Reads:
    """What a run with these moves reads on the host: of components what is uploaded or streams, and the whole LoRAs of
    those patch sets that are applied anew. LoRAs of unknown size are left out."""
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
