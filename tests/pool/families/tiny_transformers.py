"""Tiny models of the families that run on transformers, as whole files in the layout that such files have.

Random weights; sizes that fit each other: what the text encoders give is as wide as what the diffusion model reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion import video_published as video_layouts
from tests.pool.models.components.diffusion.image_cases import _publish_pixart as publish_pixart
from tests.pool.models.components.diffusion.image_cases import random
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import cases as vaes
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import tiny
from tests.pool.zoo.case import quiet_libraries

#: width of what most tiny text encoders give
WIDTH = 32
File = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class TinyFamily:
    """One family.

    name       as recognition has it
    model      diffusers' diffusion model
    publish    its state as in published files
    encoders   module and file of each text encoder, by name
    vae        diffusers' VAE
    vae_file   its state as in published files
    sides      width and height of the images that it makes here
    """

    name: str
    model: Callable[[], Any]
    publish: Callable[[Mapping[str, Tensor]], File]
    encoders: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], File]]]
    vae: Callable[[], Any]
    vae_file: Callable[[Mapping[str, Tensor]], File] = published.ldm
    sides: tuple[int, int] = (96, 64)

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        """The whole file, without the text encoders `left_out`."""
        return {
            key: value.contiguous().clone()
            for key, value in _file(self).items()
            if not any(key.startswith(f"text_encoders.{member}.") for member in left_out)
        }


@functools.lru_cache(maxsize=8)
def _file(family: TinyFamily) -> File:
    """The whole file; many tests in a row are of one family."""
    tensors = prefixed("model.diffusion_model.", family.publish(seeded(family.model, 1).state_dict()))
    tensors |= prefixed("vae.", family.vae_file(seeded(family.vae, 2).state_dict()))
    for member, (make, file) in family.encoders.items():
        tensors |= prefixed(f"text_encoders.{member}.transformer.", file(make()))
    return tensors


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> File:
    return {prefix + key: value for key, value in tensors.items()}


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """A module whose weights all matter, small enough that many layers stay finite."""
    with quiet_libraries():
        torch.manual_seed(seed)
        module = make().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, value in sorted(module.state_dict().items()):
        if value.is_floating_point() and "pos_embed.pos_embed" not in name:
            value.copy_(random(value.shape, generator) * (0.3 if value.dim() > 2 else 1.0))
    return module


def kl_vae(channels: int) -> Any:
    """The autoencoder of images with so many channels, without convolutions at the latent."""
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), latent_channels=channels, layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=channels == 4, use_post_quant_conv=channels == 4,
    )  # fmt: skip


def _sd3(**more: Any) -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=64,
        joint_attention_dim=2 * WIDTH, caption_projection_dim=128, pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=64, **more,
    )  # fmt: skip


def _flux(**more: Any) -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 14, 14), **more,
    )  # fmt: skip


def _flux2(**more: Any) -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=3 * WIDTH, axes_dims_rope=(8, 8, 8, 8), **more,
    )  # fmt: skip


def _chroma() -> Any:
    return diffusers.ChromaTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 14, 14), approximator_num_channels=64,
        approximator_hidden_dim=16, approximator_layers=2,
    )  # fmt: skip


def _qwen_image() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 14, 14),
    )  # fmt: skip


def _z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=16, dim=64, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
        axes_dims=[8, 12, 12], axes_lens=[1536, 512, 512],
    )  # fmt: skip


def _lumina2() -> Any:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=16, hidden_size=48, num_layers=2, num_refiner_layers=2, num_attention_heads=4,
        num_kv_heads=2, multiple_of=20, axes_dim_rope=(4, 4, 4), axes_lens=(300, 512, 512), cap_feat_dim=WIDTH,
    )  # fmt: skip


def _auraflow() -> Any:
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
        num_attention_heads=1, attention_head_dim=32, joint_attention_dim=WIDTH, caption_projection_dim=32,
        pos_embed_max_size=1024,
    )  # fmt: skip


def _pixart(**more: Any) -> Any:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=16, attention_head_dim=3, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=48, caption_channels=WIDTH, **more,
    )  # fmt: skip


def _hunyuan_dit() -> Any:
    return diffusers.HunyuanDiT2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        hidden_size=32, mlp_ratio=4.3637, cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=10, text_len=77, text_len_t5=256, use_style_cond_and_image_meta_size=False,
    )  # fmt: skip


def _hidream() -> Any:
    return diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=1,
        attention_head_dim=128, caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH, num_routed_experts=4,
        axes_dims_rope=(64, 32, 32), llama_layers=[0, 1],
    )  # fmt: skip


def _wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=WIDTH, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=1024,
    )  # fmt: skip


def _hunyuan_video() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_refiner_layers=2, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH,
        rope_axes_dim=(4, 14, 14), guidance_embeds=True,
    )  # fmt: skip


def _hunyuan_video_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=16, block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=2
    )


def _ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=32, attention_head_dim=8, cross_attention_dim=256,
        num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip


def _mochi() -> Any:
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, pooled_projection_dim=24, in_channels=12,
        text_embed_dim=WIDTH, time_embed_dim=8, max_sequence_length=256,
    )  # fmt: skip


def _mochi_vae() -> Any:
    return diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 64, 64), decoder_block_out_channels=(32, 32, 64, 96),
        layers_per_block=(3, 1, 4, 1, 2), latent_channels=12,
    )  # fmt: skip


def cosmos(in_channels: int = 16) -> Any:
    return diffusers.CosmosTransformer3DModel(
        in_channels=in_channels, out_channels=16, num_attention_heads=2, attention_head_dim=24, num_layers=2,
        mlp_ratio=2.0, text_embed_dim=WIDTH, adaln_lora_dim=8, max_size=(4, 16, 16),
    )  # fmt: skip


def cosmos_predict_2() -> Any:
    """Without a table of positions."""
    return diffusers.CosmosTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=24, num_layers=2, mlp_ratio=2.0,
        text_embed_dim=WIDTH, adaln_lora_dim=8, max_size=(128, 240, 240), rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )  # fmt: skip


def _cosmos_vae() -> Any:
    return diffusers.AutoencoderKLCosmos(
        latent_channels=16, encoder_block_out_channels=(8, 16, 16, 16), decode_block_out_channels=(8, 16, 16, 16),
        num_layers=1, attention_resolutions=(),
    )  # fmt: skip


def flux2_vae(latent_channels: int = 4) -> Any:
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(32, 32, 32, 32), latent_channels=latent_channels, layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip


def words(kind: str) -> int:
    """Rows of the table of tokens of an encoder with this kind of tokenizer."""
    return tiny(kind).get_vocab_size() + 8


CLIP_L = (lambda: texts.clip(projection=WIDTH), texts.clip_file)
CLIP_G = (lambda: texts.clip(3, act="gelu", projection=WIDTH), texts.clip_in_open_clip)
T5_WORDS = 200
T5 = (lambda: texts.t5(words=T5_WORDS), texts.t5_file)
QWEN_VAE = (lambda: diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, num_res_blocks=1), published.wan21)

FAMILIES = {
    family.name: family
    for family in (
        TinyFamily(
            "sd35_large",
            lambda: _sd3(num_layers=2, qk_norm="rms_norm"),
            layouts.sd3,
            {"clip_l": CLIP_L, "clip_g": CLIP_G, "t5xxl": (lambda: texts.t5(words=T5_WORDS, width=64), texts.t5_file)},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "sd3",
            lambda: _sd3(num_layers=2),
            layouts.sd3,
            {"clip_l": CLIP_L, "clip_g": CLIP_G, "t5xxl": (lambda: texts.t5(words=T5_WORDS, width=64), texts.t5_file)},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "flux_dev",
            lambda: _flux(guidance_embeds=True),
            layouts.flux,
            {"clip_l": CLIP_L, "t5xxl": (lambda: texts.t5(words=T5_WORDS), texts.t5_file)},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "flux_schnell",
            _flux,
            layouts.flux,
            {"clip_l": CLIP_L, "t5xxl": (lambda: texts.t5(words=T5_WORDS), texts.t5_file)},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "flux2_klein",
            lambda: _flux2(guidance_embeds=False),
            layouts.flux2,
            {"qwen3_4b": (lambda: texts.qwen3(words=words("qwen"), layers=28), texts.under("model."))},
            flux2_vae,
        ),
        TinyFamily("chroma", _chroma, layouts.chroma, {"t5xxl": T5}, lambda: kl_vae(16)),
        TinyFamily(
            "qwen_image",
            _qwen_image,
            layouts.as_diffusers,
            {"qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
            *QWEN_VAE,
        ),
        TinyFamily(
            "z_image",
            _z_image,
            layouts.z_image,
            {"qwen3_4b": (lambda: texts.qwen3(words=words("qwen")), texts.under("model."))},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "lumina2",
            _lumina2,
            layouts.lumina2,
            {"gemma2_2b": (lambda: texts.gemma2(words=words("gemma")), texts.under("model."))},
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "auraflow",
            _auraflow,
            layouts.auraflow,
            {"t5xl": T5},
            lambda: kl_vae(4),
        ),
        TinyFamily(
            "pixart_sigma",
            lambda: _pixart(sample_size=64, use_additional_conditions=False),
            publish_pixart(64),
            {"t5xxl": T5},
            lambda: kl_vae(4),
        ),
        TinyFamily(
            "pixart_alpha",
            lambda: _pixart(sample_size=128, use_additional_conditions=True),
            publish_pixart(128),
            {"t5xxl": T5},
            lambda: kl_vae(4),
        ),
        TinyFamily(
            "hunyuan_dit",
            _hunyuan_dit,
            layouts.hunyuan_dit,
            {
                "hydit_bert": (lambda: texts.bert(words=words("bert")), texts.under("bert.")),
                "t5xl": T5,
            },
            lambda: kl_vae(4),
        ),
        TinyFamily(
            "hidream_i1",
            _hidream,
            layouts.as_diffusers,
            {
                "clip_l": CLIP_L,
                "clip_g": CLIP_G,
                "t5xxl": T5,
                "llama3_8b": (lambda: texts.llama(words=words("llama3")), texts.under("model.")),
            },
            lambda: kl_vae(16),
        ),
        TinyFamily(
            "wan_t2v",
            _wan,
            video_layouts.wan,
            {"umt5_xxl": (lambda: texts.umt5(words=T5_WORDS), texts.t5_file)},
            lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1),
            published.wan21,
        ),
        TinyFamily(
            "hunyuan_video",
            _hunyuan_video,
            video_layouts.hunyuan,
            {
                "clip_l": CLIP_L,
                "llama3_8b": (lambda: texts.llama(words=words("llama3"), layers=4), texts.under("model.")),
            },
            _hunyuan_video_vae,
            partial(published.ldm, dimensions=3),
        ),
        TinyFamily("ltxv", _ltx, video_layouts.ltx, {"t5xxl": T5}, vaes.CASES["ltx_v0"].make, published.ltx),
        TinyFamily("mochi", _mochi, video_layouts.mochi, {"t5xxl": T5}, _mochi_vae, published.mochi),
        TinyFamily(
            "cosmos_t2v",
            cosmos,
            video_layouts.cosmos,
            {"t5xxl_old": (lambda: texts.t5(words=T5_WORDS, gated=False), texts.t5_file)},
            _cosmos_vae,
            published.cosmos,
        ),
        TinyFamily(
            "cosmos2_t2i",
            cosmos_predict_2,
            video_layouts.cosmos_predict_2,
            {"t5xxl_old": (lambda: texts.t5(words=T5_WORDS, gated=False), texts.t5_file)},
            *QWEN_VAE,
        ),
    )
}
