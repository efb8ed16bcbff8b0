"""Pixels and frames per latent cell, from a VAE's configuration. Torch-free.

Published VAEs have the figures in `pool.families.detection.vaes`; the figures of smaller ones of the same layout follow
only from their structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.families.detection.vaes import FACTS, HUNYUAN_IMAGE_REFINER, VaeFacts, recognise_vae
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.vae_config_table import CONFIGS, DIFFUSERS_CONFIGS, FOLDER_KINDS, MEASURES
from modelpool.pool.models.components.common.vae_configs import Config
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

_REFINER = HUNYUAN_IMAGE_REFINER


def measured(facts: VaeFacts, config: Config) -> VaeFacts:
    """Return `facts` with the ratios of a VAE that is built with `config`."""
    channels, side, frames = MEASURES[facts.name](config)
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
        matching = counted(len(bare_shapes), "tensor matches", "tensors match")
        raise UnknownArchitecture(f"VAE: its {matching} no known VAE (the first are {first})")
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
