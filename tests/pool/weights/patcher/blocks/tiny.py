"""Tiny models with random weights, no gate of which is zero, and inputs for them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.casting_classes import swap_to_casting

Inputs = dict[str, Any]


def _ready(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    module.eval().requires_grad_(False)
    swap_to_casting(module)
    return module


def _randn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unet_sd1() -> tuple[nn.Module, Inputs]:
    """Two levels, one residual layer a level, attention in the first: the shape of SD1, small."""
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )
    inputs = {
        "sample": _randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": _randn(2, 7, 32, seed=6),
    }
    return _ready(module, 1), inputs


def unet_sdxl() -> tuple[nn.Module, Inputs]:
    """Two residual layers a level, two transformer blocks in the second, a pooled text: the shape of SDXL, small."""
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(4, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    inputs = {
        "sample": _randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": _randn(2, 7, 32, seed=6),
        "added_cond_kwargs": {"text_embeds": _randn(2, 32, seed=7), "time_ids": _randn(2, 6, seed=8)},
    }
    return _ready(module, 2), inputs


def flux() -> tuple[nn.Module, Inputs]:
    """Two double blocks, two single blocks."""
    module = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    inputs = {
        "hidden_states": _randn(2, 16, 4),
        "encoder_hidden_states": _randn(2, 7, 32, seed=6),
        "pooled_projections": _randn(2, 32, seed=7),
        "timestep": torch.tensor([0.5, 0.2]),
        "img_ids": torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1),
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }
    return _ready(module, 3), inputs


def sd3() -> tuple[nn.Module, Inputs]:
    """Three joint blocks, the last of which drops the text."""
    module = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    inputs = {
        "hidden_states": _randn(2, 4, 8, 8),
        "encoder_hidden_states": _randn(2, 7, 32, seed=6),
        "pooled_projections": _randn(2, 64, seed=7),
        "timestep": torch.tensor([10.0, 500.0]),
    }
    return _ready(module, 4), inputs


def wan() -> tuple[nn.Module, Inputs]:
    """Two blocks with attention to the text: a transformer with blocks that return one tensor."""
    module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": _randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": _randn(1, 7, 16, seed=6),
    }
    return _ready(module, 5), inputs


def run(module: nn.Module, inputs: Inputs) -> Tensor:
    """The model's result."""
    with torch.no_grad():
        out: Tensor = module(**inputs, return_dict=False)[0]
    return out


def overlaid(module: nn.Module) -> list[str]:
    """Names of the sub-modules with something on them that is not their own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [n for n, m in module.named_modules() if "forward" in m.__dict__ or any(m.__dict__[h] for h in hooks)]
