"""A vision encoder from the tensors of its file: planned from shapes, built by transformers' class over them.

Knows how key map, configuration and module go together, as `pool.models.text.build` does for text encoders. Nothing
is copied. Does not know where files are, nor how an image is shown to it (`pool.models.vision.preprocess`).

Facts that shapes do not tell: the encoders of the models that are run are CLIP H, which has 16 heads at any width and
GELU itself. Source: config.json of laion/CLIP-ViT-H-14-laion2B-s32B-b79K. A folder says its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.key_map import KeyMap, discover
from modelpool.pool.models.common.diffusers_private import differing_keys
from modelpool.pool.models.vision.names import convert_vision
from modelpool.pool.ops.skip_init import without_initialisation

Config: TypeAlias = dict[str, Any]

HEADS, ACTIVATION = 16, "gelu"
#: what a folder's configuration may say beside sizes
_SAID = ("num_attention_heads", "hidden_act", "layer_norm_eps")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size", "projection_dim")
_PROJECTION = "visual_projection.weight"


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """How the vision encoder in a file is built.

    config   the arguments of its configuration
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    config: Config
    key_map: KeyMap

    def empty(self) -> nn.Module:
        """The module without weights, its table of positions filled.

        Raises UnknownArchitecture when the file's tensors are not those of the class.
        """
        module = _empty(self.config)
        difference = differing_keys(self.key_map, module)
        if difference:
            raise UnknownArchitecture(f"it is no vision encoder of CLIP: {difference}")
        return module


def plan_vision(shapes: Mapping[str, Shape], prefix: str = "", *, said: Mapping[str, Any] | None = None) -> VisionPlan:
    """How the vision encoder among `shapes` whose keys begin with `prefix` is built, from shapes alone.

    `said` is the config.json beside it, where there is one: it tells what shapes do not, and has to fit them. Raises
    UnknownArchitecture when it is none of CLIP's.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    try:
        key_map = discover(own, lambda tensors: convert_vision({k.removeprefix(prefix): x for k, x in tensors.items()}))
        config = measured_vision(key_map.shapes)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"vision encoder: its tensors are not those of CLIP's: {error!r}") from error
    return VisionPlan(_with_said(config, said or {}), key_map)


def measured_vision(named: Mapping[str, Shape]) -> Config:
    """The arguments of transformers' configuration, by shapes under the names of its module."""
    bare = {key.removeprefix("vision_model."): shape for key, shape in named.items()}
    width, _, patch, _ = bare["embeddings.patch_embedding.weight"]
    side = math.isqrt(bare["embeddings.position_embedding.weight"][0] - 1)
    layers = {key.split(".")[2] for key in bare if key.startswith("encoder.layers.")}
    config: Config = {
        "hidden_size": width,
        "intermediate_size": bare["encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": HEADS,
        "patch_size": patch,
        "image_size": side * patch,
        "hidden_act": ACTIVATION,
    }
    if _PROJECTION in bare:
        config["projection_dim"] = bare[_PROJECTION][0]
    return config


def _with_said(config: Config, said: Mapping[str, Any]) -> Config:
    """`config` with what a folder says of it. Raises UnknownArchitecture where that does not fit."""
    for key in _SIZES:
        if key in config and said.get(key) is not None and said[key] != config[key]:
            raise UnknownArchitecture(f"{key}: found {said[key]!r}, expected {config[key]} as its tensors have")
    found = {**config, **{key: said[key] for key in _SAID if said.get(key) is not None}}
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if type(heads) is not int or not 0 < heads <= width or width % heads:
        raise UnknownArchitecture(f"num_attention_heads: found {heads!r}, expected a divisor of its width, {width}")
    return found


def _empty(config: Config) -> nn.Module:
    kind = CLIPVisionModelWithProjection if "projection_dim" in config else CLIPVisionModel
    try:
        with torch.device("meta"), without_initialisation():
            module: nn.Module = kind(CLIPVisionConfig(**config))
    except Exception as error:  # transformers checks values in ways and with errors of its own
        raise UnknownArchitecture(f"vision encoder: no {kind.__name__} can have these sizes: {error}") from error
    return with_places(module)


def with_places(module: nn.Module) -> nn.Module:
    """`module` without weights, its table of positions filled, in evaluation mode."""
    for part in module.modules():
        if "position_ids" in part._buffers:
            places = torch.arange(part._buffers["position_ids"].shape[-1])  # type: ignore[union-attr]
            part.register_buffer("position_ids", places.unsqueeze(0), persistent=False)
    return module.eval().requires_grad_(False)
