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


def centre_box(width: int, height: int, wanted_width: int, wanted_height: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a centre crop that has the ratio of the wanted size. It cuts round((side -
    side * ratio) / 2) off both ends of the side that is too long, halves to the even number, and leaves at least one or
    two pixels."""
    shape, wanted = width / height, wanted_width / wanted_height
    left = round((width - width * (wanted / shape)) / 2) if shape > wanted else 0
    top = round((height - height * (shape / wanted)) / 2) if shape < wanted else 0
    left, top = min(left, (width - 1) // 2), min(top, (height - 1) // 2)
    return left, top, width - 2 * left, height - 2 * top


def covering_exact(pixels: PixelArray, width: int, height: int) -> PixelArray:
    """Scale pixels (of an image or a mask) to cover `width` by `height`, each by the nearest one (output i is the pixel
    floor((2i + 1) * in / (2 * out))), after a crop at the centre."""
    left, top, wide, high = centre_box(pixels.shape[1], pixels.shape[0], width, height)
    rows, columns = (
        begin + (2 * np.arange(count) + 1) * length // (2 * count)
        for begin, count, length in ((top, height, high), (left, width, wide))
    )
    return np.asarray(pixels[rows[:, None], columns[None, :]])


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
