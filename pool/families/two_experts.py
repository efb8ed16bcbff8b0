"""Families of models with two experts, high-noise and low-noise: Wan 2.2 14B. Torch-free.

Both experts have the same keys and shapes, and no tensor tells which is which: the user states it in a model of
separate files (`low_noise` of `pool.files.formats.model_description`), or a diffusers folder does. A file with one
expert runs alone, as the family that its tensors tell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.detection.parts import LOW_NOISE_PREFIX
from modelpool.pool.families.parts.family import Family, TwoExperts
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.transformer_families import usual_location
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.expert_names import HIGH, LOW, expert_named
from modelpool.pool.values.specs.spec import Role


def _family(expert: Family, pair: TwoExperts) -> LocatedFamily:
    family = usual_location(replace(expert, sampling=pair.sampling))
    before_vae: dict[Role, str] = {role: prefix for role, prefix in family.prefixes.items() if role is not Role.VAE}
    high = family.architectures[Role.DIFFUSION_MODEL]
    return replace(
        family,
        title=pair.title,
        prefixes={**before_vae, Role.DIFFUSION_MODEL_2: LOW_NOISE_PREFIX, Role.VAE: family.prefixes[Role.VAE]},
        architectures={**family.architectures, Role.DIFFUSION_MODEL_2: high},
    )


#: by the name that recognition returns for each expert
TWO_EXPERTS: Mapping[str, LocatedFamily] = MappingProxyType(
    {
        family.name: _family(family, family.two_experts)
        for family in defined_families()
        if family.two_experts is not None
    }
)


def two_expert_family(found: DiffusionFacts, second: Mapping[str, Shape], of: str = "") -> LocatedFamily:
    """Return the two-expert family of the high-noise expert `found` and of a low-noise expert with tensors of the
    shapes `second` (keys without prefix); `of` is the file of the latter.

    Raises UnknownArchitecture if they do not match.
    """
    family = TWO_EXPERTS.get(found.name)
    if family is None:
        raise UnknownArchitecture(f"{of or LOW_NOISE_PREFIX} is a low-noise expert, but {found.title} has none")
    low = recognise_diffusion(second)
    if low is None:
        raise UnknownArchitecture(f"its low-noise expert{_in(of)} is not a known diffusion model")
    if difference := differing(found, low, "its high-noise expert"):
        raise UnknownArchitecture(f"its low-noise expert{_in(of)} is {difference}")
    return family


def differing(found: DiffusionFacts, other: DiffusionFacts, of: str) -> str:
    """Return what `other` is unless it has the family and the sizes of `found`, which is `of` the model; else empty."""
    sizes = [
        f"{key}: {other.config.get(key)}, expected {value}"
        for key, value in found.config.items()
        if other.config.get(key) != value
    ]
    if other.name == found.name and not sizes:
        return ""
    difference = "; ".join(sizes) or f"expected {found.title} like {of}"
    return f"{other.title} with different sizes: {difference}"


def misassigned(high: str, low: str) -> str:
    """Return an error message if both files are the same, or if a file name contradicts its role; empty if neither."""
    if os.path.realpath(high) == os.path.realpath(low):
        return f"{low} is used for both high noise and low noise, expected two files"
    if expert_named(high) == LOW and expert_named(low) == HIGH:
        return f"{high} is used as high-noise expert and {low} as low-noise expert, expected them swapped"
    for file, expert, other in ((high, HIGH, LOW), (low, LOW, HIGH)):
        if expert_named(file) == other:
            return f"{file} is used as {expert}-noise expert, but its name says {other} noise"
    return ""


def _in(file: str) -> str:
    return f" in {file}" if file else ""
