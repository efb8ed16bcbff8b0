"""Names of whole checkpoints in GGUF files, as stable-diffusion.cpp converts them, mapped to those of published files.
Torch-free and pure.

Diffusion models (`model.diffusion_model.`), VAEs (`first_stage_model.`) and the encoders of transformers
(`text_encoders.NAME.transformer.`) keep their names. The converter writes the CLIP encoders of UNet models in the
naming of transformers below `cond_stage_model.`, whichever place their published files have. ggml does not store
leading dimensions of size 1.
Source: the names that stable-diffusion.cpp documents for its GGUF files; the GGUF specification for dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.files.formats.safetensors_file import TensorEntry

#: where the converter puts the first and the second CLIP of a UNet model
_FIRST, _SECOND = "cond_stage_model.transformer.", "cond_stage_model.1.transformer."
#: where files of SDXL have them, and those of SD2 the only one
_SDXL_FIRST, _SDXL_SECOND, _SD2 = (
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.1.model.",
    "cond_stage_model.model.",
)
#: linear in SD2, a convolution in SD1
_PROJECTION_IN = "model.diffusion_model.input_blocks.1.1.proj_in.weight"
_MODEL = "model.diffusion_model."
#: weights of diffusion models whose first of three dimensions is 1: position tables, modulations of Wan
_THREE_DIMENSIONS = ("pos_embed", "positional_encoding", ".modulation")


def published_entries(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the `tensors` of a file under the names and with the dimensions of published files; those of other files
    than whole checkpoints are returned as they are."""
    beginnings = _beginnings(tensors)
    found: dict[str, TensorEntry] = {}
    for key, entry in tensors.items():
        name = next((new + key.removeprefix(old) for old, new in beginnings.items() if key.startswith(old)), key)
        is_flat = len(entry.shape) == 2 and key.startswith(_MODEL) and key.endswith(_THREE_DIMENSIONS)
        found[name] = replace(entry, name=name, shape=(1, *entry.shape) if is_flat else entry.shape)
    return found


def _beginnings(tensors: Mapping[str, TensorEntry]) -> Mapping[str, str]:
    """Return the beginnings of names to replace, with their replacements."""
    if any(key.startswith(_SECOND) for key in tensors):
        return {_FIRST: _SDXL_FIRST, _SECOND: _SDXL_SECOND}
    entry = tensors.get(_PROJECTION_IN)
    return {_FIRST: _SD2} if entry is not None and len(entry.shape) == 2 else {}
