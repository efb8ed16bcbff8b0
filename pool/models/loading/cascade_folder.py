"""Recognises diffusers folders with a stage of Stable Cascade as families. Torch-free and pure.

Each stage has a separate folder (`stable-cascade-prior`, `stable-cascade`). The tensors determine the stage; the latent
scale comes from the configuration of the VAE, which must be consistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.unet_families import CASCADES
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.models.loading.folder_values import number_in, wrong_value
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import Role

#: the folders of the diffusion models of stage C and of stage B, of stage A, and of the vision encoder of stage C
PRIOR, DECODER, VAE, VISION = "prior", "decoder", "vqgan", "image_encoder"
#: default of the VAE's class for what a folder leaves out. Source: PaellaVQModel of diffusers 0.42
_DEFAULT_SCALE = 0.3764


def is_cascade(shapes: Mapping[str, Shape]) -> bool:
    """Whether a folder of either stage has tensors with such names."""
    return any(key.startswith((f"{PRIOR}.", f"{DECODER}.")) for key in shapes)


def cascade_folder_family(header: Header, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return the family of the folder of `header`, with tensors of `shapes`.

    Raises UnknownArchitecture naming the component and the key, for a model that this version does not run and for
    invalid configurations.
    """
    place = PRIOR if any(key.startswith(f"{PRIOR}.") for key in shapes) else DECODER
    model_shapes = {
        key.removeprefix(f"{place}."): shape for key, shape in shapes.items() if key.startswith(f"{place}.")
    }
    found = recognise_diffusion(model_shapes)
    base = None if found is None else CASCADES.get(found.name)
    if base is None:
        what = "no known model" if found is None else found.title
        raise UnknownArchitecture(f"found {what} in the folder {place!r}, expected a stage of Stable Cascade")
    if base.carried_vision:
        base = replace(base, carried_vision=f"{VISION}.").with_carried_vision(shapes)
    named = {
        Role.DIFFUSION_MODEL: place,
        Role.TEXT_ENCODER: Role.TEXT_ENCODER.value,
        Role.VAE: VAE,
        Role.VISION_ENCODER: VISION,
    }
    folders = {role: named[role] for role in base.prefixes}
    missing = [name for name in folders.values() if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing:
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    config = {role: header.configs.get(name, {}) for role, name in folders.items() if not role.is_text_encoder}
    family = replace(base, prefixes={role: f"{name}." for role, name in folders.items()}, configs=config)
    return replace(family, scaling_factor=_scale(config[Role.VAE])) if Role.VAE in config else family


def _scale(config: Mapping[str, Any]) -> float:
    """Return the factor between the VAE's latents and stage B's."""
    scale = number_in(VAE, config, "scale_factor", _DEFAULT_SCALE)
    if not scale > 0.0:
        raise wrong_value(VAE, "scale_factor", scale, "a number above 0")
    return 1.0 / scale
