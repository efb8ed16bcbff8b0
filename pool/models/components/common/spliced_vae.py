"""VAEs with parts in several places of a file. Torch-free and pure.

SV3D p was trained with a video decoder, which its file stores without an encoder where complete files have the VAE; the
encoder is in the image VAE that encodes its input image. Knows which tensors of each place belong to the VAE, and their
names in a contiguous VAE. What decodes the audio of LTX-2 is a part of the VAE with names of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.unet_families import UNETS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.specs.spec import Role

#: key prefix of the video decoder, and a part of its keys that an image decoder lacks
_DECODER, _OF_FRAMES = "first_stage_model.decoder.", ".time_stack."
#: parts of the image VAE that the video decoder replaces
_REPLACED = ("decoder.", "post_quant_conv.")


def with_decoder_of_frames(family: LocatedFamily, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `family` with the video decoder among tensors of `shapes`; unchanged if they have none."""
    unet = UNETS.get(family.name)
    if unet is None or not unet.may_have_frame_decoder:
        return family
    if not any(key.startswith(_DECODER) and _OF_FRAMES in key for key in shapes):
        return family
    return replace(family, extra_prefixes={**family.extra_prefixes, Role.VAE: (_DECODER,)})


def is_spliced(family: LocatedFamily) -> bool:
    """Return whether the VAE of `family` is in two places."""
    return _DECODER in family.extra_prefixes.get(Role.VAE, ())


def sound_prefixes(family: LocatedFamily) -> tuple[str, ...]:
    """Return the key prefixes of what decodes audio, next to the VAE of `family`; () for families without audio."""
    return () if is_spliced(family) else family.extra_prefixes.get(Role.VAE, ())


def sound_configs(family: LocatedFamily) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of what decodes audio, by folder; empty for a single file."""
    return dict(family.sound_configs)


def names_in_vae(family: LocatedFamily, keys: Iterable[str]) -> dict[str, str]:
    """Return the names that the tensors among `keys` of the VAE of `family` have in a contiguous VAE."""
    prefix, extra = family.prefixes[Role.VAE], (_DECODER,) if is_spliced(family) else ()
    names, sound = {}, sound_prefixes(family)
    for key in keys:
        if key.startswith(sound):
            continue
        if extra and key.startswith(extra):
            names[key] = "decoder." + key.removeprefix(_DECODER)
        elif key.startswith(prefix) and not (extra and key.removeprefix(prefix).startswith(_REPLACED)):
            names[key] = key.removeprefix(prefix)
    return names
