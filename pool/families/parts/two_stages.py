"""What two models that generate one image share: stage C (prior) and stage B (decoder) of Stable Cascade. Torch-free.

Stage B reads the latent of stage C, and its pooled text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.families.parts.forward import config_of
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role

if TYPE_CHECKING:
    from torch import Tensor, nn

#: pixels per this number of cells of stage C's latent. Source: `resolution_multiple` of diffusers'
#: StableCascadePriorPipeline
PRIOR_PIXELS, PRIOR_CELLS = 128, 3
#: weight that reads the pooled text, in the naming of diffusers and of the published stage B
_POOLED = ("clip_txt_pooled_mapper.weight", "clip_mapper.weight")
#: a tensor of stage B, and its dimension with the channel count of stage C's latent
_READS_PRIOR = ("effnet_mapper.0.weight", 1)


def prior_channels(module: nn.Module) -> int:
    """Return the channels of stage C's latents that stage B reads."""
    return int(config_of(module).effnet_in_channels)


def empty_text(module: nn.Module, tokens: int) -> dict[str, Tensor]:
    """Return the text inputs of stage B, which does not read the states, on the meta device, with a batch of one."""
    import torch

    width = int(config_of(module).clip_text_pooled_in_channels)
    meta = torch.device("meta")
    return {"context": torch.empty((1, tokens, width), device=meta), "pooled": torch.empty((1, width), device=meta)}


def with_text_encoder(family: LocatedFamily, keys: Iterable[str]) -> LocatedFamily:
    """Return `family` with the text encoder that some files and folders of its family carry, if it is among `keys`;
    other families unchanged."""
    carried = family.carried_text
    if carried is None:
        return family
    prefix = f"{Role.TEXT_ENCODER.value}." if family.configs else carried.prefix
    if not any(key.startswith(prefix) for key in keys):
        return family
    return replace(
        family,
        prefixes={Role.TEXT_ENCODER: prefix, **family.prefixes},
        architectures={Role.TEXT_ENCODER: Architecture.TEXT_MODEL, **family.architectures},
        texts=carried.texts,
        text_set=carried.text_set,
    )


def prior_cells(width: int, height: int) -> tuple[int, int]:
    """Return height and width of stage C's latent for an image of this many pixels."""
    return height * PRIOR_CELLS // PRIOR_PIXELS, width * PRIOR_CELLS // PRIOR_PIXELS


def prior_side(cells: int) -> int:
    """Return the shortest side of an image, a multiple of 8 pixels, with so many cells of stage C's latent."""
    return LatentFacts(LATENT_FORMATS["cascade_c"].channels, PRIOR_PIXELS, 1.0, cells=PRIOR_CELLS).pixels_of(cells)


def pooled_width(bare: Mapping[str, Shape]) -> int | None:
    """Return the width of the pooled text that a stage reads, by the shapes `bare` of its diffusion model (keys without
    prefix); None if no tensor tells."""
    return next((bare[key][1] for key in _POOLED if len(bare.get(key, ())) == 2), None)


def check_stage(family: LocatedFamily, bare: Mapping[str, Shape]) -> None:
    """Check that stage B, with tensors of the shapes `bare` (keys without prefix), reads latents of stage C; other
    families pass. Raises UnknownArchitecture."""
    key, dimension = _READS_PRIOR
    if not family.sampling.is_decoder_stage or len(bare.get(key, ())) <= dimension:
        return
    expected = LATENT_FORMATS["cascade_c"].channels
    if bare[key][dimension] != expected:
        found = bare[key][dimension]
        raise UnknownArchitecture(f"it reads latents of {found} channels, expected the {expected} of stage C")
