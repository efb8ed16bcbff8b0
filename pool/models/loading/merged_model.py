"""Patches that put the weights of another model into a model: merges of models of one family.

Weights stay views of the mapped files: a merge is computed with the patches of a weight when it is placed, cached and
counted as these are, and no merged model is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from modelpool.pool.values.core.errors import AdapterMismatch, PatchFailed, counted
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.adapter_entries import UnmatchedEntry
from modelpool.pool.weights.patches.full_weights import PatchedWeight
from modelpool.pool.weights.patches.lora_file import LoraMatch
from modelpool.pool.weights.patches.patch_set import WeightPatch

#: tensors of a text encoder that are no weights: numbers of positions, and the scale of a comparison that nobody makes
_NOT_MERGED = ("position_ids", "logit_scale")


def match_model(merge: LoraRef, own: ModelRef, own_parts: Iterable[Any], other_parts: Iterable[Any]) -> LoraMatch:
    """Return patches with the weights of another model, of strength 1, by role. `own_parts` and `other_parts` are
    components of both. Weights of another shape, and those that one of them lacks, are unmatched.

    Raises AdapterMismatch unless at least half of the weights match.
    """
    others = {part.role: part.built.module for part in other_parts}
    patches: dict[Role, tuple[WeightPatch, ...]] = {}
    unmatched: list[UnmatchedEntry] = []
    total = 0
    for part in own_parts:
        if part.role not in others:
            continue
        found, missing = _patches(merge, part.built.module, others[part.role])
        patches[part.role] = found
        unmatched += missing
        total += len(found) + len(missing)
    matched = total - len(unmatched)
    if 2 * matched < total or not matched:
        first = f"; the first that does not: {unmatched[0]}" if unmatched else ""
        found_count = f"{matched} of {counted(total, 'weight')} match{first}"
        raise AdapterMismatch(
            f"model {merge.name!r} cannot be merged with model {own.name!r}: {found_count}; expected a model of the "
            "same architecture"
        )
    return LoraMatch(patches, matched, total, tuple(unmatched))


def _patches(
    merge: LoraRef, own: nn.Module, other: nn.Module
) -> tuple[tuple[WeightPatch, ...], Sequence[UnmatchedEntry]]:
    weights = dict(other.named_parameters())
    found: list[WeightPatch] = []
    unmatched: list[UnmatchedEntry] = []
    for name, weight in own.named_parameters():
        if name.endswith(_NOT_MERGED):
            continue
        tensor = weights.get(name)
        if tensor is None:
            unmatched.append(UnmatchedEntry(name, "the other model has no weight of this name"))
            continue
        if isinstance(tensor, PackedWeight) or isinstance(tensor.data, PackedWeight):
            raise PatchFailed(
                f"model {merge.name!r}: found quantized weights, expected plain ones, which can be merged"
            )
        if tensor.shape != weight.shape:
            shapes = f"it has the shape {tuple(tensor.shape)}, expected {tuple(weight.shape)}"
            unmatched.append(UnmatchedEntry(name, shapes))
            continue
        found.append(WeightPatch(name, f"{merge.sha256}:{name}", PatchedWeight(tensor.data)))
    return tuple(found), unmatched


def merged_strengths(merge: str, strength: float) -> tuple[float, float]:
    """Return the factors of the other model's weights, and of the weights themselves, for a strength."""
    match merge:
        case "mix":
            return strength, 1.0 - strength
        case "subtract":
            return -strength, strength
    return strength, 1.0
