"""Tiny models of the families of transformers that `tiny_transformers` has no room for: relatives of its own, the newer
models of Hunyuan, and Flux 2 with Mistral. As whole files in the layouts in which such files are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.pool.families.tiny_transformers import (
    FAMILIES,
    T5,
    WIDTH,
    File,
    TinyFamily,
    _flux2,
    _pixart,
    _sd3,
    cosmos,
    flux2_vae,
    kl_vae,
    publish_pixart,
    words,
)
from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion import video_published as video_layouts
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published

#: tokens of a prompt of PixArt alpha, by which it is told from sigma
_ALPHA_TOKENS = 120
#: bytes, and what stands for none
_BYTES = 384
_QWEN_AND_BYT5 = {
    "qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model.")),
    "byt5_small_glyph": (lambda: texts.t5(heads=6, words=_BYTES), texts.t5_file),
}


def _publish_alpha(state: Mapping[str, Tensor]) -> File:
    """Of 512 pixels, so that it is told no sizes; with what it was trained to read for no text."""
    file = publish_pixart(64)(state)
    return file | {"y_embedder.y_embedding": torch.ones(_ALPHA_TOKENS, WIDTH)}


def _hunyuan_dit_1() -> Any:
    """ModelKwargs a style and sizes, which with its texts are so many numbers as tell it from 1.2."""
    told, hidden = 3968, 32
    return diffusers.HunyuanDiT2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        hidden_size=hidden, mlp_ratio=4.3637, cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=told - 6 * 256 - hidden, text_len=77, text_len_t5=256,
    )  # fmt: skip


def _cosmos_predict_2_video() -> Any:
    """With a channel that tells which frames are kept."""
    return diffusers.CosmosTransformer3DModel(
        in_channels=17, out_channels=16, num_attention_heads=2, attention_head_dim=24, num_layers=2, mlp_ratio=2.0,
        text_embed_dim=WIDTH, adaln_lora_dim=8, max_size=(128, 240, 240), rope_scale=(1.0, 3.0, 3.0),
        extra_pos_embed_type=None,
    )  # fmt: skip


def _hunyuan_image(**more: Any) -> Any:
    return diffusers.HunyuanImageTransformer2DModel(
        in_channels=64, out_channels=64, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_refiner_layers=2, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
        rope_axes_dim=(16, 16), **more,
    )  # fmt: skip


def _hunyuan_image_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=64, block_out_channels=(32, 32, 32, 32, 64, 128),
        layers_per_block=1, spatial_compression_ratio=32, sample_size=64,
    )  # fmt: skip


def _hunyuan_video_15() -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=65, out_channels=32, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_refiner_layers=1, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, image_embed_dim=1152,
        rope_axes_dim=(4, 14, 14),
    )  # fmt: skip


def _hunyuan_video_15_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=32, block_out_channels=(16, 32, 32, 32, 64), layers_per_block=1, spatial_compression_ratio=16,
        temporal_compression_ratio=4,
    )  # fmt: skip


RELATIVES = {
    family.name: family
    for family in (
        replace(
            FAMILIES["sd35_large"],
            name="sd35_medium",
            model=lambda: _sd3(num_layers=3, dual_attention_layers=(0,), qk_norm="rms_norm"),
        ),
        TinyFamily(
            "pixart_alpha_512",
            lambda: _pixart(sample_size=64, use_additional_conditions=False),
            _publish_alpha,
            {"t5xxl": T5},
            lambda: kl_vae(4),
        ),
        replace(FAMILIES["hunyuan_dit"], name="hunyuan_dit_1", model=_hunyuan_dit_1),
        replace(FAMILIES["cosmos_t2v"], name="cosmos_i2v", model=lambda: cosmos(17)),
        replace(
            FAMILIES["cosmos2_t2i"],
            name="cosmos2_i2v",
            model=_cosmos_predict_2_video,
            vae=FAMILIES["wan_t2v"].vae,
            vae_file=FAMILIES["wan_t2v"].vae_file,
        ),
        TinyFamily(
            "flux2",
            _flux2,
            layouts.flux2,
            {
                "mistral3_24b": (
                    lambda: texts.mistral(words=words("mistral"), layers=31),
                    texts.under("model."),
                )
            },
            flux2_vae,
        ),
        TinyFamily(
            "hunyuan_image_21",
            _hunyuan_image,
            layouts.hunyuan_image,
            _QWEN_AND_BYT5,
            _hunyuan_image_vae,
            published.hunyuan_image,
            sides=(128, 64),
        ),
        TinyFamily(
            "hunyuan_video_15",
            _hunyuan_video_15,
            video_layouts.hunyuan_like_flux,
            _QWEN_AND_BYT5,
            _hunyuan_video_15_vae,
            partial(published.ldm, dimensions=3, going_up_backwards=False),
        ),
    )
}
ALL_FAMILIES = {**FAMILIES, **RELATIVES}
#: the same for tests in which the shape of the image plays no part: HiDream fills one that is not square up with
#: nothing to 4096 places
SMALL_FAMILIES = {**ALL_FAMILIES, "hidream_i1": replace(FAMILIES["hidream_i1"], sides=(64, 64))}
