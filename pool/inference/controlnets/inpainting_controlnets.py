"""Inpainting ControlNets: which ControlNets read a mask, and how the mask is put into their control image.

Shape legend: C channels, H W height and width of an image, or of its latent.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.image_concat import cell_corners
from modelpool.pool.inference.controlnets.cascade_controlnets import WITH_MASK
from modelpool.pool.inference.controlnets.controlnet_kinds import UNION_MODES, ControlKind
from modelpool.pool.inference.pixels.image_ops import HALF
from modelpool.pool.values.core.refs import ControlMaskMode
from modelpool.pool.values.core.stage_params import PixelArray

#: modes in a request for a ControlNet that reads pixels: for inpainting, or not
INPAINT, PLAIN = "inpaint", "plain"
#: the inpainting mode of a ControlNet with several modes
_REPAINT = UNION_MODES.index("repaint")
#: value of masked pixels (from 0 to 1). Source: the card of lllyasviel/control_v11p_sd15_inpaint
_NOTHING = -1.0
#: the same of a ControlNet with several modes. Source: the example of diffusers'
#: StableDiffusionXLControlNetUnionInpaintPipeline
_BLACK = 0.0


def is_inpaint_by_request(kind: ControlKind) -> bool:
    """Whether a request defines if ControlNets of this kind are for inpainting: no key and no shape determines it."""
    return kind.module is ControlNetModel


def mask_form(
    kind: ControlKind, control: nn.Module, mode: int | None, requested: str | int | None, named: bool
) -> ControlMaskMode | None:
    """Return how a ControlNet reads a mask in mode `mode`; None if it does not. `requested` is the mode in the request,
    `named` whether it is named like an inpainting ControlNet."""
    if is_inpaint_by_request(kind):
        config: Any = control.config
        # whether ControlNets for SDXL with such names read masks alike is unknown
        reads_mask = requested == INPAINT or (requested is None and named and not config.addition_embed_type)
        return ControlMaskMode.ALWAYS if reads_mask else None
    if kind.cell_side:  # without a mask, its image has one as the alpha channel
        return ControlMaskMode.MASKED if kind.pixel_channels(control) == WITH_MASK else None
    if kind.extra_channels(control):
        return ControlMaskMode.ALWAYS
    if kind.reads_masked_latent(control):
        return ControlMaskMode.SEPARATE
    if kind.modes == UNION_MODES and mode == _REPAINT:
        return ControlMaskMode.MASKED
    return None


def with_masked_pixels(pixels_CHW: Tensor, mask_HW: PixelArray, kind: ControlKind) -> Tensor:
    """Return pixels from 0 to 1 with masked pixels (at least half white) as ControlNets of this kind expect them."""
    nothing = _NOTHING if is_inpaint_by_request(kind) else _BLACK
    return pixels_CHW.masked_fill(torch.from_numpy(mask_HW >= HALF), nothing)


def with_mask(latent_CHW: Tensor, mask_HW: PixelArray, hidden_CHW: Tensor | None = None) -> Tensor:
    """Return the latent of an image and, as one more channel, the kept positions: 1, and 0 where the first pixel of a
    position is masked. If the mask is for another image, the masked latent of that follows. Source:
    `prepare_image_with_mask` of diffusers' pipelines, and its ZImageControlNetInpaintPipeline."""
    cells = latent_CHW.shape[-2], latent_CHW.shape[-1]
    kept = 1 - cell_corners(mask_HW, cells)[None]
    return torch.cat((latent_CHW, kept) if hidden_CHW is None else (latent_CHW, kept, hidden_CHW))
