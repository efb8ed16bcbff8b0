"""Pixels of given images: brought to a size, and put together by a mask. Torch-free; knows no file and no model.

Shape legend: H W height and width, C colour channels (3).
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from modelpool.pool.core.stage_params import PixelArray

#: a mask's pixels from here on count as white where there is nothing between. Source: diffusers' pipelines, 0.5
HALF = 128


def covering(pixels: PixelArray, width: int, height: int) -> PixelArray:
    """Pixels (of an image or a mask) scaled so that they cover `width` by `height`, proportions kept, by Lanczos; what
    juts out is cropped, as much on one side as on the other. Unchanged when they have that size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    fitted = ImageOps.fit(Image.fromarray(pixels), (width, height), Image.Resampling.LANCZOS)
    return np.asarray(fitted)


def pasted(new_HWC: PixelArray, kept_HWC: PixelArray, mask_HW: PixelArray) -> PixelArray:
    """`new_HWC` where the mask is 255, `kept_HWC` where it is 0, to the bit; both in proportion where it is between."""
    share_HW1 = mask_HW[:, :, None].astype(np.float32) / 255
    mixed_HWC = new_HWC * share_HW1 + kept_HWC * (1 - share_HW1)
    return mixed_HWC.round().astype(np.uint8)
