"""Models that are two diffusion models, one for much noise and one for little, as families: Wan 2.2 of 14B. Torch-free.

Both have the same keys and shapes, and no tensor tells which is which: a person says so, in a model of separate files
(`low_noise` of `pool.formats.model_description`), or a folder of diffusers does. A file that is one of them runs
alone, as the family that its own tensors tell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.expert_names import HIGH, LOW, half_named
from modelpool.pool.core.sampling_facts import LowNoise
from modelpool.pool.detection.diffusion import DiffusionFacts, recognise_diffusion
from modelpool.pool.detection.parts import LOW_NOISE_PREFIX
from modelpool.pool.families.facts import ModelFacts
from modelpool.pool.families.family import Family
from modelpool.pool.families.transformer_families import family_of
from modelpool.pool.families.video_facts import VIDEO_FACTS, WAN_22_T2V
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role


def _pair(name: str, title: str, facts: ModelFacts) -> Family:
    family = family_of(name, facts)
    before_vae: dict[Role, str] = {role: prefix for role, prefix in family.prefixes.items() if role is not Role.VAE}
    high = family.architectures[Role.DIFFUSION_MODEL]
    return replace(
        family,
        title=title,
        prefixes={**before_vae, Role.DIFFUSION_MODEL_2: LOW_NOISE_PREFIX, Role.VAE: family.prefixes[Role.VAE]},
        architectures={**family.architectures, Role.DIFFUSION_MODEL_2: high},
        sampling=replace(family.sampling, low_noise=LowNoise(facts.boundary, facts.low_cfg)),
    )


#: by the name that recognition gives each of the two
PAIRS: Mapping[str, Family] = MappingProxyType(
    {
        "wan_t2v": _pair("wan_t2v", "Wan 2.2 text-to-video, both models", WAN_22_T2V),
        "wan22_i2v": _pair("wan22_i2v", "Wan 2.2 image-to-video, both models", VIDEO_FACTS["wan22_i2v"]),
    }
)


def pair_of(found: DiffusionFacts, second: Mapping[str, Shape], of: str = "") -> Family:
    """The family of a model whose diffusion model was `found` and whose second one has tensors of the shapes `second`,
    keys without what they begin with in whole files; `of` is the file that has it.

    Raises UnknownArchitecture where they make no pair.
    """
    family = PAIRS.get(found.name)
    if family is None:
        raise UnknownArchitecture(f"{of or LOW_NOISE_PREFIX} is a model for low noise, and {found.title} has none")
    low = recognise_diffusion(second)
    if low is None:
        raise UnknownArchitecture(f"its model for low noise{_in(of)} is no diffusion model that is known")
    differing = [
        f"{key}: {low.config.get(key)}, expected {value}"
        for key, value in found.config.items()
        if low.config.get(key) != value
    ]
    if low.name != found.name or differing:
        told = "; ".join(differing) or f"expected {found.title} like its model for high noise"
        raise UnknownArchitecture(f"its model for low noise{_in(of)} is {low.title} with other sizes: {told}")
    return family


def misnamed(high: str, low: str) -> str:
    """What to say of two files that are one, or of which a name speaks of the other model alone; empty where they are
    as they are given."""
    if os.path.realpath(high) == os.path.realpath(low):
        return f"{low} is given for high noise and for low noise, expected a file for each"
    if half_named(high) == LOW and half_named(low) == HIGH:
        return (
            f"{high} is given as its model for high noise and {low} as that for low noise, expected them the other way"
        )
    for file, half, other in ((high, HIGH, LOW), (low, LOW, HIGH)):
        if half_named(file) == other:
            return f"{file} is given as its model for {half} noise, expected that: its name speaks of {other} noise"
    return ""


def _in(file: str) -> str:
    return f" in {file}" if file else ""
