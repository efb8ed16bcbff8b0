"""VAEs whose encoder and decoder are in two places of a file. Torch-free and pure.

SV3D p was trained with a video decoder, which its file stores without an encoder where complete files have the VAE; the
encoder is in the image VAE that encodes its input image. Knows which tensors of each place belong to the VAE, and their
names in a contiguous VAE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from modelpool.pool.families.modules.stable_video import SV3D_P
from modelpool.pool.families.parts.family import Family
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role

#: key prefix of the video decoder, and a part of its keys that an image decoder lacks
_DECODER, _OF_FRAMES = "first_stage_model.decoder.", ".time_stack."
#: parts of the image VAE that the video decoder replaces
_REPLACED = ("decoder.", "post_quant_conv.")


def with_decoder_of_frames(family: Family, shapes: Mapping[str, Shape]) -> Family:
    """Return `family` with the video decoder among tensors of `shapes`; unchanged if they have none."""
    if family.name != SV3D_P.name:
        return family
    if not any(key.startswith(_DECODER) and _OF_FRAMES in key for key in shapes):
        return family
    return replace(family, extra_prefixes={**family.extra_prefixes, Role.VAE: (_DECODER,)})


def is_spliced(family: Family) -> bool:
    """Return whether the VAE of `family` is in two places."""
    return Role.VAE in family.extra_prefixes


def names_in_vae(family: Family, keys: Iterable[str]) -> dict[str, str]:
    """Return the names that the tensors among `keys` of the VAE of `family` have in a contiguous VAE."""
    prefix, extra = family.prefixes[Role.VAE], family.extra_prefixes.get(Role.VAE, ())
    names = {}
    for key in keys:
        if extra and key.startswith(extra):
            names[key] = "decoder." + key.removeprefix(_DECODER)
        elif key.startswith(prefix) and not (extra and key.removeprefix(prefix).startswith(_REPLACED)):
            names[key] = key.removeprefix(prefix)
    return names
