"""The modules of diffusers and transformers that components are built as, without weights.

Knows which class and which configuration belong to an architecture. Everything is made on the meta device: no
memory is taken and nothing is initialised. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from pool.checkpoints.families import Architecture
from pool.checkpoints.infer import Config, clip_text_config, open_clip_text_config, unet_config, vae_config
from pool.checkpoints.safetensors_file import Shape

_CONFIGS: Mapping[Architecture, Callable[[Mapping[str, Shape]], Config]] = MappingProxyType(
    {
        Architecture.CLIP_TEXT: clip_text_config,
        Architecture.OPEN_CLIP_TEXT: open_clip_text_config,
        Architecture.LDM_UNET: unet_config,
        Architecture.LDM_VAE: vae_config,
    }
)
_MODULES: Mapping[Architecture, Callable[[Config], nn.Module]] = MappingProxyType(
    {
        Architecture.CLIP_TEXT: lambda config: CLIPTextModel(CLIPTextConfig(**config)),
        Architecture.OPEN_CLIP_TEXT: lambda config: CLIPTextModelWithProjection(CLIPTextConfig(**config)),
        Architecture.LDM_UNET: lambda config: UNet2DConditionModel(**config),
        Architecture.LDM_VAE: lambda config: AutoencoderKL(**config),
    }
)


def config_of(architecture: Architecture, bare_shapes: Mapping[str, Shape]) -> Config:
    """The configuration of a component with tensors of `bare_shapes` (keys without prefix).

    Raises UnknownArchitecture when they are not those of such a component.
    """
    return _CONFIGS[architecture](bare_shapes)


def empty_module(architecture: Architecture, config: Config) -> nn.Module:
    """The module for `config` with every parameter and buffer on the meta device, in evaluation mode."""
    with torch.device("meta"):
        module = _MODULES[architecture](config)
    return module.eval().requires_grad_(False)


def fill_tables(module: nn.Module) -> None:
    """Give the buffers that no file carries their values, which follow from the configuration.

    Asserts that nothing of `module` is left on the meta device.
    """
    for part in module.modules():
        if "position_ids" in part._buffers:
            length = part._buffers["position_ids"].shape[-1]  # type: ignore[union-attr]
            part.register_buffer("position_ids", torch.arange(length).unsqueeze(0), persistent=False)
    left = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    assert not left, f"{type(module).__name__} has values that nothing fills: {left}"
