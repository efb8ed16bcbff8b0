"""Diffusion transformers for video."""

from __future__ import annotations

import diffusers
import torch
from torch import nn, randn, tensor

from tests.pool.zoo.case import Inputs, Maker


def hunyuanvideo() -> tuple[nn.Module, Inputs]:
    module = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        attention_head_dim=10,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    inputs = {
        "hidden_states": randn(1, 4, 1, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, 6, 16),
        "encoder_attention_mask": torch.ones(1, 6),
        "pooled_projections": randn(1, 8),
        "guidance": tensor([6.0]),
    }
    return module, inputs


def cosmos() -> tuple[nn.Module, Inputs]:
    module = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=(1, 2, 2),
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False,  # its resize needs torchvision
        extra_pos_embed_type="learnable",
    )
    inputs = {
        "hidden_states": randn(1, 4, 1, 16, 16),
        "timestep": tensor([500.0]),
        "encoder_hidden_states": randn(1, 7, 32),
        "attention_mask": torch.ones(1, 7),
        "fps": 30,
    }
    return module, inputs


def mochi() -> tuple[nn.Module, Inputs]:
    module = diffusers.MochiTransformer3DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        pooled_projection_dim=16,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    inputs = {
        "hidden_states": randn(2, 4, 2, 16, 16),
        "encoder_hidden_states": randn(2, 16, 16),
        "timestep": torch.tensor([10, 500]),
        "encoder_attention_mask": torch.ones(2, 16, dtype=torch.bool),
    }
    return module, inputs


def ltxv() -> tuple[nn.Module, Inputs]:
    module = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
    )
    frames, height, width = 2, 4, 4
    inputs = {
        "hidden_states": randn(2, frames * height * width, 8),
        "encoder_hidden_states": randn(2, 7, 16),
        "timestep": torch.tensor([10, 500]),
        "encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool),
        "num_frames": frames,
        "height": height,
        "width": width,
    }
    return module, inputs


def _wan(**more: object) -> tuple[nn.Module, Inputs]:
    module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        cross_attn_norm=True,
        rope_max_seq_len=32,
        **more,
    )
    inputs = {
        "hidden_states": randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, 12, 16),
    }
    return module, inputs


def wan() -> tuple[nn.Module, Inputs]:
    return _wan()


def wan_i2v() -> tuple[nn.Module, Inputs]:
    module, inputs = _wan(image_dim=8, added_kv_proj_dim=24)
    return module, inputs | {"encoder_hidden_states_image": randn(1, 6, 8)}


def cogvideox() -> tuple[nn.Module, Inputs]:
    module = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=6,
    )
    inputs = {
        "hidden_states": randn(1, 2, 4, 8, 8),
        "encoder_hidden_states": randn(1, 6, 16),
        "timestep": torch.tensor([500]),
    }
    return module, inputs


VIDEO_TRANSFORMERS: dict[str, Maker] = {
    f.__name__: f for f in (hunyuanvideo, cosmos, mochi, ltxv, wan, wan_i2v, cogvideox)
}
