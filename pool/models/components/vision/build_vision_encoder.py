"""Build a CLIP vision encoder from the tensors of its file: plan from shapes, fill transformers' class.

Joins key map, configuration and module, like `pool.models.components.text.build_text_encoder`. Copies nothing. Does not
know where files are, nor how images are preprocessed (`pool.models.components.vision.preprocess`).

Facts that shapes do not tell: the encoders of supported models are CLIP H, with 16 heads at any width and exact GELU,
and CLIP L of OpenAI, with an approximation of it. Source: config.json of laion/CLIP-ViT-H-14-laion2B-s32B-b79K and
openai/clip-vit-large-patch14. A folder's configuration overrides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.vision.vision_encoder_names import convert_vision
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover
from modelpool.pool.weights.ops.skip_init import uninitialised_on_meta

Config: TypeAlias = dict[str, Any]

HEADS, ACTIVATION, OPENAI_ACTIVATION = 16, "gelu", "quick_gelu"
#: width and patch size of OpenAI's CLIP L
_OPENAI_L = (1024, 14)
#: fields that a folder's configuration may set in addition to sizes
_CONFIG_ONLY = ("num_attention_heads", "hidden_act", "layer_norm_eps")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size", "projection_dim")
_PROJECTION = "visual_projection.weight"


@dataclass(frozen=True, slots=True)
class VisionPlan(ModulePlan):
    """The plan for building the vision encoder in a file.

    config   the arguments of its configuration
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    kind, config_kind  classes of transformers, if it is no CLIP
    """

    config: Config
    key_map: KeyMap
    kind: type[Any] | None = None
    config_kind: type[Any] = CLIPVisionConfig

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        module = _empty(self.config, self.kind, self.config_kind)
        return module, fitted(self.key_map, module, f"it is not a {type(module).__name__}:")


def plan_vision(
    shapes: Mapping[str, Shape], prefix: str = "", *, folder_config: Mapping[str, Any] | None = None
) -> VisionPlan:
    """Plan the vision encoder among `shapes` with key prefix `prefix`, from shapes alone.

    `folder_config` is its config.json, if one exists: it supplies what shapes do not tell, and must match them. Raises
    UnknownArchitecture if it is not a CLIP vision encoder.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    try:
        key_map = discover(own, lambda tensors: convert_vision({k.removeprefix(prefix): x for k, x in tensors.items()}))
        config = measured_vision(key_map.shapes)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"vision encoder: its tensors are not those of CLIP: {error!r}") from error
    return VisionPlan(_with_folder_config(config, folder_config or {}), key_map)


def measured_vision(named: Mapping[str, Shape]) -> Config:
    """Return the arguments of transformers' configuration, from shapes under the names of its module."""
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
        "hidden_act": OPENAI_ACTIVATION if (width, patch) == _OPENAI_L else ACTIVATION,
    }
    if _PROJECTION in bare:
        config["projection_dim"] = bare[_PROJECTION][0]
    return config


def _with_folder_config(config: Config, folder_config: Mapping[str, Any]) -> Config:
    """Return `config` updated with a folder's configuration. Raises UnknownArchitecture if they contradict."""
    for key in _SIZES:
        if key in config and folder_config.get(key) is not None and folder_config[key] != config[key]:
            raise UnknownArchitecture(
                f"{key}: found {folder_config[key]!r}, expected {config[key]} as its tensors have"
            )
    found = {**config, **{key: folder_config[key] for key in _CONFIG_ONLY if folder_config.get(key) is not None}}
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if type(heads) is not int or not 0 < heads <= width or width % heads:
        raise UnknownArchitecture(f"num_attention_heads: found {heads!r}, expected a divisor of its width, {width}")
    return found


def _empty(config: Config, kind: type[Any] | None, config_kind: type[Any]) -> nn.Module:
    if kind is None:
        kind = CLIPVisionModelWithProjection if "projection_dim" in config else CLIPVisionModel
    with without_weights(kind.__name__):
        module: nn.Module = kind(config_kind(**config))
    return with_places(module)


@contextmanager
def without_weights(title: str) -> Iterator[None]:
    """Modules of transformers that the block builds have no weights. Raises UnknownArchitecture, with the `title` of
    the class, for sizes that it cannot have."""
    try:
        with uninitialised_on_meta():
            yield
    except Exception as error:  # transformers validates with various exception types
        raise UnknownArchitecture(f"vision encoder: {title} cannot have these sizes: {error}") from error


def with_places(module: nn.Module) -> nn.Module:
    """Fill the position table of `module` and return it, in evaluation mode."""
    for part in module.modules():
        if "position_ids" in part._buffers:
            places = torch.arange(part._buffers["position_ids"].shape[-1])  # type: ignore[union-attr]
            part.register_buffer("position_ids", places.unsqueeze(0), persistent=False)
    return module.eval().requires_grad_(False)
