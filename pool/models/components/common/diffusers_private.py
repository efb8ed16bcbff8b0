"""The only module that uses undocumented functions of diffusers: its single-file converters.

They rename keys; `pool.weights.keymaps.key_map` traces them. Weights are not touched. `self_test` checks whether
a version of diffusers still converts what the project builds. Converters that are only used for LoRA names are compared
with their modules by the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from diffusers.loaders.single_file_utils import (
    convert_auraflow_transformer_checkpoint_to_diffusers,
    convert_chroma_transformer_checkpoint_to_diffusers,
    convert_controlnet_checkpoint,
    convert_cosmos_transformer_checkpoint_to_diffusers,
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_hidream_transformer_to_diffusers,
    convert_hunyuan_video_transformer_to_diffusers,
    convert_ldm_unet_checkpoint,
    convert_ltx_transformer_checkpoint_to_diffusers,
    convert_lumina2_to_diffusers,
    convert_mochi_transformer_checkpoint_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from torch import Tensor

from modelpool.pool.families.definitions import defined_unets
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.parts.lora_naming import UNET
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.infer_config import Config
from modelpool.pool.models.components.common.module_classes import config_of, empty_module
from modelpool.pool.models.components.common.open_clip_names import OPEN_CLIP_TEXT
from modelpool.pool.values.core.errors import counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

Tensors: TypeAlias = Mapping[str, Tensor]
Converter: TypeAlias = Callable[[dict[str, Tensor]], Tensors]


#: diffusers' converter for the diffusion model of each family except UNets, and the key prefix that it expects
_TRANSFORMERS: Mapping[str, tuple[Callable[[dict[str, Tensor]], Mapping[str, Tensor | None]], str]] = {
    "auraflow": (convert_auraflow_transformer_checkpoint_to_diffusers, ""),
    "chroma": (convert_chroma_transformer_checkpoint_to_diffusers, ""),
    "cosmos": (lambda tensors: convert_cosmos_transformer_checkpoint_to_diffusers(_Kept(tensors)), "net."),
    "flux": (convert_flux_transformer_checkpoint_to_diffusers, ""),
    "flux2": (convert_flux2_transformer_checkpoint_to_diffusers, ""),
    "hidream": (convert_hidream_transformer_to_diffusers, ""),
    "hunyuan_video": (convert_hunyuan_video_transformer_to_diffusers, ""),
    "ltxv": (convert_ltx_transformer_checkpoint_to_diffusers, ""),
    "lumina2": (convert_lumina2_to_diffusers, ""),
    "mochi": (convert_mochi_transformer_checkpoint_to_diffusers, ""),
    "sd3": (convert_sd3_transformer_checkpoint_to_diffusers, ""),
    "wan": (convert_wan_transformer_to_diffusers, ""),
    "z_image": (convert_z_image_transformer_checkpoint_to_diffusers, ""),
}
#: UNets of latent diffusion that read texts, by the names that LoRAs know
_UNETS = frozenset(unet.lora_family for unet in defined_unets() if unet.lora is UNET)
_UNET_PREFIX = "model.diffusion_model."
#: projection of open_clip, which is the transpose of the one of transformers
_TURNED_PROJECTION = "text_projection"


class ConverterChangedError(RuntimeError):
    """The installed diffusers no longer converts a layout to the keys of its own module."""


def converter(architecture: Architecture, config: Config, prefix: str) -> Converter:
    """Return the function that renames a component's tensors to the parameters of the module built with `config`; their
    keys in the checkpoint begin with `prefix`."""
    match architecture:
        case Architecture.LDM_UNET:
            return lambda tensors: _dropping_none(
                convert_ldm_unet_checkpoint(_moved(tensors, prefix, _UNET_PREFIX), config)
            )
        case Architecture.CLIP_TEXT:
            # transformers dropped the text_model level; the module computes its position table
            return lambda tensors: {k.removeprefix("text_model."): v for k, v in _moved(tensors, prefix, "").items()}
        case Architecture.CLIP_TEXT_PROJECTED:
            return lambda tensors: _projected_text(_moved(tensors, prefix, ""))
        case Architecture.DIFFUSERS_UNET:
            return lambda tensors: _moved(tensors, prefix, "")
        case Architecture.OPEN_CLIP_TEXT:
            return lambda tensors: OPEN_CLIP_TEXT.convert(_moved(tensors, prefix, ""))
        case Architecture.OPEN_CLIP_TEXT_ALONE:
            return lambda tensors: {
                k.removeprefix("text_model."): v for k, v in OPEN_CLIP_TEXT.convert(_moved(tensors, prefix, "")).items()
            }
        case (
            Architecture.VAE
            | Architecture.DIFFUSION_TRANSFORMER
            | Architecture.AUDIO_TRANSFORMER
            | Architecture.TEXT_MODEL
            | Architecture.TEXT_CONNECTOR
            | Architecture.VISION_MODEL
            | Architecture.TEXT_VISION
        ):
            raise AssertionError(f"{architecture.name} is planned by its own package")


def diffusion_converter(family: str, bare_shapes: Mapping[str, Shape]) -> Converter | None:
    """Return diffusers' converter for the diffusion model of `family`, for keys without prefix; None if it has none.

    Some converters only support the published sizes. They raise KeyError naming a missing tensor.
    """
    if family in _UNETS:
        config = _unet_conversion_config(bare_shapes)
        return lambda tensors: _dropping_none(convert_ldm_unet_checkpoint(_prefixed(tensors, _UNET_PREFIX), config))
    if family not in _TRANSFORMERS:
        return None
    convert, prefix = _TRANSFORMERS[family]
    return lambda tensors: _dropping_none(convert(_prefixed(tensors, prefix)))


def controlnet_converter(bare_shapes: Mapping[str, Shape]) -> Converter:
    """Return diffusers' converter for a ControlNet with tensors of `bare_shapes` (keys without prefix), in either
    layout, extended by SDXL's micro-conditioning weights, which diffusers drops."""
    config = _unet_conversion_config(bare_shapes)
    micro_conditioning = {
        key: key.replace("label_emb.0.0.", "add_embedding.linear_1.") for key in bare_shapes if "label_emb." in key
    }
    micro_conditioning = {
        key: name.replace("label_emb.0.2.", "add_embedding.linear_2.") for key, name in micro_conditioning.items()
    }

    def convert(tensors: dict[str, Tensor]) -> Tensors:
        converted = _dropping_none(convert_controlnet_checkpoint(dict(tensors), config))
        return {**converted, **{name: tensors[key] for key, name in micro_conditioning.items()}}

    return convert


