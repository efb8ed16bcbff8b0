"""Build a SigLIP vision encoder from the tensors of its file, in the naming of transformers.

Facts that shapes do not tell, from google/siglip-so400m-patch14-384: 16 heads, and GELU with tanh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import SiglipVisionConfig, SiglipVisionModel

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.vision.build_vision_encoder import VisionPlan
from modelpool.pool.models.components.vision.vision_encoder_names import siglip_names
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import discover

#: a key of SigLIP's pooling, which CLIP lacks
_SIGN = "vision_model.head.probe"
_HEADS = 16


def is_siglip(shapes: Mapping[str, Shape]) -> bool:
    """Return whether a vision encoder with these tensors is SigLIP."""
    return _SIGN in shapes


def plan_siglip(shapes: Mapping[str, Shape], folder_config: Mapping[str, Any] | None = None) -> VisionPlan:
    """Plan the SigLIP vision encoder with tensors of `shapes`. Raises UnknownArchitecture if it is none."""
    try:
        key_map = discover({key: tuple(shape) for key, shape in shapes.items()}, siglip_names)
        named = {key.removeprefix("vision_model."): shape for key, shape in key_map.shapes.items()}
        width, _, patch, _ = named["embeddings.patch_embedding.weight"]
        config = {
            "hidden_size": width,
            "intermediate_size": named["encoder.layers.0.mlp.fc1.weight"][0],
            "num_hidden_layers": len({key.split(".")[2] for key in named if key.startswith("encoder.layers.")}),
            "num_attention_heads": int((folder_config or {}).get("num_attention_heads", _HEADS)),
            "patch_size": patch,
            "image_size": math.isqrt(named["embeddings.position_embedding.weight"][0]) * patch,
        }
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"vision encoder: its tensors are not those of SigLIP: {error!r}") from error
    return VisionPlan(config, key_map, SiglipVisionModel, SiglipVisionConfig)
