"""Autoencoders. A call encodes and decodes."""

from __future__ import annotations

import diffusers
import torch
from torch import nn, randn

from modelpool.pool.models.components.vae.weight_norm import drop_computed_weights
from tests.pool.zoo.case import Inputs, Maker

TWO_LEVELS = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}


def vae() -> tuple[nn.Module, Inputs]:
    return diffusers.AutoencoderKL(**TWO_LEVELS), {"sample": randn(1, 3, 16, 16)}


def vae_flux2() -> tuple[nn.Module, Inputs]:
    return diffusers.AutoencoderKLFlux2(**TWO_LEVELS), {"sample": randn(1, 3, 16, 16)}


def vae_oobleck() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderOobleck(
        encoder_hidden_size=12,
        decoder_channels=12,
        decoder_input_channels=6,
        audio_channels=2,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
    )
    drop_computed_weights(module)  # as the pool does: they would stay on the device of the last call
    with torch.no_grad():
        module(torch.zeros(1, 2, 64))  # drops those of the constructor
    return module, {"sample": randn(1, 2, 64)}


def vae_mochi() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderKLMochi(
        in_channels=15,
        out_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    )
    return module, {"sample": randn(1, 3, 7, 16, 16)}


def _ltx(**more: object) -> nn.Module:
    return diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
        **more,
    )  # type: ignore[no-any-return]


def vae_ltx() -> tuple[nn.Module, Inputs]:
    module = _ltx(
        decoder_block_out_channels=(8,) * 4,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
    )
    return module, {"sample": randn(1, 3, 9, 16, 16)}


def vae_ltx091() -> tuple[nn.Module, Inputs]:
    # injected noise is off: it would be drawn anew in each run
    module = _ltx(
        decoder_block_out_channels=(16, 32, 64),
        decoder_layers_per_block=(1,) * 4,
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(True,) * 3,
        upsample_factor=(2,) * 3,
        timestep_conditioning=True,
    )
    return module, {"sample": randn(1, 3, 9, 16, 16), "temb": torch.tensor([0.05])}


def vae_hunyuan() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    )
    return module, {"sample": randn(1, 3, 9, 16, 16)}


def vae_cosmos() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8,) * 4,
        decode_block_out_channels=(8,) * 4,
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return module, {"sample": randn(1, 3, 9, 32, 32)}


def _wan(**more: object) -> nn.Module:
    return diffusers.AutoencoderKLWan(  # type: ignore[no-any-return]
        z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True], **more
    )


def vae_wan() -> tuple[nn.Module, Inputs]:
    return _wan(base_dim=3), {"sample": randn(1, 3, 9, 16, 16)}


def vae_wan22() -> tuple[nn.Module, Inputs]:
    module = _wan(base_dim=4, decoder_base_dim=4, is_residual=True, in_channels=12, out_channels=12, patch_size=2)
    return module, {"sample": randn(1, 3, 9, 32, 32)}


def vae_qwen() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return module, {"sample": randn(1, 3, 1, 16, 16)}


def vae_tiny() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    )
    return module, {"sample": torch.rand(1, 3, 16, 16)}


def vae_dc() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return module, {"sample": randn(1, 3, 16, 16)}


AUTOENCODERS: dict[str, Maker] = {
    f.__name__: f
    for f in (
        vae, vae_flux2, vae_oobleck, vae_mochi, vae_ltx, vae_ltx091, vae_hunyuan, vae_cosmos, vae_wan, vae_wan22,
        vae_qwen, vae_tiny, vae_dc,
    )
}  # fmt: skip
