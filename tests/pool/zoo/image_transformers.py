"""Diffusion transformers for images and audio."""

from __future__ import annotations

import diffusers
import torch
from torch import nn, randn, tensor, zeros

from modelpool.pool.models.components.diffusion.omnigen2_module import OmniGen2Transformer2DModel
from tests.pool.zoo.case import Inputs, Maker

HALFWAY = (0.5, 0.2)
STEPS = (10.0, 500.0)


def _sd3(**more: object) -> tuple[nn.Module, Inputs]:
    module = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        **more,
    )
    inputs = {
        "hidden_states": randn(2, 4, 8, 8),
        "encoder_hidden_states": randn(2, 7, 32),
        "pooled_projections": randn(2, 64),
        "timestep": tensor(STEPS),
    }
    return module, inputs


def sd3() -> tuple[nn.Module, Inputs]:
    return _sd3(num_layers=2)


def sd35() -> tuple[nn.Module, Inputs]:
    return _sd3(num_layers=3, dual_attention_layers=(0,), qk_norm="rms_norm")


def _packed_latent(axes: int) -> Inputs:
    """What the models of the Flux line read: 16 patches of 4 numbers, 7 words, positions of both."""
    return {
        "hidden_states": randn(2, 16, 4),
        "encoder_hidden_states": randn(2, 7, 32),
        "timestep": tensor(HALFWAY),
        "img_ids": randn(16, axes),
        "txt_ids": zeros(7, axes),
    }


def flux() -> tuple[nn.Module, Inputs]:
    module = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return module, _packed_latent(3) | {"pooled_projections": randn(2, 32), "guidance": tensor([3.5, 3.5])}


def chroma() -> tuple[nn.Module, Inputs]:
    module = diffusers.ChromaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return module, _packed_latent(3)


def flux2() -> tuple[nn.Module, Inputs]:
    module = diffusers.Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        timestep_guidance_channels=256,
        axes_dims_rope=(4, 4, 4, 4),
    )
    positions = {"img_ids": zeros(2, 16, 4), "txt_ids": zeros(2, 7, 4)}
    return module, _packed_latent(4) | positions | {"guidance": tensor([3.5, 3.5])}


def qwenimage() -> tuple[nn.Module, Inputs]:
    module = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    inputs = {
        "hidden_states": randn(2, 16, 16),
        "encoder_hidden_states": randn(2, 7, 16),
        "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.long),
        "timestep": tensor(HALFWAY),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
    }
    return module, inputs


def zimage() -> tuple[nn.Module, Inputs]:
    module = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    inputs = {
        "x": [randn(4, 1, 8, 8), randn(4, 1, 8, 8)],
        "t": tensor(HALFWAY),
        "cap_feats": [randn(7, 16), randn(5, 16)],
    }
    return module, inputs


def hunyuandit() -> tuple[nn.Module, Inputs]:
    module = diffusers.HunyuanDiT2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_attention_heads=3,
        attention_head_dim=8,
        hidden_size=24,
        activation_fn="gelu-approximate",
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
        text_len=5,
        text_len_t5=6,
    )
    inputs = {
        "hidden_states": randn(2, 4, 8, 8),
        "timestep": tensor(STEPS),
        "encoder_hidden_states": randn(2, 5, 32),
        "text_embedding_mask": torch.ones(2, 5),
        "encoder_hidden_states_t5": randn(2, 6, 32),
        "text_embedding_mask_t5": torch.ones(2, 6),
        "image_meta_size": tensor([[1024.0, 1024.0, 1024.0, 1024.0, 0.0, 0.0]] * 2),
        "style": zeros(2, dtype=torch.long),
        "image_rotary_emb": (randn(16, 8), randn(16, 8)),
    }
    return module, inputs


def auraflow() -> tuple[nn.Module, Inputs]:
    module = diffusers.AuraFlowTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        num_attention_heads=4,
        attention_head_dim=8,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pos_embed_max_size=256,
    )
    inputs = {
        "hidden_states": randn(2, 4, 32, 32),
        "encoder_hidden_states": randn(2, 7, 32),
        "timestep": tensor([0.1, 0.5]),
    }
    return module, inputs


def lumina2() -> tuple[nn.Module, Inputs]:
    module = diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 128, 128),
        cap_feat_dim=32,
    )
    inputs = {
        "hidden_states": randn(2, 4, 16, 16),
        "timestep": tensor([0.1, 0.5]),
        "encoder_hidden_states": randn(2, 7, 32),
        "encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool),
    }
    return module, inputs


def omnigen2() -> tuple[nn.Module, Inputs]:
    module = OmniGen2Transformer2DModel(
        in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1,
        multiple_of=2, axes_dim_rope=(4, 2, 2), text_feat_dim=32, timestep_scale=1000.0,
    )  # fmt: skip
    inputs = {
        "hidden_states": randn(2, 4, 16, 16),
        "timestep": tensor([0.1, 0.5]),
        "encoder_hidden_states": randn(2, 7, 32),
    }
    return module, inputs


def hidream() -> tuple[nn.Module, Inputs]:
    module = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=4,
        attention_head_dim=8,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    inputs = {
        "hidden_states": randn(2, 4, 32, 32),
        "timesteps": torch.tensor([10, 500]),
        "encoder_hidden_states_t5": randn(2, 8, 32),
        "encoder_hidden_states_llama3": randn(4, 2, 8, 16),
        "pooled_embeds": randn(2, 64),
    }
    return module, inputs


def pixart() -> tuple[nn.Module, Inputs]:
    module = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    )
    inputs = {
        "hidden_states": randn(2, 4, 8, 8),
        "encoder_hidden_states": randn(2, 7, 16),
        "timestep": torch.tensor([10, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return module, inputs


def sana() -> tuple[nn.Module, Inputs]:
    module = diffusers.SanaTransformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
    )
    inputs = {
        "hidden_states": randn(2, 4, 8, 8),
        "encoder_hidden_states": randn(2, 7, 8),
        "timestep": torch.tensor([10, 500]),
    }
    return module, inputs


def stableaudio() -> tuple[nn.Module, Inputs]:
    module = diffusers.StableAudioDiTModel(
        sample_size=4,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        num_key_value_attention_heads=2,
        cross_attention_dim=4,
        cross_attention_input_dim=4,
        time_proj_dim=8,
        global_states_input_dim=8,
    )
    angles = torch.outer(torch.arange(9.0), tensor([1.0, 0.01])).repeat(1, 2)  # one global state and 8 samples
    inputs = {
        "hidden_states": randn(2, 4, 8),
        "timestep": tensor([0.1, 0.5]),
        "encoder_hidden_states": randn(2, 7, 4),
        "global_hidden_states": randn(2, 1, 8),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }
    return module, inputs


IMAGE_TRANSFORMERS: dict[str, Maker] = {
    f.__name__: f
    for f in (
        sd3, sd35, flux, chroma, flux2, qwenimage, zimage, hunyuandit, auraflow, lumina2, omnigen2, hidream, pixart,
        sana, stableaudio,
    )
}  # fmt: skip
