"""Pixels and frames per latent cell, from a VAE's configuration. Torch-free.

Published VAEs have the figures in `pool.families.detection.vaes`; those of smaller ones of the same layout follow only
from their structure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.families.detection.vae_facts import VaeFacts
from modelpool.pool.families.detection.vaes import FACTS, HUNYUAN_IMAGE_REFINER, recognise_vae
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.vae_config_table import CONFIGS, DIFFUSERS_CONFIGS, FOLDER_KINDS
from modelpool.pool.models.components.common.vae_configs import Config
from modelpool.pool.values.core.errors import UnknownArchitecture

_REFINER = HUNYUAN_IMAGE_REFINER
#: per cell: channels, pixels along a side, frames
Measures = tuple[int, int, int]


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


_MEASURES: Mapping[str, Callable[[Config], Measures]] = {
    "kl": _kl,
    "kl_temporal": _kl,
    "flux2": _flux2,
    "taesd": _taesd,
    "cascade_a": _cascade_a,
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


def measured(facts: VaeFacts, config: Config) -> VaeFacts:
    """Return `facts` with the ratios of a VAE that is built with `config`."""
    channels, side, frames = _MEASURES[facts.name](config)
    return replace(facts, latent_channels=channels, encode_ratio=side, decode_ratio=side, temporal_ratio=frames)


def recognised_for(latent_format: str, bare_shapes: Mapping[str, Shape]) -> VaeFacts | None:
    """Return the VAE with tensors of `bare_shapes` (keys without prefix), or None. The one of HunyuanImage's refiner
    has the tensors of another, and only its latents tell it."""
    found = recognise_vae(bare_shapes)
    if found is None or latent_format != _REFINER.name or _REFINER.name not in found.latent_formats:
        return found
    return replace(_REFINER, has_encoder=found.has_encoder, has_decoder=found.has_decoder)


def measured_vae(bare_shapes: Mapping[str, Shape], latent_format: str = "") -> VaeFacts:
    """Return the facts of the VAE with tensors of `bare_shapes` (keys without prefix), for latents of `latent_format`,
    with measured ratios.

    Raises UnknownArchitecture if it is unknown, not supported, or its tensors do not match.
    """
    found = recognised_for(latent_format, bare_shapes)
    if found is None:
        first = ", ".join(list(bare_shapes)[:3]) or "none"
        raise UnknownArchitecture(f"VAE: its {len(bare_shapes)} tensors match no known VAE (the first are {first})")
    configs = CONFIGS if found.layout == "original" else DIFFUSERS_CONFIGS
    if found.name not in configs:
        raise UnknownArchitecture(f"recognised as the VAE of {found.title}, which cannot be built")
    try:
        return measured(found, configs[found.name](bare_shapes))
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as the VAE of {found.title}, but with other tensors: {error}") from error


def measured_folder_vae(folder_config: Mapping[str, Any], bare_shapes: Mapping[str, Shape]) -> VaeFacts:
    """Return the facts of the VAE of a diffusers folder with this configuration (including its class), with measured
    ratios.

    Raises UnknownArchitecture if the class is not supported, or the configuration does not fit it.
    """
    class_name, config = str(folder_config.get("_class_name")), dict(folder_config)
    if class_name not in FOLDER_KINDS:
        raise UnknownArchitecture(f"VAE folder: found class {class_name!r}, expected one of {', '.join(FOLDER_KINDS)}")
    facts = FACTS[FOLDER_KINDS[class_name](config)]
    beginnings = {"encoder": ("encoder.", "in_block."), "decoder": ("decoder.", "up_blocks.")}
    halves = {half: any(key.startswith(names) for key in bare_shapes) for half, names in beginnings.items()}
    try:
        found = measured(facts, config)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"VAE folder: the configuration does not fit {class_name}: {error}") from error
    return replace(found, layout="diffusers", has_encoder=halves["encoder"], has_decoder=halves["decoder"])
