"""Tiny VAEs of every kind that is built: how diffusers makes one, and the layout that it is published in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from torch import Tensor

from tests.pool.models.components.vae import published
from tests.pool.models.components.vae.published import File, State


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of VAE.

    name     what it is recognised as
    make     diffusers' own module
    publish  its state in the single file's layout
    latent   the shape of a latent to decode
    pixels   the shape of what is encoded
    golden   the list of published keys that has this layout; empty for none
    unused   keys of the file that are no part of the module
    """

    name: str
    make: Callable[[], Any]
    publish: Callable[[State], File]
    latent: tuple[int, ...]
    pixels: tuple[int, ...]
    golden: str = ""
    unused: tuple[str, ...] = ()

    def module(self) -> Any:
        """diffusers' module with weights of its own that are nowhere zero, so that every one of them counts."""
        torch.manual_seed(0)
        module = self.make().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(len(self.name))
        for name, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1 + _centre(name))
        return module

    def file(self, module: Any) -> File:
        """Its state as published."""
        return {key: tensor.contiguous().clone() for key, tensor in self.publish(module.state_dict()).items()}


def _centre(name: str) -> float:
    """Norms and variances lie around 1."""
    return (
        1.0 if name.endswith(("norm1.weight", "norm2.weight", "gamma", "running_var", "latents_std", "weight_g")) else 0
    )


def _kl(**more: Any) -> Any:
    sizes = {
        "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    return diffusers.AutoencoderKL(**{**sizes, **more})


def _flux2() -> Any:
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _temporal() -> Any:
    return diffusers.AutoencoderKLTemporalDecoder(
        # the attention of the decoder's middle is skipped where it has one block
        block_out_channels=(32, 64), layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * 2
    )  # fmt: skip


def _tiny(channels: int) -> Any:
    widths = (8,) * 4
    return diffusers.AutoencoderTiny(
        latent_channels=channels, encoder_block_out_channels=widths, decoder_block_out_channels=widths,
        num_encoder_blocks=(1, 2, 2, 3), num_decoder_blocks=(3, 2, 2, 1),
    )  # fmt: skip


def _oobleck() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        return diffusers.AutoencoderOobleck(
            encoder_hidden_size=4, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=4,
            decoder_input_channels=6,
        )  # fmt: skip


def _same(depth: int = 2, *, differential: bool = True) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        return diffusers.AutoencoderSAME(
            patch_size=4, encoder_channels=4, encoder_transformer_depths=(depth,), latent_dim=6, dim_heads=8, ff_mult=2,
            use_differential_attention=differential, decoder_sinusoidal_blocks=(8 if depth == 12 else 0,),
        )  # fmt: skip


def _mochi_whole() -> Any:
    """Wide enough to be told by the keys of a published level: four blocks in the third."""
    return diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 64, 64), decoder_block_out_channels=(32, 32, 64, 96),
        layers_per_block=(3, 1, 4, 1, 2), latent_channels=6,
    )  # fmt: skip


def _allegro() -> Any:
    module = diffusers.AutoencoderKLAllegro(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=2)
    # one tile, which fills the video; diffusers runs no other
    module.kernel = module.stride = (12, 16, 16)
    module.enable_tiling()
    return module


def _ltx_v0() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 16, 16, 16), decoder_block_out_channels=(8, 16, 16, 16),
        layers_per_block=(2, 1, 1, 1, 2), decoder_layers_per_block=(2, 1, 1, 1, 2),
    )  # fmt: skip


_LTX_TIMED = {
    "timestep_conditioning": True, "decoder_block_out_channels": (16, 32, 64),
    "decoder_layers_per_block": (1, 2, 1, 2), "decoder_spatio_temporal_scaling": (True, True, True),
    "upsample_residual": (True, True, True), "upsample_factor": (2, 2, 2),
}  # fmt: skip


def _ltx_v1() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 16, 16, 16), layers_per_block=(2, 1, 1, 1, 2),
        decoder_inject_noise=(True, True, True, False), **_LTX_TIMED,
    )  # fmt: skip


def _ltx_v2() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 16, 32, 64, 64), layers_per_block=(1, 2, 1, 1, 1),
        down_block_types=("LTXVideo095DownBlock3D",) * 4, spatio_temporal_scaling=(True,) * 4,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        decoder_inject_noise=(False,) * 4, **_LTX_TIMED,
    )  # fmt: skip


def _ltx2() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=(1, 2, 1, 1, 1),
        decoder_block_out_channels=(16, 32, 64),
        decoder_layers_per_block=(1, 2, 1, 2),
        decoder_inject_noise=(False,) * 4,
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


def _qwen() -> Any:
    return diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=4, num_res_blocks=1)


def _hunyuan_video() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=2
    )


def dc(**more: Any) -> Any:
    """Sana's, with other blocks in each half."""
    sizes: dict[str, Any] = {
        "latent_channels": 4, "attention_head_dim": 4, "downsample_block_type": "conv",
        "encoder_block_out_channels": (8, 8, 16), "decoder_block_out_channels": (8, 16, 16),
        "encoder_layers_per_block": (1, 2, 1), "decoder_layers_per_block": (2, 1, 2),
        "encoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
        "encoder_qkv_multiscales": ((), (), ()), "decoder_qkv_multiscales": ((), (5,), (3, 5)),
        "upsample_block_type": "interpolate",
    }  # fmt: skip
    return diffusers.AutoencoderDC(**sizes | more)


