"""Plan a VAE from a diffusers folder: a configuration, and weights under diffusers' names.

Takes the output of `pool.files.formats.model_folder`; reads no files. The configuration is untrusted: only arguments of
the class are passed on, and it may not request more layers than there are tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from modelpool.pool.families.detection.vaes import FACTS, VaeFacts
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.infer_config import whole_numbers
from modelpool.pool.models.components.common.vae_compression import measured
from modelpool.pool.models.components.common.vae_configs import Config
from modelpool.pool.models.components.vae.build_vae import VaePlan
from modelpool.pool.models.components.vae.ldm_names import convert_diffusers
from modelpool.pool.models.components.vae.vae_classes import FOLDER_CLASSES, VaeArchitecture
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import discover


def plan_folder_vae(
    class_name: str, config: Mapping[str, Any], shapes: Mapping[str, Shape], prefix: str = ""
) -> VaePlan:
    """Plan the VAE of a diffusers folder: its class, configuration, and tensors of `shapes` under `prefix`.

    Raises UnknownArchitecture if the class is not supported, or the configuration does not fit it.
    """
    module = next((cls for cls in FOLDER_CLASSES if cls.__name__ == class_name), None)
    if module is None:
        known = ", ".join(sorted(cls.__name__ for cls in FOLDER_CLASSES))
        raise UnknownArchitecture(f"VAE folder: found class {class_name!r}, expected one of {known}")
    own = _arguments(module, config)
    _check_counts(class_name, own, len(shapes))
    facts = FACTS[FOLDER_CLASSES[module](own)]
    try:
        facts = measured(_with_formats(facts, own), _with_defaults(module, own))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"VAE folder: the configuration does not fit {class_name}: {error}") from error
    facts = replace(
        facts,
        layout="diffusers",
        has_encoder=any(key.removeprefix(prefix).startswith(("encoder.", "in_block.")) for key in shapes),
        has_decoder=any(key.removeprefix(prefix).startswith(("decoder.", "up_blocks.")) for key in shapes),
    )
    key_map = discover(
        {key: tuple(shape) for key, shape in shapes.items()},
        lambda tensors: convert_diffusers({key.removeprefix(prefix): x for key, x in tensors.items()}),
    )
    return VaePlan(facts, own, prefix, key_map, VaeArchitecture(module, lambda _: own, convert_diffusers))


def _arguments(module: type[nn.Module], config: Mapping[str, Any]) -> Config:
    """Return the class arguments in `config`; metadata (versions, names) is dropped."""
    taken = set(inspect.signature(module.__init__).parameters) - {"self"}
    return {key: value for key, value in config.items() if key in taken}


def _with_defaults(module: type[nn.Module], config: Config) -> Config:
    parameters = inspect.signature(module.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty} | config


def _check_counts(class_name: str, config: Config, tensors: int) -> None:
    """Reject configurations with more layers than the file has tensors."""
    for key, value in config.items():
        if ("layers" in key or "blocks" in key) and any(number > tensors for number in whole_numbers(value)):
            raise UnknownArchitecture(
                f"VAE folder: {class_name}: found {key} {value!r}, expected no more than its {tensors} tensors"
            )


def _with_formats(facts: VaeFacts, config: Config) -> VaeFacts:
    """Return `facts` with the latent formats that match the configuration's scale, if shapes leave several."""
    channels, scale = config.get("latent_channels"), config.get("scaling_factor")
    if facts.name not in ("kl", "taesd") or not isinstance(scale, int | float):
        return facts
    fitting = {
        name: latent
        for name, latent in LATENT_FORMATS.items()
        if latent.dimensions == 2 and latent.channels == channels and abs(latent.scale - scale) < 1e-5
    }
    return replace(facts, latent_formats=tuple(fitting))
