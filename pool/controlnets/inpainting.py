"""ControlNets that are told which part of an image is to be made anew: which those are, and how their image says it.

Shape legend: C channels, H W height and width of an image, or of its latent.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from modelpool.pool.conditioning.image_concat import cell_corners
from modelpool.pool.controlnets.kinds import UNION_MODES, ControlKind
from modelpool.pool.core.refs import HoleTold
from modelpool.pool.core.stage_params import PixelArray
from modelpool.pool.pixels.image_ops import HALF

#: what a request says of a ControlNet that reads pixels: that it fills holes, or that it does not
INPAINT, PLAIN = "inpaint", "plain"
#: of a ControlNet of several modes, that which fills holes
_REPAINT = UNION_MODES.index("repaint")
#: what stands in a hole of pixels from 0 to 1. Source: the card of lllyasviel/control_v11p_sd15_inpaint
_NOTHING = -1.0
#: of one of several modes. Source: the example of diffusers' StableDiffusionXLControlNetUnionInpaintPipeline
_BLACK = 0.0


def says_hole(kind: ControlKind) -> bool:
    """Whether a request says of ControlNets of this kind if they fill holes: no key and no shape tells it."""
    return kind.module is ControlNetModel


def hole_told(
    kind: ControlKind, control: nn.Module, mode: int | None, said: str | int | None, named: bool
) -> HoleTold | None:
    """How a ControlNet can be told of a hole, in the mode of this number. `said` is the mode in the words of a request,
    `named` whether it is called as those that fill holes are; None where it is not."""
    if says_hole(kind):
        config: Any = control.config
        # nothing says that those for SDXL which are called so read a hole alike
        is_told = said == INPAINT or (said is None and named and not config.addition_embed_type)
        return HoleTold.ALWAYS if is_told else None
    if kind.beside_channels(control):
        return HoleTold.ALWAYS
    if kind.is_told_beside(control):
        return HoleTold.BESIDE
    if kind.modes == UNION_MODES and mode == _REPAINT:
        return HoleTold.MASKED
    return None


def with_hole(pixels_CHW: Tensor, mask_HW: PixelArray, kind: ControlKind) -> Tensor:
    """Pixels from 0 to 1 with a hole where the mask is at least half white, as ControlNets of this kind read it."""
    nothing = _NOTHING if says_hole(kind) else _BLACK
    return pixels_CHW.masked_fill(torch.from_numpy(mask_HW >= HALF), nothing)


def with_mask(latent_CHW: Tensor, mask_HW: PixelArray, hidden_CHW: Tensor | None = None) -> Tensor:
    """The latent of an image and behind it, as one more channel, which cells are kept: 1, and 0 where the first pixel
    of a cell is made anew. The hole is in that image, or in another, the latent of which stands behind that. Source:
    `prepare_image_with_mask` of diffusers' pipelines, and its ZImageControlNetInpaintPipeline."""
    cells = latent_CHW.shape[-2], latent_CHW.shape[-1]
    kept = 1 - cell_corners(mask_HW, cells)[None]
    return torch.cat((latent_CHW, kept) if hidden_CHW is None else (latent_CHW, kept, hidden_CHW))
