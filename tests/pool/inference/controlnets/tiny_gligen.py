"""A tiny GLIGEN model for a UNet, under the published names of its tensors and under diffusers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.inference.controlnets.gligen import Gligen
from modelpool.pool.weights.patcher.blocks.diffusers_names import cross_attentions, unet_blocks

_PUBLISHED = {"input": "input_blocks.{}.1", "middle": "middle_block.1", "output": "output_blocks.{}.1"}


def block_names(unet: nn.Module) -> list[tuple[str, str]]:
    """The published name and diffusers' name of each block with a cross-attention, in execution order."""
    found = []
    names = [name.removesuffix(".attn2") for name, _, _ in cross_attentions(unet)]
    for block in unet_blocks(unet):
        for name in names:
            layer, _, index = name.partition(".transformer_blocks.")
            if layer in block.layers:
                kind, number = block.key
                found.append((f"{_PUBLISHED[kind].format(number)}.transformer_blocks.{index}", name))
    return found


def tiny_gligen(unet: Any, text_width: int, seed: int = 4) -> Gligen:
    """With random weights, and gates that are open."""
    widths = [attention.to_q.in_features for _, _, attention in cross_attentions(unet)]
    torch.manual_seed(seed)
    module = Gligen(text_width, text_width, widths)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".alpha_" in name or ".null_" in name:
                parameter.copy_(torch.randn_like(parameter))
    return module.eval()


def gligen_state(unet: nn.Module, module: Gligen, published: bool = True) -> dict[str, Tensor]:
    """The tensors of a file."""
    names = block_names(unet)
    found = {}
    for name, tensor in module.state_dict().items():
        if name.startswith("fusers."):
            _, number, rest = name.split(".", 2)
            name = f"{names[int(number)][0 if published else 1]}.fuser.{rest}"
        found[name] = tensor.contiguous()
    return found
