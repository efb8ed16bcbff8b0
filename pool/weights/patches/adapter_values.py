"""Converts entries of a LoRA file to patch values for rows of parameters.

Knows the meaning of each kind's tensors and which kinds can be split by rows. A weight of the file's model may be some
rows of one parameter, or rows of several: the value is split accordingly.
"""

from __future__ import annotations

import torch

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.keymaps.provenance import Reshape
from modelpool.pool.weights.patches.adapter_entries import AdapterEntry, AdapterKind
from modelpool.pool.weights.patches.additive import Additive, FromFactors, Padded, ReshapedDelta, columns_of
from modelpool.pool.weights.patches.dora import DoRA
from modelpool.pool.weights.patches.full_weights import Difference, Replacement
from modelpool.pool.weights.patches.glora import glora_of
from modelpool.pool.weights.patches.loha import HadamardFactor, LoHa
from modelpool.pool.weights.patches.lokr import KroneckerFactor, LoKr
from modelpool.pool.weights.patches.lora import LowRank, TuckerLowRank
from modelpool.pool.weights.patches.oft import BOFT, OFT, InputOFT
from modelpool.pool.weights.patches.vera import VeRA
from modelpool.pool.weights.patches.weight_patch import Offset, PatchValue, Shape

#: kinds with strength alpha over the rank; a LoKr that is not decomposed has no rank and ignores alpha
_SCALED = (AdapterKind.LORA, AdapterKind.LOHA, AdapterKind.LOKR, AdapterKind.GLORA)
#: kinds with one tensor, as large as the weight
_FULL_WEIGHT = (AdapterKind.NORM, AdapterKind.DIFFERENCE, AdapterKind.REPLACEMENT)


def value_for_rows(entry: AdapterEntry, target: RowRange, shape: Shape) -> tuple[PatchValue, Offset | None]:
    """Return the value of `entry` for the rows `target` of a parameter of `shape`, and the offset of these rows.

    Raises PatchFailed, with the reason, when the entry does not fit or cannot be split this way.
    """
    if _is_zero(entry):
        raise PatchFailed("its alpha is 0, which disables it")
    if not target.source_shape and entry.kind not in _FULL_WEIGHT:
        raise PatchFailed(f"a {entry.kind.value} cannot apply to a single number")
    source_rows = target.source_shape[0] if target.source_shape else 1
    offset = _offset(target, shape)
    if entry.reshaped is not None:
        delta = adapter_value(entry, entry.reshaped)
        if offset is not None or target.rows != source_rows:
            raise PatchFailed(f"it pads to {entry.reshaped} a weight that is split over several parameters")
        return Padded(delta, entry.reshaped), None
    delta = adapter_value(entry, target.source_shape)
    delta.check(target.source_shape)
    if not _keeps_rows(target):
        if not isinstance(delta, FromFactors):
            raise PatchFailed("it depends on the weight, whose numbers the parameter has in another order")
        return _as_patch_value(entry, ReshapedDelta(delta, target)), offset
    if target.rows != source_rows:
        delta = delta.rows(target.source_start, target.rows)
    return _as_patch_value(entry, delta), offset


def adapter_value(entry: AdapterEntry, shape: Shape) -> Additive:
    """Return the delta of `entry` for a complete weight of `shape`. Raises PatchFailed when it has none."""
    p = entry.parts
    delta = _without_magnitude(entry, shape)
    return DoRA(delta, p["dora_scale"], shape) if "dora_scale" in p else delta


