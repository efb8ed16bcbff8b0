"""For each kind of VAE: its configuration, from shapes, and pixels and frames per latent cell, from its configuration.
Torch-free.

Separate from the classes (`pool.models.components.vae.vae_classes`), so that planning knows a VAE's ratios without
loading torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from modelpool.pool.models.components.common import vae_configs as configs
from modelpool.pool.models.components.common import vae_video_configs as video_configs
from modelpool.pool.models.components.common.efficientnet_config import EFFICIENTNET_CELL
from modelpool.pool.models.components.common.vae_configs import Config, Shapes

Measure: TypeAlias = Callable[[Shapes], Config]
#: per cell: channels, pixels along a side, frames
Measures: TypeAlias = tuple[int, int, int]

#: by the name that `pool.families.detection.vaes` returns, for files under published names
CONFIGS: Mapping[str, Measure] = {
    "kl": configs.kl_config,
    "kl_temporal": configs.kl_temporal_config,
    "flux2": configs.flux2_config,
    "taesd": configs.taesd_config,
    "cascade_a": configs.cascade_a_config,
    "cascade_c_encoder": configs.cascade_c_config,
    "oobleck": configs.oobleck_config,
    "stable_audio_3": configs.same_config,
    "mochi": video_configs.mochi_config,
    "ltx_v0": video_configs.ltx_config,
    "ltx_v1": video_configs.ltx_config,
    "ltx_v2": video_configs.ltx_config,
    "ltx2": video_configs.ltx2_config,
    "hunyuan_image": configs.hunyuan_image_config,
    "hunyuan_video": video_configs.hunyuan_video_config,
    "hunyuan_video_15": video_configs.hunyuan_video_15_config,
    "hunyuan_image_refiner": video_configs.hunyuan_video_15_config,
    "cosmos": video_configs.cosmos_config,
    "dc": configs.dc_config,
    "cogvideox": video_configs.cogvideox_config,
    "allegro": video_configs.allegro_config,
    "wan21": video_configs.wan21_config,
    "qwen_image_layered": video_configs.qwen_image_layered_config,
    "wan22": video_configs.wan22_config,
    "qwen_image_21": video_configs.qwen_image_21_config,
}
#: kinds that need no configuration for files in diffusers' naming
DIFFUSERS_CONFIGS: Mapping[str, Measure] = {
    "kl": configs.diffusers_kl_config,
    "flux2": configs.diffusers_kl_config,
}


def _kl(config: Config) -> Measures:
    return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1), 1


def _flux2(config: Config) -> Measures:
    channels, side, _ = _kl(config)
    down, across = config["patch_size"]
    return channels * down * across, side * down, 1


def _taesd(config: Config) -> Measures:
    return config["latent_channels"], 2 ** (len(config["num_decoder_blocks"]) - 1), 1


def _cascade_a(config: Config) -> Measures:
    return config["latent_channels"], config["up_down_scale_factor"] * 2 ** (config["levels"] - 1), 1


def _oobleck(config: Config) -> Measures:
    return config["decoder_input_channels"], math.prod(config["downsampling_ratios"]), 1


def _same(config: Config) -> Measures:
    return config["latent_dim"], config["patch_size"] * math.prod(config["encoder_strides"]), 1


def _mochi(config: Config) -> Measures:
    return config["latent_channels"], math.prod(config["spatial_expansions"]), math.prod(config["temporal_expansions"])


def _ltx(config: Config) -> Measures:
    kinds = [
        kind for kind, folds in zip(config["downsample_type"], config["spatio_temporal_scaling"], strict=True) if folds
    ]
    sides, times = sum(kind != "temporal" for kind in kinds), sum(kind != "spatial" for kind in kinds)
    return config["latent_channels"], config["patch_size"] * 2**sides, 2**times


def _dc(config: Config) -> Measures:
    return config["latent_channels"], 2 ** (len(config["decoder_block_out_channels"]) - 1), 1


def _cogvideox(config: Config) -> Measures:
    return config["latent_channels"], *_kl(config)[1:2], int(config.get("temporal_compression_ratio", 4))


def _explicit_ratios(config: Config) -> Measures:
    """Classes with both ratios as arguments."""
    return (
        config["latent_channels"], config["spatial_compression_ratio"], config.get("temporal_compression_ratio", 1),
    )  # fmt: skip


def _pairs(config: Config) -> Measures:
    """A cell of HunyuanImage's refiner is two of its VAE's."""
    channels, side, frames = _explicit_ratios(config)
    return 2 * channels, side, frames


def _hunyuan_video(config: Config) -> Measures:
    # default of the class: the published four frames per cell
    return config["latent_channels"], config["spatial_compression_ratio"], 4


def _wan(config: Config) -> Measures:
    folds = config["temperal_downsample"]  # one entry per halving of the sides: whether it halves time as well
    return config["z_dim"], config.get("scale_factor_spatial") or 2 ** len(folds), 2 ** sum(folds)


#: pixels and frames of a cell, from the configuration of each kind
MEASURES: Mapping[str, Callable[[Config], Measures]] = {
    "kl": _kl,
    "kl_temporal": _kl,
    "flux2": _flux2,
    "taesd": _taesd,
    "cascade_a": _cascade_a,
    "cascade_c_encoder": lambda config: (config["latent_channels"], EFFICIENTNET_CELL, 1),
    "oobleck": _oobleck,
    "stable_audio_3": _same,
    "mochi": _mochi,
    "ltx_v0": _ltx,
    "ltx_v1": _ltx,
    "ltx_v2": _ltx,
    "ltx2": _ltx,
    "hunyuan_image": _explicit_ratios,
    "hunyuan_video": _hunyuan_video,
    "hunyuan_video_15": _explicit_ratios,
    "hunyuan_image_refiner": _pairs,
    "cosmos": _explicit_ratios,
    "dc": _dc,
    "cogvideox": _cogvideox,
    "allegro": _cogvideox,
    "wan21": _wan,
    "wan22": _wan,
    "qwen_image_layered": lambda config: (*_wan(config)[:2], 1),
    "qwen_image_21": lambda config: (*_wan(config)[:2], 1),
}

#: channels of pixels with transparency
_WITH_OPACITY = 4


def _ltx_version(config: Config) -> str:
    if not config.get("timestep_conditioning"):
        return "ltx_v0"
    return "ltx_v2" if "LTXVideo095DownBlock3D" in (config.get("down_block_types") or ()) else "ltx_v1"


#: the kind of each class that a diffusers folder may name, by its configuration
FOLDER_KINDS: Mapping[str, Callable[[Config], str]] = {
    "AutoencoderKL": lambda config: "kl",
    "AutoencoderKLFlux2": lambda config: "flux2",
    "AutoencoderKLTemporalDecoder": lambda config: "kl_temporal",
    "AutoencoderTiny": lambda config: "taesd",
    "PaellaVQModel": lambda config: "cascade_a",
    "AutoencoderOobleck": lambda config: "oobleck",
    "AutoencoderSAME": lambda config: "stable_audio_3",
    "AutoencoderKLMochi": lambda config: "mochi",
    "AutoencoderKLLTXVideo": lambda config: _ltx_version(config),
    "AutoencoderKLLTX2Video": lambda config: "ltx2",
    "AutoencoderKLHunyuanImage": lambda config: "hunyuan_image",
    "AutoencoderKLHunyuanVideo": lambda config: "hunyuan_video",
    "AutoencoderKLHunyuanVideo15": lambda config: "hunyuan_video_15",
    "AutoencoderKLHunyuanImageRefiner": lambda config: "hunyuan_image_refiner",
    "AutoencoderDC": lambda config: "dc",
    "AutoencoderKLCogVideoX": lambda config: "cogvideox",
    "AutoencoderKLAllegro": lambda config: "allegro",
    "AutoencoderKLCosmos": lambda config: "cosmos",
    "AutoencoderKLWan": lambda config: "wan22" if config.get("is_residual") else "wan21",
    "AutoencoderKLQwenImage": lambda config: (
        "qwen_image_layered" if config.get("input_channels") == _WITH_OPACITY else "wan21"
    ),
    "AutoencoderKLQwenImage21": lambda config: "qwen_image_21",
}
