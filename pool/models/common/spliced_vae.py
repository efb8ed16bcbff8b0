"""VAEs whose two halves lie in two places of a file. Torch-free and pure.

SV3D p was trained with a decoder that sees all frames, which its file has where VAEs are in whole files, without an
encoder; the encoder is in the VAE of images that its image is encoded with. Knows which tensors of which place are
the VAE's, and what they are called in a VAE of one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from modelpool.pool.families.family import Family
from modelpool.pool.families.video_unet_families import SV3D_P
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role

#: where the decoder of frames is, and what it has that one of images has not
_DECODER, _OF_FRAMES = "first_stage_model.decoder.", ".time_stack."
#: what of the VAE of images another decoder takes the place of
_REPLACED = ("decoder.", "post_quant_conv.")


def with_decoder_of_frames(family: Family, shapes: Mapping[str, Shape]) -> Family:
    """`family` with its decoder of frames among tensors of `shapes`; as it is where they have none."""
    if family.name != SV3D_P.name:
        return family
    if not any(key.startswith(_DECODER) and _OF_FRAMES in key for key in shapes):
        return family
    return replace(family, besides={**family.besides, Role.VAE: (_DECODER,)})


def is_spliced(family: Family) -> bool:
    """Whether the VAE of `family` lies in two places."""
    return Role.VAE in family.besides


def names_in_vae(family: Family, keys: Iterable[str]) -> dict[str, str]:
    """What the tensors of the VAE of `family` among `keys` are called in a VAE of one place."""
    prefix, beside = family.prefixes[Role.VAE], family.besides.get(Role.VAE, ())
    names = {}
    for key in keys:
        if beside and key.startswith(beside):
            names[key] = "decoder." + key.removeprefix(_DECODER)
        elif key.startswith(prefix) and not (beside and key.removeprefix(prefix).startswith(_REPLACED)):
            names[key] = key.removeprefix(prefix)
    return names
