"""Folders of diffusers with a stage of Stable Cascade, as families. Torch-free and pure.

Each stage has a folder of its own (`stable-cascade-prior`, `stable-cascade`). Which stage it is, its tensors tell; the
scale of latents is taken from the configuration of the VAE, which has to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.diffusion import recognise_diffusion
from modelpool.pool.families.cascade_families import CASCADES
from modelpool.pool.families.family import Family
from modelpool.pool.formats.safetensors_file import Header, Shape
from modelpool.pool.formats.strict_json import brief, finite_number
from modelpool.pool.specs.spec import Role

#: the folders of the diffusion models of stage C and of stage B, and of stage A
PRIOR, DECODER, VAE = "prior", "decoder", "vqgan"
#: what a folder leaves out is what the class of the VAE takes then. Source: PaellaVQModel of diffusers 0.42
_USUAL_SCALE = 0.3764


def is_cascade(shapes: Mapping[str, Shape]) -> bool:
    """Whether tensors of such names are those of a folder of either stage."""
    return any(key.startswith((f"{PRIOR}.", f"{DECODER}.")) for key in shapes)


def cascade_folder_family(header: Header, shapes: Mapping[str, Shape]) -> Family:
    """The family of the folder that `header` is of, with tensors of `shapes`.

    Raises UnknownArchitecture naming the component and the key, for a model that this version does not run and for
    configurations that cannot be.
    """
    place = PRIOR if any(key.startswith(f"{PRIOR}.") for key in shapes) else DECODER
    own = {key.removeprefix(f"{place}."): shape for key, shape in shapes.items() if key.startswith(f"{place}.")}
    found = recognise_diffusion(own)
    base = None if found is None else CASCADES.get(found.name)
    if base is None:
        what = "no model that is known" if found is None else found.title
        raise UnknownArchitecture(f"found {what} in the folder {place!r}, expected a stage of Stable Cascade")
    named = {Role.DIFFUSION_MODEL: place, Role.TEXT_ENCODER: Role.TEXT_ENCODER.value, Role.VAE: VAE}
    folders = {role: named[role] for role in base.prefixes}
    missing = [name for name in folders.values() if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing:
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    said = {role: header.configs.get(name, {}) for role, name in folders.items() if not role.is_text_encoder}
    family = replace(base, prefixes={role: f"{name}." for role, name in folders.items()}, configs=said)
    return replace(family, scaling_factor=_scale(said[Role.VAE])) if Role.VAE in said else family


def _scale(said: Mapping[str, Any]) -> float:
    """How many times the VAE's latents those of stage B are."""
    value = said.get("scale_factor", _USUAL_SCALE)
    number = finite_number(value)
    if number is None or not number > 0.0:
        raise UnknownArchitecture(
            f"configuration of {VAE}: scale_factor: found {brief(value)}, expected a number above 0"
        )
    return 1.0 / number