class _Kept(dict[str, Tensor]):
    """Tensors that survive `pop`: the converter of Cosmos looks for a key after it has taken all."""

    def pop(self, key: str, *default: Any) -> Any:
        return self[key] if key in self or not default else default[0]


def _unet_conversion_config(bare_shapes: Mapping[str, Shape]) -> Config:
    """Return the configuration that the UNet converter reads: blocks per level, and the kind of label embedding."""
    blocks = {int(key.split(".")[1]) for key in bare_shapes if key.startswith("input_blocks.")}
    ends_of_levels = [block for block in blocks if f"input_blocks.{block}.0.op.weight" in bare_shapes]
    config: Config = {"layers_per_block": min(ends_of_levels, default=len(blocks)) - 1, "num_class_embeds": 0}
    if "label_emb.0.0.weight" in bare_shapes:
        config["addition_embed_type"] = "text_time"
    return config


def _moved(tensors: Mapping[str, Tensor], prefix: str, to: str) -> dict[str, Tensor]:
    """Return `tensors` with the key prefix `prefix` replaced by `to`."""
    return {to + key.removeprefix(prefix): value for key, value in tensors.items()}


def _projected_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a text model with a projection, which some files have in the form of open_clip."""
    turned = next((key for key in (_TURNED_PROJECTION, f"text_model.{_TURNED_PROJECTION}") if key in tensors), None)
    named = {_with_text_level(key): value for key, value in tensors.items() if key != turned}
    return named if turned is None else {**named, f"{_TURNED_PROJECTION}.weight": tensors[turned].T}


def _with_text_level(key: str) -> str:
    """Return transformers' name for a tensor of a text model with a projection; some files lack the level."""
    return key if key.startswith(("text_model.", "text_projection.")) else f"text_model.{key}"


def _prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in tensors.items()}


def self_test(family: LocatedFamily, shapes: Mapping[str, Shape]) -> None:
    """Check that the converters still match the modules, for a checkpoint of `family` with `shapes`; VAEs have their
    own test (`pool.models.components.vae.vae_classes`).

    Raises ConverterChangedError naming differing keys or shapes.
    """
    for role in family.prefixes:
        architecture = family.architectures[role]
        if architecture is Architecture.VAE:
            continue
        config = config_of(architecture, family.bare_shapes_of(role, shapes))
        convert = converter(architecture, config, family.prefixes[role])
        key_map = discover(family.shapes_of(role, shapes), convert)
        difference = differing_keys(key_map, empty_module(architecture, config))
        if difference:
            raise ConverterChangedError(f"{role.value}: diffusers' module and converter disagree: {difference}")


def differing_keys(key_map: KeyMap, module: torch.nn.Module) -> str:
    """Return how `module` and `key_map` differ, in words; empty if keys and shapes are equal."""
    return differing_state(key_map, module.state_dict())


def differing_state(key_map: KeyMap, state: Tensors) -> str:
    """Return how the `state` of a module and `key_map` differ, in words; empty if keys and shapes are equal."""
    actual = {key: tuple(value.shape) for key, value in state.items()}
    mapped = key_map.shapes
    if actual == mapped:
        return ""
    parts = []
    if missing := sorted(actual.keys() - mapped.keys()):
        parts.append(f"{counted(len(missing), 'parameter has', 'parameters have')} no source, such as {missing[0]}")
    if surplus := sorted(mapped.keys() - actual.keys()):
        parts.append(f"{counted(len(surplus), 'tensor has', 'tensors have')} no parameter, such as {surplus[0]}")
    for key in sorted(actual.keys() & mapped.keys()):
        if actual[key] != mapped[key]:
            parts.append(f"{key} has shape {mapped[key]} in the file and {actual[key]} in the module")
            break
    return "; ".join(parts)


def _dropping_none(tensors: Mapping[str, Tensor | None]) -> Tensors:
    """Return `tensors` without the None values of keys that a converter did not find."""
    return {key: value for key, value in tensors.items() if value is not None}
