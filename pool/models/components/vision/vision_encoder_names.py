"""Convert the names of CLIP vision encoders in files to transformers' names.

Converters for `pool.weights.keymaps.key_map.discover` rename and split, and drop tensors that are no weights of the
encoder (position tables, the text model of a complete CLIP). Reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from modelpool.pool.models.components.common.open_clip_names import OPEN_CLIP_VISION

#: a key that only the naming of open_clip has, without prefix
OPEN_CLIP_KEY = "conv1.weight"
_LEVEL, _PROJECTION = "vision_model.", "visual_projection.weight"
#: prefixes of the encoder's parts in files without the outer level
_PARTS_ALONE = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")


def convert_vision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `transformers.CLIPVisionModelWithProjection`, or of the model without a projection if
    the file has none, from `tensors` in the naming of open_clip or transformers, without prefix."""
    if OPEN_CLIP_KEY in tensors:
        named = OPEN_CLIP_VISION.convert(tensors)
    else:
        leveled = {_LEVEL + key if key.startswith(_PARTS_ALONE) else key: tensor for key, tensor in tensors.items()}
        named = {key: tensor for key, tensor in leveled.items() if _is_weight(key)}
    if _PROJECTION in named:
        return named
    # the module without a projection has one level less
    return {key.removeprefix(_LEVEL): tensor for key, tensor in named.items()}


def _is_weight(key: str) -> bool:
    return (key.startswith(_LEVEL) or key == _PROJECTION) and not key.endswith(".position_ids")


def siglip_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `transformers.SiglipVisionModel` from `tensors` in its naming, with or without the outer
    level; the text model of a complete SigLIP is left out."""
    leveled = {_LEVEL + key if key.startswith((*_PARTS_ALONE, "head.")) else key: x for key, x in tensors.items()}
    return {key.removeprefix(_LEVEL): x for key, x in leveled.items() if _is_weight(key)}
