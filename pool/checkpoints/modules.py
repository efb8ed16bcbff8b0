"""The modules of diffusers and transformers that components are built as, without weights.

Knows which class and which configuration belong to a component of a family. Everything is made on the meta device: no
memory is taken and nothing is initialised. Does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from pool.checkpoints.infer import Config, clip_text_config, unet_config, vae_config
from pool.checkpoints.safetensors_file import Shape
from pool.spec import Role


def config_of(role: Role, bare_shapes: Mapping[str, Shape]) -> Config:
    """The configuration of an SD1 component with tensors of `bare_shapes` (keys without prefix).

    Raises UnknownArchitecture when they are not those of such a component.
    """
    match role:
        case Role.TEXT_ENCODER:
            return clip_text_config(bare_shapes)
        case Role.DIFFUSION_MODEL:
            return unet_config(bare_shapes)
        case Role.VAE:
            return vae_config(bare_shapes)
        case _:
            raise AssertionError(f"an SD1 checkpoint has no {role.value}")


def empty_module(role: Role, config: Config) -> nn.Module:
    """The module for `config` with every parameter and buffer on the meta device, in evaluation mode."""
    with torch.device("meta"):
        match role:
            case Role.TEXT_ENCODER:
                module = CLIPTextModel(CLIPTextConfig(**config))
            case Role.DIFFUSION_MODEL:
                module = UNet2DConditionModel(**config)
            case Role.VAE:
                module = AutoencoderKL(**config)
            case _:
                raise AssertionError(f"an SD1 checkpoint has no {role.value}")
    return module.eval().requires_grad_(False)  # type: ignore[no-any-return]


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
