"""Entries of a LoRA file as values for rows of parameters.

Knows what the tensors of each kind mean and which kinds can be cut up by rows. A weight of the file's model may be
several rows of one parameter, or the rows of several: what it says is cut along.
"""

from __future__ import annotations

import torch

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.keymaps.key_map import RowRange
from modelpool.pool.keymaps.provenance import Reshape
from modelpool.pool.patches.adapter_entries import AdapterEntry, AdapterKind
from modelpool.pool.patches.additive import Additive, FromFactors, Padded, Placed
from modelpool.pool.patches.dora import DoRA
from modelpool.pool.patches.full_weights import Difference, Replacement
from modelpool.pool.patches.glora import glora_of
from modelpool.pool.patches.loha import HadamardFactor, LoHa
from modelpool.pool.patches.lokr import KroneckerFactor, LoKr
from modelpool.pool.patches.low_rank import LowRank, TuckerLowRank
from modelpool.pool.patches.oft import BOFT, OFT
from modelpool.pool.patches.weight_patch import Offset, PatchValue, Shape

#: kinds in which alpha is the strength, over the rank; a LoKr that is not decomposed has none and ignores it
_SCALED = (AdapterKind.LORA, AdapterKind.LOHA, AdapterKind.LOKR, AdapterKind.GLORA)
#: kinds whose one tensor is as large as the weight
_WHOLE = (AdapterKind.NORM, AdapterKind.DIFFERENCE, AdapterKind.REPLACEMENT)


def placed_value(entry: AdapterEntry, target: RowRange, shape: Shape) -> tuple[PatchValue, Offset | None]:
    """What `entry` does to the rows `target` of a parameter of `shape`, and which part of the parameter these are.

    Raises PatchFailed, with the reason, when the entry does not fit or cannot be cut up this way.
    """
    if _is_nothing(entry):
        raise PatchFailed("its alpha is 0, which makes it nothing")
    if not target.source_shape and entry.kind not in _WHOLE:
        raise PatchFailed(f"a {entry.kind.value} cannot be for a single number")
    source_rows = target.source_shape[0] if target.source_shape else 1
    offset = _offset(target, shape)
    if entry.reshaped is not None:
        whole = adapter_value(entry, entry.reshaped)
        if offset is not None or target.rows != source_rows:
            raise PatchFailed(f"it makes {entry.reshaped} of a weight that several parameters are made of")
        return Padded(whole, entry.reshaped), None
    whole = adapter_value(entry, target.source_shape)
    whole.check(target.source_shape)
    if not _keeps_rows(target):
        if not isinstance(whole, FromFactors):
            raise PatchFailed("it depends on the weight, whose numbers are kept in another order")
        return _final(entry, Placed(whole, target)), offset
    if target.rows != source_rows:
        whole = whole.rows(target.source_start, target.rows)
    return _final(entry, whole), offset


def adapter_value(entry: AdapterEntry, shape: Shape) -> Additive:
    """The delta of `entry` for a whole weight of `shape`. Raises PatchFailed when it cannot be one."""
    p = entry.parts
    made = _without_magnitude(entry, shape)
    if "dora_scale" in p:
        return DoRA(made, p["dora_scale"], shape)
    if "magnitude" in p:  # as PEFT keeps it: a number for each row, whatever its shape
        return DoRA(made, p["magnitude"].reshape(-1), shape, length_of_sum=True)
    return made


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
        case AdapterKind.OFT:
            return OFT(p["oft_blocks"], p.get("rescale"), alpha or 0.0, shape)
        case AdapterKind.BOFT:
            return BOFT(p["oft_blocks"], p.get("rescale"), alpha or 0.0, shape)
        case AdapterKind.NORM | AdapterKind.DIFFERENCE | AdapterKind.REPLACEMENT:
            (tensor,) = p.values()
            return Difference(tensor if entry.scale in (None, 1.0) else tensor.float() * entry.scale)


def bias_range(target: RowRange, bias: str) -> RowRange:
    """The rows of the parameter `bias` that belong to the rows `target` of its weight.

    Raises PatchFailed when the weight's rows are not kept as they are.
    """
    if not _keeps_rows(target):
        raise PatchFailed("it is about the bias of a weight whose numbers are kept in another order")
    return RowRange(bias, target.source_shape[:1], target.source_start, target.rows, target.start)


def _final(entry: AdapterEntry, value: Additive) -> PatchValue:
    """A replacement is cut up as a difference is, and put in place of the weight instead."""
    if entry.kind is not AdapterKind.REPLACEMENT:
        return value
    if isinstance(value, Difference):
        return Replacement(value.tensor)
    assert isinstance(value, Placed)
    assert isinstance(value.whole, Difference)
    return Replacement(value.range.place(value.whole.tensor.reshape(value.range.source_shape)))


def _is_nothing(entry: AdapterEntry) -> bool:
    """Whether its delta is 0 whatever its factors are. A magnitude changes the weight without a delta, too."""
    if "dora_scale" in entry.parts or "magnitude" in entry.parts or entry.kind not in _SCALED:
        return False
    is_whole = entry.kind is AdapterKind.LOKR and entry.rank is None
    return entry.scale == 0.0 or (entry.alpha == 0.0 and not is_whole)


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
