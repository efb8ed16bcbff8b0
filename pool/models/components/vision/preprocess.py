"""Preprocess images for CLIP vision encoders, and run the encoders. No memory is managed here.

Three modes, by `pool.values.core.sampling_facts.VisionEncoderUse`: the complete image, blurred in proportion to the
downscale and squeezed into a square (Stable Video Diffusion); its centre (Wan, IP-Adapter), cropped like transformers'
image processor of CLIP; or the complete image as a square, with values from -1 to 1 (SigLIP). Images are prepared on
the CPU in float32. Shape legend: B batch, C channels, H W height and width, L states, D width of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.core.stage_params import PixelArray

#: pixel statistics of CLIP's training images, by channel, from 0 to 1. Source: openai/CLIP
MEANS, DEVIATIONS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
#: largest aspect ratio of the region from which the centre is resized
MOST_PROPORTION = 32
#: blur deviation per unit of downscale beyond 1, and the smallest deviation that is applied
_DEVIATION_PER_FACTOR, _LEAST_DEVIATION = 0.5, 0.001
#: blur window in deviations, and its minimum in pixels
_WINDOW, _LEAST_WINDOW = 4, 3


def preprocess_image(pixels_HWC: PixelArray, side: int, vision_use: VisionEncoderUse) -> Tensor:
    """Return an image for an encoder of squares of `side` pixels, [1, C, H, W], normalised with CLIP's mean and
    deviation."""
    match vision_use:
        case VisionEncoderUse.PROJECTED:
            pixels_BCHW = (_squeezed(_between_ones(pixels_HWC), side) + 1.0) / 2.0
        case VisionEncoderUse.PENULTIMATE | VisionEncoderUse.WORDS | VisionEncoderUse.CENTER_PROJECTED:
            pixels_BCHW = _unit(_middle(pixels_HWC, side))
        case VisionEncoderUse.LAST | VisionEncoderUse.POOLED:
            resized = Image.fromarray(pixels_HWC).resize((side, side), Image.Resampling.BICUBIC)
            return _unit(np.asarray(resized)) * 2.0 - 1.0
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    normal_BCHW: Tensor = (pixels_BCHW - means) / deviations
    return normal_BCHW


def states(module: nn.Module, pixels_BCHW: Tensor, vision_use: VisionEncoderUse) -> Tensor:
    """Return the states that `module` computes for a preprocessed image, [B, L, D]."""
    if vision_use is VisionEncoderUse.WORDS:
        words_BLD: Tensor = module(pixels_BCHW)
        return words_BLD
    output: Any = module(pixel_values=pixels_BCHW, output_hidden_states=vision_use is VisionEncoderUse.PENULTIMATE)
    if vision_use in (VisionEncoderUse.PROJECTED, VisionEncoderUse.CENTER_PROJECTED):
        projected_BLD: Tensor = output.image_embeds.unsqueeze(1)
        return projected_BLD
    if vision_use is VisionEncoderUse.POOLED:
        pooled_BLD: Tensor = output.pooler_output.unsqueeze(1)
        return pooled_BLD
    states_BLD: Tensor = output.last_hidden_state if vision_use is VisionEncoderUse.LAST else output.hidden_states[-2]
    return states_BLD


def states_shape(module: nn.Module, vision_use: VisionEncoderUse) -> tuple[int, int]:
    """Return the number of states, and their width."""
    config: Any = module.config  # transformers is not typed
    if vision_use in (VisionEncoderUse.PROJECTED, VisionEncoderUse.CENTER_PROJECTED):
        return 1, int(config.projection_dim)
    if vision_use is VisionEncoderUse.POOLED:
        return 1, int(config.hidden_size)
    if vision_use is VisionEncoderUse.LAST:
        return (int(config.image_size) // int(config.patch_size)) ** 2, int(config.hidden_size)
    if vision_use is VisionEncoderUse.WORDS:
        width: Any = module.width
        return (int(config.image_size) // int(config.patch_size)) ** 2, int(width)
    return 1 + (int(config.image_size) // int(config.patch_size)) ** 2, int(config.hidden_size)


def side_of(module: nn.Module) -> int:
    """Return the side of the encoder's input in pixels."""
    config: Any = module.config
    return int(config.image_size)


def _unit(pixels_HWC: PixelArray) -> Tensor:
    return torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 255.0


def _between_ones(pixels_HWC: PixelArray) -> Tensor:
    return _unit(pixels_HWC) * 2.0 - 1.0


def _squeezed(pixels_BCHW: Tensor, side: int) -> Tensor:
    """Resize an image to a square; blur first when downscaling, to avoid aliasing. Source of the figures: diffusers,
    StableVideoDiffusionPipeline, and scikit-image 0.19, `resize`."""
    for dim in (3, 2):
        deviation = (pixels_BCHW.shape[dim] / side - 1.0) * _DEVIATION_PER_FACTOR
        if deviation > _LEAST_DEVIATION:
            pixels_BCHW = _blurred(pixels_BCHW, dim, deviation)
    small_BCHW: Tensor = functional.interpolate(pixels_BCHW, size=(side, side), mode="bicubic", align_corners=True)
    return small_BCHW


def _blurred(pixels_BCHW: Tensor, dim: int, deviation: float) -> Tensor:
    """Blur along one dimension with an odd window; the image is mirrored at its edges."""
    window = int(max(_WINDOW * deviation, _LEAST_WINDOW)) | 1
    reach = window // 2
    places = torch.arange(window, dtype=torch.float32) - reach
    weights = torch.exp(-places.square() / (2.0 * deviation**2))
    shape = (1, 1, 1, window) if dim == 3 else (1, 1, window, 1)
    kernel_C1HW = (weights / weights.sum()).reshape(shape).expand(pixels_BCHW.shape[1], *shape[1:])
    sides = (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach)
    padded_BCHW = functional.pad(pixels_BCHW, sides, mode="reflect")
    blurred_BCHW: Tensor = functional.conv2d(padded_BCHW, kernel_C1HW, groups=pixels_BCHW.shape[1])
    return blurred_BCHW


def _middle(pixels_HWC: PixelArray, side: int) -> PixelArray:
    """Return the centre square of an image, resized so that the shorter side is `side`."""
    height, width = pixels_HWC.shape[:2]
    shorter = min(height, width)
    reach = MOST_PROPORTION * shorter  # pixels far outside of the square would only cost memory
    top, left = max(0, (height - reach) // 2), max(0, (width - reach) // 2)
    pixels_HWC = pixels_HWC[top : top + reach, left : left + reach]
    height, width = pixels_HWC.shape[:2]
    longer = max(height, width)
    sizes = (side, int(side * longer / shorter))
    size = sizes if width <= height else sizes[::-1]
    small_HWC = np.asarray(Image.fromarray(pixels_HWC).resize(size, Image.Resampling.BICUBIC))
    top, left = (small_HWC.shape[0] - side) // 2, (small_HWC.shape[1] - side) // 2
    return small_HWC[top : top + side, left : left + side]
