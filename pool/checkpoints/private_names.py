"""The one place that uses undocumented functions of diffusers: its converters of single files.

They rename keys; `pool.checkpoints.key_map` watches them do it. Does not touch weights. diffusers is pinned to a minor
version in pyproject.toml; `self_test` tells whether another one still converts as this project needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
)
from torch import Tensor

from pool.checkpoints.families import Family
from pool.checkpoints.infer import Config
from pool.checkpoints.key_map import KeyMap, discover
from pool.checkpoints.modules import config_of, empty_module
from pool.checkpoints.safetensors_file import Shape
from pool.spec import Role

Tensors: TypeAlias = Mapping[str, Tensor]
Converter: TypeAlias = Callable[[dict[str, Tensor]], Tensors]


class ConverterChangedError(RuntimeError):
    """The installed diffusers no longer converts a layout to the keys of its own module."""


def converter(role: Role, config: Config) -> Converter:
    """The function that renames an SD1 checkpoint's tensors to the parameters of the module built with `config`."""
    match role:
        case Role.DIFFUSION_MODEL:
            return lambda tensors: _dropping_none(convert_ldm_unet_checkpoint(tensors, config))
        case Role.VAE:
            return lambda tensors: _dropping_none(convert_ldm_vae_checkpoint(tensors, config))
        case Role.TEXT_ENCODER:
            return _convert_clip


def self_test(family: Family, shapes: Mapping[str, Shape]) -> None:
    """Check that the converters still give what the modules have, for a checkpoint of `family` with `shapes`.

    Raises ConverterChangedError saying which keys or shapes differ.
    """
    for role in family.prefixes:
        config = config_of(role, family.bare_shapes_of(role, shapes))
        key_map = discover(family.shapes_of(role, shapes), converter(role, config))
        difference = differing_keys(key_map, empty_module(role, config))
        if difference:
            raise ConverterChangedError(f"{role.value}: diffusers converts otherwise than it builds: {difference}")


def differing_keys(key_map: KeyMap, module: torch.nn.Module) -> str:
    """What `module` and `key_map` disagree on, in words; empty when keys and shapes are equal."""
    actual = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    mapped = key_map.shapes
    parts = []
    if missing := sorted(actual.keys() - mapped.keys()):
        parts.append(f"{len(missing)} parameters have no source, such as {missing[0]}")
    if surplus := sorted(mapped.keys() - actual.keys()):
        parts.append(f"{len(surplus)} tensors have no parameter, such as {surplus[0]}")
    for key in sorted(actual.keys() & mapped.keys()):
        if actual[key] != mapped[key]:
            parts.append(f"{key} has shape {mapped[key]} in the file and {actual[key]} in the module")
            break
    return "; ".join(parts)


def _convert_clip(tensors: dict[str, Tensor]) -> Tensors:
    converted = _dropping_none(convert_ldm_clip_checkpoint(tensors))
    # transformers has no text_model level any more; its positions are a table that the module makes itself
    return {key.removeprefix("text_model."): value for key, value in converted.items()}


def _dropping_none(tensors: Mapping[str, Tensor | None]) -> Tensors:
    """`tensors` without those that a converter looked up and did not find."""
    return {key: value for key, value in tensors.items() if value is not None}
