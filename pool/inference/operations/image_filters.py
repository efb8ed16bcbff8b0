"""Filters of images: Gaussian blur, sharpening, fewer colours, brightness and contrast.

Shape legend: H W height and width, C colours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from modelpool.pool.inference.operations.operation import (
    IMAGE,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    need_one_of,
    need_work,
)
from modelpool.pool.inference.operations.pixel_levels import as_pixels, each_frame, frames_of, image_like, levels
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import FloatArray, ImagePixels, PixelArray, VideoFrames

MAX_RADIUS = 31
DITHERS = ("none", "floyd-steinberg", "bayer-2", "bayer-4", "bayer-8", "bayer-16")
#: the smallest ordered pattern; larger ones are made of it
_BAYER = np.array([[0, 2], [3, 1]])


@dataclass(frozen=True, slots=True)
class Blur:
    """`radius` in pixels: the kernel has 2 * radius + 1 values on each side; 0 changes nothing. `sigma` is in units of
    the radius."""

    radius: int
    sigma: float


@dataclass(frozen=True, slots=True)
class Sharpen:
    """As `Blur`; `alpha` is the strength."""

    radius: int
    sigma: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Light:
    """The factor of brightness, or of contrast: 1 changes nothing."""

    factor: float


@dataclass(frozen=True, slots=True)
class Quantize:
    """The number of colours of the palette, 1 to 256, and how the difference is spread."""

    colours: int
    dither: str = "none"


def gaussian(radius: int, sigma: float) -> FloatArray:
    """Return the weights of one dimension, which sum up to 1: exp(-x^2 / (2 sigma^2)) at 2 * radius + 1 places x from
    -1 to 1 in equal steps."""
    places = np.linspace(-1, 1, 2 * radius + 1)
    weights = np.exp(-(places**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum(), np.float32)


def blurred(values_HWC: FloatArray, weights: FloatArray, mode: str = "reflect") -> FloatArray:
    """Return values convolved with `weights` along the width, and along the height; at the edges they are mirrored
    without the edge itself, or as `mode` of numpy's `pad` says."""
    radius = len(weights) // 2
    for axis in (0, 1):
        space = [(0, 0)] * values_HWC.ndim
        space[axis] = (radius, radius)
        wide = np.pad(values_HWC, space, mode=mode)  # type: ignore[call-overload]
        length = values_HWC.shape[axis]
        found = np.zeros_like(values_HWC)
        for place, weight in enumerate(weights):
            found += weight * np.take(wide, range(place, place + length), axis=axis)
        values_HWC = found
    return values_HWC


def _filter_size(params: Blur | Sharpen, sizes: Sizes) -> Size:
    need("radius", params.radius, 0, MAX_RADIUS)
    need("sigma", params.sigma, 0.01, 100)
    if isinstance(params, Sharpen):
        need("alpha", params.alpha, 0, 100)
    size = sizes["image"]
    need_work("radius", params.radius, 6 * (2 * params.radius + 1), size)
    if params.radius >= min(size.width, size.height):
        raise UnusableField(f"radius: found {params.radius} for an image of {size.width}x{size.height}, expected less")
    return size


def _blurred(params: Blur, inputs: Inputs) -> ImagePixels | VideoFrames:
    if not params.radius:
        return inputs["image"]  # type: ignore[no-any-return]
    weights = gaussian(params.radius, params.sigma)
    return each_frame(inputs["image"], lambda levels_HWC: blurred(levels_HWC, weights))


def _sharpened(params: Sharpen, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return image * (1 + 10 * alpha) - 10 * alpha * blurred image."""
    if not params.radius:
        return inputs["image"]  # type: ignore[no-any-return]
    weights, strength = gaussian(params.radius, params.sigma), 10 * params.alpha
    return each_frame(
        inputs["image"], lambda levels_HWC: levels_HWC * (1 + strength) - strength * blurred(levels_HWC, weights)
    )


def _quantize_size(params: Quantize, sizes: Sizes) -> Size:
    need("colours", params.colours, 1, 256)
    need_one_of("dither", params.dither, DITHERS)
    return sizes["image"]


def _quantized(params: Quantize, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return each frame with the colours of a palette that Pillow's median cut finds for it. Each pixel gets the
    nearest colour; with "floyd-steinberg" after the differences of its neighbours were added; with "bayer-N" after a
    pattern of N x N was added, with values of 0.5 + 512 / colours * ((rank + 0.5) / N^2 - 0.5), and fractions were cut
    off."""
    image = inputs["image"]
    frames_THWC = frames_of(image)
    if frames_THWC.shape[-1] != 3:
        raise UnusableField(f"image: found {frames_THWC.shape[-1]} channels, expected 3")
    return image_like(image, np.stack([_quantized_frame(frame_HWC, params) for frame_HWC in frames_THWC]))


def _quantized_frame(frame_HWC: PixelArray, params: Quantize) -> PixelArray:
    picture = Image.fromarray(frame_HWC)
    palette = picture.quantize(colors=params.colours, dither=Image.Dither.NONE)
    if params.dither == "none":
        return np.asarray(palette.convert("RGB"))
    if params.dither == "floyd-steinberg":
        found = picture.quantize(colors=params.colours, palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
        return np.asarray(found.convert("RGB"))
    side = int(params.dither.removeprefix("bayer-"))
    high, wide = frame_HWC.shape[:2]
    ranks = np.tile(bayer_ranks(side), (-(-high // side), -(-wide // side)))[:high, :wide]
    spread = 512 / params.colours
    pattern = spread * ((ranks + 0.5) / side**2 - 0.5) + 0.5
    shifted = np.clip(frame_HWC + pattern[..., None], 0, 255).astype(np.uint8)
    found = Image.fromarray(shifted).quantize(colors=params.colours, palette=palette, dither=Image.Dither.NONE)
    return np.asarray(found.convert("RGB"))


def bayer_ranks(side: int) -> npt.NDArray[np.int64]:
    """Return the ordered pattern of `side` x `side`, a power of two: each of 0 to side^2 - 1 once."""
    found = _BAYER
    while len(found) < side:
        found = np.block([[4 * found + rank for rank in row] for row in _BAYER.tolist()])
    return found


def _light_size(params: Light, sizes: Sizes) -> Size:
    need("factor", params.factor, 0.0, 100.0)
    return sizes["image"]


def _lit(middle: float) -> Callable[[Light, Inputs], ImagePixels | VideoFrames]:
    """Return the change of the distance of each colour to a level. Opacity stays."""

    def run(params: Light, inputs: Inputs) -> ImagePixels | VideoFrames:
        frames_THWC = frames_of(inputs["image"]).copy()
        colours = levels(frames_THWC[..., :3])
        frames_THWC[..., :3] = as_pixels((colours - middle) * np.float32(params.factor) + middle)
        return image_like(inputs["image"], frames_THWC)

    return run


def _row(name: str, params: type[Any], run: Any, size: Any) -> Operation:
    return Operation(name, params, {"image": IMAGE}, IMAGE, run, size)


IMAGE_FILTERS = (
    _row("image_blur", Blur, _blurred, _filter_size),
    _row("image_sharpen", Sharpen, _sharpened, _filter_size),
    _row("image_quantize", Quantize, _quantized, _quantize_size),
    _row("image_brightness", Light, _lit(0.0), _light_size),
    _row("image_contrast", Light, _lit(0.5), _light_size),
)
