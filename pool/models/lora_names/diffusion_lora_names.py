"""Names that LoRA files use for the weights of a diffusion model.

Combines the naming of a family (`naming`) with a key map, which has both names of every weight: the checkpoint's and
diffusers'. Does not read tensors and does not compute (`pool.weights.patches`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelpool.pool.families.parts.lora_naming import BaseNames, NameSource, Ranges
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.lora_names.naming import generate_names, naming_of

if TYPE_CHECKING:
    from modelpool.pool.weights.keymaps.key_map import KeyMap

WEIGHT_END = ".weight"
#: norms with a weight that is named scale in some families' files; a LoRA may name them like any other weight
SCALE_ENDS = (".query_norm.scale", ".key_norm.scale")


def model_names(family: str, shapes: Mapping[str, Shape], prefix: str = "") -> dict[str, Ranges]:
    """Return every base name that a LoRA may use for a weight of a diffusion model, and the checkpoint rows that it
    means.

    `shapes` are from the checkpoint's tensors, with keys that begin with `prefix`; others are ignored. A delta for a
    name has the shape `ranges[0].source_shape`; `RowRange.place` cuts it up; two ranges with swapped halves express the
    swap of scale and shift. `family` is a name of `naming.NAMINGS`; any other has the generic names. Raises
    UnknownArchitecture if the tensors are too different from the tensors of `family` to convert.
    """
    from modelpool.pool.models.lora_names.discovered import (
        layout_map,  # importing diffusers is slow, and `style_of` does not need it
    )

    return names_of(family, layout_map(family, shapes, prefix), prefix)


def names_of(family: str, key_map: KeyMap, prefix: str) -> dict[str, Ranges]:
    """Return the same as `model_names`, from a key map from the checkpoint to diffusers' names."""
    names: dict[str, Ranges] = {}
    for name, ranges in generate_names(naming_of(family), base_names_of(key_map, prefix)):
        names.setdefault(name, ranges)
    return names


def base_names_of(key_map: KeyMap, prefix: str) -> BaseNames:
    """Return the base names of all weights from each source, and the checkpoint rows that they mean."""
    weights: dict[str, Ranges] = {}
    others: dict[str, Ranges] = {}
    for key in key_map.sources:
        bare, ranges = key.removeprefix(prefix), key_map.full_source(key)
        if bare.endswith(WEIGHT_END):
            weights[bare.removesuffix(WEIGHT_END)] = ranges
            for end in SCALE_ENDS:
                if bare.endswith(end.removesuffix(".scale") + WEIGHT_END):
                    others[bare.removesuffix(WEIGHT_END) + ".scale"] = ranges
        else:
            others[bare] = ranges
            if bare.endswith(SCALE_ENDS):
                weights[bare.removesuffix(".scale")] = ranges
    diffusers = {
        key.removesuffix(WEIGHT_END): key_map.source_ranges(key) for key in key_map.origins if key.endswith(WEIGHT_END)
    }
    for key in key_map.origins:
        if not key.endswith(WEIGHT_END):
            others.setdefault(key, key_map.source_ranges(key))
    return {NameSource.CHECKPOINT: weights, NameSource.WHOLE_KEY: others, NameSource.DIFFUSERS: diffusers}


def through(names: Mapping[str, Ranges], key_map: KeyMap) -> dict[str, Ranges]:
    """Return `names` with the rows of the module's parameters that `key_map` maps their checkpoint rows to.

    Names with rows that become no parameter are left out.
    """
    known: dict[Ranges, Ranges] = {}
    followed: dict[str, Ranges] = {}
    for name, ranges in names.items():
        if ranges not in known:
            known[ranges] = key_map.compose(ranges)
        if known[ranges]:
            followed[name] = known[ranges]
    return followed