def _without_magnitude(entry: AdapterEntry, shape: Shape) -> Additive:
    p, alpha = entry.parts, entry.alpha
    match entry.kind:
        case AdapterKind.LORA:
            scale = _scale(entry)
            if "mid" in p:
                return TuckerLowRank(p["up"], p["down"], p["mid"], scale)
            return LowRank(p["up"].flatten(1), p["down"].flatten(1), scale)
        case AdapterKind.LOHA:
            first = HadamardFactor(p["hada_w1_a"], p["hada_w1_b"], p.get("hada_t1"))
            second = HadamardFactor(p["hada_w2_a"], p["hada_w2_b"], p.get("hada_t2"))
            return LoHa(first, second, _scale(entry))
        case AdapterKind.LOKR:
            outer = KroneckerFactor(p.get("lokr_w1"), p.get("lokr_w1_a"), p.get("lokr_w1_b"))
            inner = KroneckerFactor(p.get("lokr_w2"), p.get("lokr_w2_a"), p.get("lokr_w2_b"), p.get("lokr_t2"))
            return LoKr(outer, inner, _scale(entry))
        case AdapterKind.GLORA:
            return glora_of(p["a1"], p["a2"], p["b1"], p["b2"], alpha, shape)
        case AdapterKind.VERA:
            projections = p["vera_B"], p["vera_A"]
            return VeRA(*projections, p["vera_lambda_b"], p["vera_lambda_d"], columns_of(shape))
        case AdapterKind.OFT:
            # trainers limit the norm to alpha times the number of rows; ComfyUI forgets the factor
            return OFT(p["oft_blocks"], p.get("rescale"), (alpha or 0.0) * shape[0], shape)
        case AdapterKind.BOFT:
            return BOFT(p["oft_blocks"], p.get("rescale"), (alpha or 0.0) * shape[0], shape)
        case AdapterKind.ROTATION:
            return OFT(p["oft_diag"], p.get("rescale"), 0.0, shape, is_rotation=True)
        case AdapterKind.INPUT_OFT:
            turned = len(shape) > 2 and not entry.by_peft
            return InputOFT(p["oft_R"], 1.0 if entry.scale is None else entry.scale, shape, entry.terms, turned)
        case AdapterKind.NORM | AdapterKind.DIFFERENCE | AdapterKind.REPLACEMENT:
            (tensor,) = p.values()
            return Difference(tensor if entry.scale in (None, 1.0) else tensor.float() * entry.scale)


def bias_range(target: RowRange, bias: str) -> RowRange:
    """Return the rows of the parameter `bias` that belong to the rows `target` of its weight.

    Raises PatchFailed when the weight's rows are not preserved.
    """
    if not _keeps_rows(target):
        raise PatchFailed("it is for the bias of a weight whose numbers the parameter has in another order")
    return RowRange(bias, target.source_shape[:1], target.source_start, target.rows, target.start)


def _as_patch_value(entry: AdapterEntry, value: Additive) -> PatchValue:
    """Return `value`, as a replacement if the entry is one: replacements are split as differences are."""
    if entry.kind is not AdapterKind.REPLACEMENT:
        return value
    if isinstance(value, Difference):
        return Replacement(value.tensor)
    assert isinstance(value, ReshapedDelta)
    assert isinstance(value.source, Difference)
    return Replacement(value.range.place(value.source.tensor.reshape(value.range.source_shape)))


def _is_zero(entry: AdapterEntry) -> bool:
    """Whether its delta is 0 whatever its factors are. A magnitude changes the weight even without a delta."""
    if "dora_scale" in entry.parts or entry.kind not in _SCALED:
        return False
    is_full = entry.kind is AdapterKind.LOKR and entry.rank is None
    return entry.scale == 0.0 or (entry.alpha == 0.0 and not is_full)


def _scale(entry: AdapterEntry) -> float:
    if entry.scale is not None:
        return entry.scale
    return 1.0 if entry.alpha is None or entry.rank is None else entry.alpha / entry.rank


def _offset(target: RowRange, shape: Shape) -> Offset | None:
    if _keeps_rows(target):
        rows = target.rows
    else:
        hollow = torch.empty(target.source_shape, device="meta")
        rows = int(target.place(hollow).shape[0])
    return None if target.start == 0 and rows == (shape[0] if shape else 1) else Offset(0, target.start, rows)


def _keeps_rows(target: RowRange) -> bool:
    """Whether each row of the source is one of the parameter, with its numbers in the same order."""
    return all(isinstance(o, Reshape) and o.before[0] == o.after[0] for o in target.operations)
