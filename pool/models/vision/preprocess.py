"""Images as vision encoders are shown them, and what is read of them. No memory is managed here.

Two ways, by `pool.core.sampling_facts.Sight`: the whole image, blurred as much as it is made smaller and
squeezed into a square (Stable Video Diffusion); or its middle (Wan), as transformers' own image processor of CLIP cuts
it. Images are prepared on the CPU in float32.

Shape legend: B batch, C channels, H W height and width, L states, D width of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.core.sampling_facts import Sight
from modelpool.pool.core.stage_params import PixelArray

#: of the images that CLIP was trained with, by channel, from 0 to 1. Source: openai/CLIP
MEANS, DEVIATIONS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
#: of an image whose middle is seen, so many times its shorter side at most
MOST_PROPORTION = 32
#: deviations of a blur, for each side that becomes so many times as small, beyond 1; the least that is seen
_DEVIATION_PER_FACTOR, _LEAST_DEVIATION = 0.5, 0.001
#: its window in deviations, and at least in pixels
_WINDOW, _LEAST_WINDOW = 4, 3


def shown(pixels_HWC: PixelArray, side: int, sight: Sight) -> Tensor:
    """An image as an encoder for squares of `side` pixels is shown it, [1, C, H, W] with CLIP's mean and deviation."""
    match sight:
        case Sight.PROJECTED:
            pixels_BCHW = (_squeezed(_between_ones(pixels_HWC), side) + 1.0) / 2.0
        case Sight.PENULTIMATE | Sight.WORDS:
            pixels_BCHW = _unit(_middle(pixels_HWC, side))
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    normal_BCHW: Tensor = (pixels_BCHW - means) / deviations
    return normal_BCHW


def states(module: nn.Module, shown_BCHW: Tensor, sight: Sight) -> Tensor:
    """What `module` says of an image that it is `shown`, [B, L, D]."""
    if sight is Sight.WORDS:
        words_BLD: Tensor = module(shown_BCHW)
        return words_BLD
    seen: Any = module(pixel_values=shown_BCHW, output_hidden_states=sight is Sight.PENULTIMATE)
    states_BLD: Tensor = seen.image_embeds.unsqueeze(1) if sight is Sight.PROJECTED else seen.hidden_states[-2]
    return states_BLD


def states_shape(module: nn.Module, sight: Sight) -> tuple[int, int]:
    """How many states there are, and how wide each is."""
    config: Any = module.config  # transformers is not typed
    if sight is Sight.PROJECTED:
        return 1, int(config.projection_dim)
    if sight is Sight.WORDS:
        width: Any = module.width
        return (int(config.image_size) // int(config.patch_size)) ** 2, int(width)
    return 1 + (int(config.image_size) // int(config.patch_size)) ** 2, int(config.hidden_size)


def side_of(module: nn.Module) -> int:
    """The pixels along a side of what the encoder is shown."""
    config: Any = module.config
    return int(config.image_size)


def _unit(pixels_HWC: PixelArray) -> Tensor:
    return torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 255.0


def _between_ones(pixels_HWC: PixelArray) -> Tensor:
    return _unit(pixels_HWC) * 2.0 - 1.0


def _squeezed(pixels_BCHW: Tensor, side: int) -> Tensor:
    """All of an image in a square; what is made smaller is blurred first, so that fine patterns do not become coarse
    ones. Source of the figures: diffusers, StableVideoDiffusionPipeline, and scikit-image 0.19, `resize`."""
    for dim in (3, 2):
        deviation = (pixels_BCHW.shape[dim] / side - 1.0) * _DEVIATION_PER_FACTOR
        if deviation > _LEAST_DEVIATION:
            pixels_BCHW = _blurred(pixels_BCHW, dim, deviation)
    small_BCHW: Tensor = functional.interpolate(pixels_BCHW, size=(side, side), mode="bicubic", align_corners=True)
    return small_BCHW


def _blurred(pixels_BCHW: Tensor, dim: int, deviation: float) -> Tensor:
    """Blurred along one dimension, with an odd window; beyond the edges the image is mirrored."""
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
    """The square in the middle of an image, whose shorter side becomes `side`."""
    height, width = pixels_HWC.shape[:2]
    shorter = min(height, width)
    reach = MOST_PROPORTION * shorter  # what is far outside of the square would cost memory for nothing
    top, left = max(0, (height - reach) // 2), max(0, (width - reach) // 2)
    pixels_HWC = pixels_HWC[top : top + reach, left : left + reach]
    height, width = pixels_HWC.shape[:2]
    longer = max(height, width)
    sizes = (side, int(side * longer / shorter))
    size = sizes if width <= height else sizes[::-1]
    small_HWC = np.asarray(Image.fromarray(pixels_HWC).resize(size, Image.Resampling.BICUBIC))
    top, left = (small_HWC.shape[0] - side) // 2, (small_HWC.shape[1] - side) // 2
    return small_HWC[top : top + side, left : left + side]
