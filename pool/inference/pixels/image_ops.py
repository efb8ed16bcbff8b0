"""Scales images to a size, and composites them by a mask. Torch-free; knows neither files nor models.

Shape legend: H W height and width, C colour channels (3).
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from modelpool.pool.values.core.stage_params import PixelArray

#: threshold of a mask's pixels where it must be binary. Source: diffusers' pipelines, 0.5
HALF = 128


def covering(pixels: PixelArray, width: int, height: int) -> PixelArray:
    """Scale pixels (of an image or a mask) to cover `width` by `height`, keeping proportions, with Lanczos, and crop at
    the centre. Unchanged if they have that size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    fitted = ImageOps.fit(Image.fromarray(pixels), (width, height), Image.Resampling.LANCZOS)
    return np.asarray(fitted)


def stretched(pixels: PixelArray, width: int, height: int) -> PixelArray:
    """Scale pixels (of an image or a mask) to `width` by `height` with Lanczos. Unchanged if they have that size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def pasted(new_HWC: PixelArray, kept_HWC: PixelArray, mask_HW: PixelArray) -> PixelArray:
    """Composite: exactly `new_HWC` where the mask is 255, exactly `kept_HWC` where it is 0, mixed in between."""
    share_HW1 = mask_HW[:, :, None].astype(np.float32) / 255
    mixed_HWC = new_HWC * share_HW1 + kept_HWC * (1 - share_HW1)
    return mixed_HWC.round().astype(np.uint8)


def there_and_back(count: int, wanted: int) -> list[int]:
    """Return the first `wanted` numbers of 0 to `count` - 1, back to 0, and so on."""
    last = max(1, count - 1)
    return [0 if count == 1 else last - abs(last - place % (2 * last)) for place in range(wanted)]