def _hunyuan_image() -> Any:
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64), layers_per_block=2,
        spatial_compression_ratio=4, sample_size=32,
    )  # fmt: skip


def _folded(cls: Any) -> Any:
    return cls(
        latent_channels=4, block_out_channels=(16, 32, 32), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )  # fmt: skip


def _cosmos() -> Any:
    return diffusers.AutoencoderKLCosmos(
        latent_channels=4, encoder_block_out_channels=(8, 16, 16, 16), decode_block_out_channels=(8, 16, 16, 16),
        num_layers=1, attention_resolutions=(),
    )  # fmt: skip


def _wan21(**more: Any) -> Any:
    return diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1, **more)


def _wan22() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=4, decoder_base_dim=6, z_dim=4, num_res_blocks=1, is_residual=True, patch_size=2, in_channels=12,
        out_channels=12, scale_factor_spatial=16,
    )  # fmt: skip


_UPWARDS = partial(published.ldm, going_up_backwards=False)
_TAESD_UNUSED = ("vae_scale", "vae_shift")
_COSMOS_UNUSED = ("latent_mean", "latent_std", "decoder.unpatcher3d.wavelets")
_LTX_UNUSED = ("per_channel_statistics.channel",)
_VIDEO = (1, 3, 9, 32, 32)

CASES: dict[str, Case] = {
    "kl": Case("kl", _kl, published.ldm, (1, 4, 4, 6), (1, 3, 8, 12), "sd1_kl"),
    "kl 16 channels": Case(
        "kl", lambda: _kl(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False), published.ldm,
        (2, 16, 4, 4), (1, 3, 8, 8), "flux_sd3_kl16_no_quant_conv",
    ),
    "kl three levels": Case(
        "kl", lambda: _kl(
            block_out_channels=(8, 8, 16), layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
        ),
        published.ldm, (1, 4, 4, 4), (1, 3, 8, 8), "sd_x4_upscaler",
    ),
    "flux2": Case("flux2", _flux2, published.ldm, (1, 4, 4, 4), (1, 3, 8, 8)),
    "flux2 convolutions in halves": Case(
        "flux2", _flux2, published.flux2_with_convolutions_in_halves, (1, 4, 4, 4), (1, 3, 8, 8)
    ),
    "kl_temporal": Case("kl_temporal", _temporal, published.temporal, (3, 4, 4, 4), (1, 3, 8, 8)),
    "taesd": Case("taesd", lambda: _tiny(4), published.taesd, (1, 4, 4, 4), (1, 3, 32, 32), "taesd", _TAESD_UNUSED),
    "taesd 16 channels": Case(
        "taesd", lambda: _tiny(16), published.taesd, (1, 16, 4, 4), (1, 3, 32, 32), "taesd", _TAESD_UNUSED
    ),
    "taesd in diffusers' naming": Case("taesd", lambda: _tiny(4), dict, (1, 4, 4, 4), (1, 3, 32, 32)),
    "cascade_a": Case(
        "cascade_a", lambda: PaellaVQModel(bottleneck_blocks=3, embed_dim=16, num_vq_embeddings=32, scale_factor=0.43),
        published.cascade_a, (1, 4, 4, 4), (1, 3, 16, 16), "cascade_stage_a",
    ),
    "oobleck": Case("oobleck", _oobleck, published.oobleck, (1, 6, 5), (1, 2, 64)),
    "oobleck parametrized": Case(
        "oobleck", _oobleck, published.oobleck_parametrized, (1, 6, 5), (1, 2, 64), "audio_oobleck"
    ),
    "stable_audio_3": Case("stable_audio_3", _same, published.same, (1, 6, 5), (1, 2, 256)),
    "stable_audio_3 large": Case(
        "stable_audio_3", partial(_same, 12, differential=False), published.same, (1, 6, 5), (1, 2, 256)
    ),
    "mochi": Case("mochi", _mochi_whole, published.mochi, (1, 6, 2, 2, 2), (1, 3, 7, 16, 16), "mochi"),
    "ltx_v0": Case("ltx_v0", _ltx_v0, published.ltx, (1, 8, 2, 2, 2), _VIDEO, "ltxv_v0", _LTX_UNUSED),
    "ltx_v1": Case("ltx_v1", _ltx_v1, published.ltx, (1, 8, 2, 2, 2), _VIDEO, "ltxv_v1", _LTX_UNUSED),
    "ltx_v2": Case("ltx_v2", _ltx_v2, published.ltx, (1, 8, 2, 2, 2), (1, 3, 9, 64, 64), "", _LTX_UNUSED),
    "ltx2": Case("ltx2", _ltx2, published.ltx, (1, 8, 2, 2, 2), (1, 3, 9, 64, 64), "", _LTX_UNUSED),
    "hunyuan_video": Case(
        "hunyuan_video", _hunyuan_video, partial(published.ldm, dimensions=3), (1, 4, 2, 2, 2), (1, 3, 5, 16, 16),
        "hunyuan_video",
    ),
    "hunyuan_image": Case(
        "hunyuan_image", _hunyuan_image, published.hunyuan_image, (1, 4, 4, 4), (1, 3, 8, 8), "hunyuan_image_2.1"
    ),
    "dc": Case("dc", dc, published.dc, (1, 4, 4, 4), (1, 3, 16, 16)),
    "dc that folds": Case(
        "dc",
        lambda: dc(downsample_block_type="pixel_unshuffle", upsample_block_type="pixel_shuffle"),
        partial(published.dc, folds=True), (1, 4, 4, 4), (1, 3, 16, 16),
    ),
    "cogvideox": Case(
        "cogvideox",
        lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=2
        ),
        dict, (1, 4, 3, 2, 2), (1, 3, 9, 16, 16),
    ),
    "cogvideox of the original code": Case(
        "cogvideox",
        lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=2
        ),
        partial(published.ldm, dimensions=3), (1, 4, 3, 2, 2), (1, 3, 9, 16, 16),
    ),
    "allegro": Case("allegro", _allegro, dict, (1, 4, 3, 2, 2), (1, 3, 9, 16, 16)),
    "hunyuan_video_15": Case(
        "hunyuan_video_15", lambda: _folded(diffusers.AutoencoderKLHunyuanVideo15), _UPWARDS, (1, 4, 2, 2, 2),
        (1, 3, 3, 8, 8),
    ),
    "cosmos": Case(
        "cosmos", _cosmos, published.cosmos, (1, 4, 2, 4, 4), (1, 3, 9, 32, 32), "cosmos", _COSMOS_UNUSED
    ),
    "wan21": Case("wan21", _wan21, published.wan21, (1, 4, 2, 2, 2), (1, 3, 5, 16, 16), "wan21"),
    "wan21 two blocks a level": Case(
        "wan21", lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=2, dim_mult=[1, 2, 2],
                                                    temperal_downsample=[False, True], scale_factor_spatial=4),
        published.wan21, (1, 4, 2, 2, 2), (1, 3, 5, 16, 16), "wan21",
    ),
    "qwen-image": Case("wan21", _qwen, published.wan21, (1, 4, 2, 2, 2), (1, 3, 5, 16, 16), "wan21"),
    "qwen_image_layered": Case(
        "qwen_image_layered",
        lambda: diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=4, num_res_blocks=1, input_channels=4),
        published.wan21, (1, 4, 2, 2, 2), (1, 3, 1, 16, 16),
    ),
    "qwen_image_21": Case(
        "qwen_image_21",
        lambda: diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=6, num_res_blocks=1),
        published.wan22, (1, 64, 2, 2), (1, 3, 32, 32),
    ),
    "wan22": Case("wan22", _wan22, published.wan22, (1, 4, 2, 2, 2), (1, 3, 5, 32, 32)),
}  # fmt: skip


