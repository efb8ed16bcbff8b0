"""The diffusers and transformers modules of components, without weights.

Knows class and configuration of each architecture. Everything is created on the meta device, uninitialised and without
memory. Does not know files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.infer_config import (
    Config,
    clip_text_config,
    open_clip_text_alone_config,
    open_clip_text_config,
    projected_clip_text_config,
    unet_config,
)
from modelpool.pool.values.core.errors import UnknownArchitecture, UserError
from modelpool.pool.weights.ops.skip_init import uninitialised_on_meta

_CONFIGS: Mapping[Architecture, Callable[[Mapping[str, Shape]], Config]] = MappingProxyType(
    {
        Architecture.CLIP_TEXT: clip_text_config,
        Architecture.CLIP_TEXT_PROJECTED: projected_clip_text_config,
        Architecture.OPEN_CLIP_TEXT: open_clip_text_config,
        Architecture.OPEN_CLIP_TEXT_ALONE: open_clip_text_alone_config,
        Architecture.LDM_UNET: unet_config,
    }
)
_MODULES: Mapping[Architecture, Callable[[Config], nn.Module]] = MappingProxyType(
    {
        Architecture.CLIP_TEXT: lambda config: CLIPTextModel(CLIPTextConfig(**config)),
        Architecture.CLIP_TEXT_PROJECTED: lambda config: CLIPTextModelWithProjection(CLIPTextConfig(**config)),
        Architecture.OPEN_CLIP_TEXT: lambda config: CLIPTextModelWithProjection(CLIPTextConfig(**config)),
        Architecture.OPEN_CLIP_TEXT_ALONE: lambda config: CLIPTextModel(CLIPTextConfig(**config)),
        Architecture.DIFFUSERS_UNET: lambda config: UNet2DConditionModel(**config),
        Architecture.LDM_UNET: lambda config: UNet2DConditionModel(**config),
    }
)


def config_of(architecture: Architecture, bare_shapes: Mapping[str, Shape]) -> Config:
    """Return the configuration of a component with tensors of `bare_shapes` (keys without prefix).

    Raises UnknownArchitecture if they do not match.
    """
    return _CONFIGS[architecture](bare_shapes)


def empty_module(architecture: Architecture, config: Config) -> nn.Module:
    """Return the module for `config` with every parameter and buffer on the meta device, in evaluation mode."""
    with uninitialised_on_meta():
        module = _MODULES[architecture](config)
    return module.eval().requires_grad_(False)


def module_from_config(architecture: Architecture, config: Config) -> nn.Module:
    """Return `empty_module` for an external configuration: unknown keys are dropped.

    Raises UnknownArchitecture if the class rejects it.
    """
    if architecture is Architecture.DIFFUSERS_UNET:
        taken = inspect.signature(UNet2DConditionModel.__init__).parameters
        config = {key: value for key, value in config.items() if key in taken}
    with configuration_errors():
        return empty_module(architecture, config)


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Convert errors of building a class from an external configuration to UnknownArchitecture."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # both libraries validate with various exception types
        raise UnknownArchitecture(f"its configuration cannot be built: {error}") from error


def fill_tables(module: nn.Module) -> None:
    """Give values to the buffers that no file carries, from the configuration."""
    for part in module.modules():
        if "position_ids" in part._buffers:
            length = part._buffers["position_ids"].shape[-1]  # type: ignore[union-attr]
            part.register_buffer("position_ids", torch.arange(length).unsqueeze(0), persistent=False)
