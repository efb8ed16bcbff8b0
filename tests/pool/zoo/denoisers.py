"""Denoisers that are no plain transformers: the UNets of Stable Diffusion, Stable Cascade, a ControlNet."""

from __future__ import annotations

import diffusers
import torch
from torch import nn, randn

from tests.pool.zoo.case import Inputs, Maker

STEPS = (10, 500)


def _latent_and_text(text_width: int) -> Inputs:
    return {
        "sample": randn(2, 4, 8, 8),
        "timestep": torch.tensor(STEPS),
        "encoder_hidden_states": randn(2, 7, text_width),
    }


def unet() -> tuple[nn.Module, Inputs]:
    module = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    return module, _latent_and_text(32)


def unet_sdxl() -> tuple[nn.Module, Inputs]:
    module = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=2,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        cross_attention_dim=64,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    return module, _latent_and_text(64) | {"added_cond_kwargs": {"text_embeds": randn(2, 32), "time_ids": randn(2, 6)}}


def unet_svd() -> tuple[nn.Module, Inputs]:
    module = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8,
        in_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        cross_attention_dim=16,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=2,
    )
    inputs = {
        "sample": randn(1, 2, 4, 8, 8),
        "timestep": torch.tensor([STEPS[1]]),
        "encoder_hidden_states": randn(1, 1, 16),
        "added_time_ids": randn(1, 3),
    }
    return module, inputs


def controlnet() -> tuple[nn.Module, Inputs]:
    module = diffusers.ControlNetModel(
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=32,
        conditioning_embedding_out_channels=(16, 32),
    )
    return module, _latent_and_text(32) | {"controlnet_cond": randn(2, 3, 16, 16)}


def cascade_c() -> tuple[nn.Module, Inputs]:
    module = diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=32,
        block_out_channels=(16, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_in_channels=16,
        clip_text_pooled_in_channels=16,
        clip_image_in_channels=16,
        switch_level=(False,),
    )
    inputs = {
        "sample": randn(2, 4, 8, 8),
        "timestep_ratio": torch.tensor([0.1, 0.5]),
        "clip_text_pooled": randn(2, 1, 16),
        "clip_text": randn(2, 7, 16),
        "clip_img": randn(2, 1, 16),
    }
    return module, inputs


def cascade_b() -> tuple[nn.Module, Inputs]:
    residual = ("SDCascadeResBlock", "SDCascadeTimestepBlock")
    module = diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=32,
        block_out_channels=(16, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        block_types_per_layer=(residual, (*residual, "SDCascadeAttnBlock")),
        clip_text_pooled_in_channels=16,
        effnet_in_channels=16,
        pixel_mapper_in_channels=3,
        patch_size=2,
        timestep_conditioning_type=("sca",),
        switch_level=None,
    )
    inputs = {
        "sample": randn(2, 4, 16, 16),
        "timestep_ratio": torch.tensor([0.1, 0.5]),
        "clip_text_pooled": randn(2, 1, 16),
        "effnet": randn(2, 16, 8, 8),
    }
    return module, inputs


DENOISERS: dict[str, Maker] = {f.__name__: f for f in (unet, unet_sdxl, unet_svd, controlnet, cascade_b, cascade_c)}