def decode(case: Case, module: Any, latents: Tensor) -> Tensor:
    """What diffusers' own call gives, with its noise drawn alike every time."""
    torch.manual_seed(1)
    match case.name:
        case "kl_temporal":
            return module.decode(latents, num_frames=latents.shape[0]).sample
        case "qwen_image_21":  # transparent, which images are not
            shown = (module.decode(latents[:, :, None]).sample[:, :, 0] / 2 + 0.5).clamp(0, 1)
            return (shown[:, :3] * shown[:, 3:] + 1 - shown[:, 3:]) * 2 - 1
        case "qwen_image_layered":  # each layer as an image
            return torch.cat([module.decode(layer).sample for layer in latents.split(1, dim=2)], dim=2)
        case "ltx_v1" | "ltx_v2":
            return module.decode(latents, torch.full((latents.shape[0],), 0.05)).sample
        case "allegro":  # frames are before channels, and those of its last cell are not kept
            return module.decode(latents).sample.transpose(1, 2)[:, :, :-3]
    return module.decode(latents).sample


def encode(module: Any, pixels: Tensor) -> Tensor:
    """The mean of what diffusers' own call gives."""
    if isinstance(module, diffusers.AutoencoderKLQwenImage21):
        opaque = torch.cat((pixels, torch.ones_like(pixels[:, :1])), dim=1)
        mean: Tensor = module.encode(opaque[:, :, None]).latent_dist.mode()[:, :, 0]
        return mean
    own = getattr(module, "config", None)
    if 4 in (getattr(own, "input_channels", 3), getattr(own, "in_channels", 3)):
        pixels = torch.cat((pixels, torch.ones_like(pixels[:, :1])), dim=1)
    if isinstance(module, diffusers.AutoencoderKLAllegro):  # of whole cells of time
        pixels = torch.cat((pixels, *(pixels[:, :, -1:],) * (-pixels.shape[2] % 4)), dim=2)
    encoded = module.encode(pixels)
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mode()
    return encoded.latent if hasattr(encoded, "latent") else encoded.latents
