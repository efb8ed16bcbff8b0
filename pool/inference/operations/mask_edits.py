"""Edits of masks: from and to images, solid, inverse, crop, composition, feather, growth, threshold, blur.

A level of 1 (255) is where an image is regenerated. A mask is one mask, or one for each frame.

Shape legend: T frames, H W height and width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.image_edits import Crop, NoSettings, crop_size, mask_crop
from modelpool.pool.inference.operations.image_filters import blurred
from modelpool.pool.inference.operations.operation import (
    IMAGE,
    MASK,
    MAX_SIDE,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    need_one_of,
    need_work,
    same_as,
)
from modelpool.pool.inference.operations.pixel_levels import (
    STILL_RATE,
    as_pixels,
    frames_of,
    levels,
    mask_like,
    masks_of,
    repeated_to,
)
from modelpool.pool.inference.operations.resampling import PLAIN_METHODS, resampled
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    FloatArray,
    ImagePixels,
    Mask,
    PixelArray,
    VideoFrames,
    VideoMask,
)

CHANNELS = ("red", "green", "blue", "alpha")
COMPOSITIONS = ("multiply", "add", "subtract", "and", "or", "xor")
#: pixels by which a mask grows or shrinks at most
MOST_GROWN = 1024
#: steps for each pixel by which a mask grows
_GROW_STEPS = 5


@dataclass(frozen=True, slots=True)
class Channel:
    """The channel that is read: "alpha" only of images with opacity, as it is (1 is opaque)."""

    channel: str


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour as 0xRRGGBB."""

    colour: int


@dataclass(frozen=True, slots=True)
class SolidMask:
    """A mask with one level, 0 to 1."""

    width: int
    height: int
    level: float = 1.0


@dataclass(frozen=True, slots=True)
class Composition:
    """The place of the source's upper left corner in the destination, and the way in which both are put together."""

    x: int = 0
    y: int = 0
    mode: str = "add"


@dataclass(frozen=True, slots=True)
class Feather:
    """Pixels over which each side fades to 0."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, slots=True)
class Radial:
    """The point, in pixels from the upper left corner, from which a mask fades."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Pixels by which a mask grows, or shrinks if it is negative; `tapered`: by steps along the axes only."""

    pixels: int
    tapered: bool = True


@dataclass(frozen=True, slots=True)
class Threshold:
    """The level, 0 to 1, that a mask must exceed."""

    level: float


@dataclass(frozen=True, slots=True)
class MaskBlur:
    """The standard deviation in pixels."""

    pixels: float


@dataclass(frozen=True, slots=True)
class MaskScale:
    """A new width and height, and the method."""

    width: int
    height: int
    method: str = "bilinear"


def _channel_size(params: Channel, sizes: Sizes) -> Size:
    need_one_of("channel", params.channel, CHANNELS)
    return sizes["image"]


def _of_channel(params: Channel, inputs: Inputs) -> Mask | VideoMask:
    frames_THWC = frames_of(inputs["image"])
    channel = CHANNELS.index(params.channel)
    if channel >= frames_THWC.shape[-1]:
        raise UnusableField("channel: found alpha, expected red, green or blue: the image has no opacity")
    return _as_mask(inputs["image"], frames_THWC[..., channel])


def _as_mask(image: ImagePixels | VideoFrames, values_THW: PixelArray) -> Mask | VideoMask:
    values_THW = np.ascontiguousarray(values_THW)
    return Mask(values_THW[0]) if isinstance(image, ImagePixels) else VideoMask(values_THW)


def _colour_size(params: Colour, sizes: Sizes) -> Size:
    need("colour", params.colour, 0, 0xFFFFFF)
    return sizes["image"]


def _of_colour(params: Colour, inputs: Inputs) -> Mask | VideoMask:
    """Return a mask that is 1 exactly where the image has a colour."""
    colour = np.array([params.colour >> shift & 255 for shift in (16, 8, 0)], np.uint8)
    equal_THW = (frames_of(inputs["image"])[..., :3] == colour).all(axis=-1)
    return _as_mask(inputs["image"], equal_THW.astype(np.uint8) * np.uint8(255))


def _as_image(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return the mask as grey pixels."""
    mask = inputs["mask"]
    frames_THWC = np.repeat(masks_of(mask)[..., None], 3, axis=-1)
    return ImagePixels(frames_THWC[0]) if isinstance(mask, Mask) else VideoFrames(frames_THWC, STILL_RATE)


def _solid_size(params: SolidMask, sizes: Sizes) -> Size:
    need("level", params.level, 0, 1)
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    return Size(params.width, params.height)


def _solid(params: SolidMask, inputs: Inputs) -> Mask:
    return Mask(np.full((params.height, params.width), as_pixels(params.level), np.uint8))


def _inverse(params: NoSettings, inputs: Inputs) -> Mask | VideoMask:
    return mask_like(inputs["mask"], 255 - masks_of(inputs["mask"]))


def _cropped(params: Crop, inputs: Inputs) -> Mask | VideoMask:
    return mask_crop(params, inputs["mask"])


def _composition_size(params: Composition, sizes: Sizes) -> Size:
    need_one_of("mode", params.mode, COMPOSITIONS)
    need("x", params.x, 0, MAX_SIDE)
    need("y", params.y, 0, MAX_SIDE)
    return sizes["destination"]


def _composed(params: Composition, inputs: Inputs) -> Mask | VideoMask:
    """Return the destination, in which the part below the source at (x, y) became, of levels d and s,

    multiply d * s | add d + s | subtract d - s, limited to 0 to 1; and, or, xor of both rounded to 0 or 1 (a value of
    128 of 255 is 1)."""
    destination = inputs["destination"]
    found_THW = masks_of(destination).copy()
    source_THW = repeated_to(masks_of(inputs["source"]), len(found_THW))
    there = found_THW[:, params.y : params.y + source_THW.shape[1], params.x : params.x + source_THW.shape[2]]
    here = source_THW[:, : there.shape[1], : there.shape[2]]
    if there.size:
        there[...] = _composed_levels(there, here, params.mode)
    return mask_like(destination, found_THW)


def _composed_levels(there: PixelArray, here: PixelArray, mode: str) -> PixelArray:
    match mode:
        case "multiply":
            return as_pixels(levels(there) * levels(here))
        case "add":
            return np.asarray(np.minimum(there.astype(np.int16) + here, 255), np.uint8)
        case "subtract":
            return np.asarray(np.maximum(there.astype(np.int16) - here, 0), np.uint8)
    one, other = there > 127, here > 127
    found = {"and": one & other, "or": one | other, "xor": one ^ other}[mode]
    return found.astype(np.uint8) * np.uint8(255)


def _feather_size(params: Feather, sizes: Sizes) -> Size:
    for name in ("left", "top", "right", "bottom"):
        need(name, getattr(params, name), 0, MAX_SIDE)
    return sizes["mask"]


def _feathered(params: Feather, inputs: Inputs) -> Mask | VideoMask:
    """Return the mask times (i + 1) / n at the place i from each side, of n pixels that are at most the width or the
    height; corners have both factors."""
    values_THW = masks_of(inputs["mask"])
    _, high, wide = values_THW.shape
    rows = _fade(high, params.top, params.bottom)
    columns = _fade(wide, params.left, params.right)
    return mask_like(inputs["mask"], as_pixels(levels(values_THW) * rows[:, None] * columns))


def _fade(length: int, begin: int, end: int) -> FloatArray:
    found = np.ones(length, np.float32)
    for pixels, place in ((min(begin, length), found), (min(end, length), found[::-1])):
        place[:pixels] *= np.arange(1, pixels + 1, dtype=np.float32) / max(1, pixels)
    return found


def _radial_size(params: Radial, sizes: Sizes) -> Size:
    need("x", params.x, 1, sizes["mask"].width)
    need("y", params.y, 1, sizes["mask"].height)
    return sizes["mask"]


def _radial(params: Radial, inputs: Inputs) -> Mask | VideoMask:
    """Return the mask times max(0, 1 - r) at each pixel, with r the distance of its centre to a point, where the
    distance of the point to each side is 1."""
    values_THW = masks_of(inputs["mask"])
    _, high, wide = values_THW.shape
    down = _distances(high, params.y)[:, None] ** 2
    found_HW = np.maximum(0, 1 - np.sqrt(down + _distances(wide, params.x) ** 2))
    return mask_like(inputs["mask"], as_pixels(levels(values_THW) * np.asarray(found_HW, np.float32)))


def _distances(length: int, point: int) -> FloatArray:
    places = np.arange(length, dtype=np.float32) + np.float32(0.5) - point
    return np.asarray(np.where(places < 0, -places / point, places / max(1, length - point)), np.float32)


def _grow_size(params: Grow, sizes: Sizes) -> Size:
    need("pixels", params.pixels, -MOST_GROWN, MOST_GROWN)
    need_work("pixels", params.pixels, _GROW_STEPS * abs(params.pixels), sizes["mask"])
    return sizes["mask"]


def _grown(params: Grow, inputs: Inputs) -> Mask | VideoMask:
    """Return the mask after as many steps as pixels, in each of which a pixel gets the largest value (the smallest, if
    it shrinks) of itself and its neighbours: four of them if it is tapered, else eight. Outside of the mask, the values
    of its edge are repeated."""
    return mask_like(inputs["mask"], grown(masks_of(inputs["mask"]), params.pixels, params.tapered))


def grown(values_THW: PixelArray, pixels: int, tapered: bool) -> PixelArray:
    """Return masks after they grew or shrank by pixels (`Grow`)."""
    take = np.maximum if pixels > 0 else np.minimum
    for _ in range(abs(pixels)):
        wide = np.pad(values_THW, ((0, 0), (1, 1), (1, 1)), mode="edge")
        if tapered:
            found = values_THW.copy()
            for part in (wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:]):
                take(found, part, out=found)
        else:
            lines = take(take(wide[:, :-2], wide[:, 1:-1]), wide[:, 2:])
            found = take(take(lines[..., :-2], lines[..., 1:-1]), lines[..., 2:])
        if np.array_equal(found, values_THW):
            break
        values_THW = found
    return values_THW


def _threshold_size(params: Threshold, sizes: Sizes) -> Size:
    need("level", params.level, 0, 1)
    return sizes["mask"]


def _thresholded(params: Threshold, inputs: Inputs) -> Mask | VideoMask:
    """Return 1 where the level is above the threshold, else 0."""
    above = masks_of(inputs["mask"]) / 255 > params.level
    return mask_like(inputs["mask"], above.astype(np.uint8) * np.uint8(255))


def _blur_size(params: MaskBlur, sizes: Sizes) -> Size:
    need("pixels", params.pixels, 0, 200)
    need_work("pixels", params.pixels, 12 * params.pixels, sizes["mask"])
    return sizes["mask"]


def _mask_blurred(params: MaskBlur, inputs: Inputs) -> Mask | VideoMask:
    """Return the mask after a Gaussian filter of this standard deviation, with ceil(3 * deviation) pixels on each side;
    the values of the edge are repeated."""
    if not params.pixels:
        return inputs["mask"]  # type: ignore[no-any-return]
    radius = int(np.ceil(3 * params.pixels))
    weights = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * params.pixels**2))
    weights = np.asarray(weights / weights.sum(), np.float32)
    values_THW = masks_of(inputs["mask"])
    found = [as_pixels(blurred(levels(one_HW), weights, "edge")) for one_HW in values_THW]
    return mask_like(inputs["mask"], np.stack(found))


def _scale_size(params: MaskScale, sizes: Sizes) -> Size:
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    need_one_of("method", params.method, PLAIN_METHODS)
    return replace(sizes["mask"], width=params.width, height=params.height)


def _scaled(params: MaskScale, inputs: Inputs) -> Mask | VideoMask:
    values_THW = levels(masks_of(inputs["mask"]))
    return mask_like(inputs["mask"], as_pixels(resampled(values_THW, params.width, params.height, params.method)))


def _row(
    name: str, params: type[Any], run: Any, size: Any, inputs: dict[str, str] | None = None, result: str = MASK
) -> Operation:
    return Operation(name, params, {"mask": MASK} if inputs is None else inputs, result, run, size)


MASK_EDITS = (
    _row("mask_from_image", Channel, _of_channel, _channel_size, {"image": IMAGE}),
    _row("mask_from_colour", Colour, _of_colour, _colour_size, {"image": IMAGE}),
    _row("mask_to_image", NoSettings, _as_image, same_as("mask"), result=IMAGE),
    _row("mask_solid", SolidMask, _solid, _solid_size, {}),
    _row("mask_invert", NoSettings, _inverse, same_as("mask")),
    _row("mask_crop", Crop, _cropped, lambda given, sizes: crop_size(given, sizes["mask"])[2]),
    _row("mask_composite", Composition, _composed, _composition_size, {"destination": MASK, "source": MASK}),
    _row("mask_feather", Feather, _feathered, _feather_size),
    _row("mask_radial", Radial, _radial, _radial_size),
    _row("mask_grow", Grow, _grown, _grow_size),
    _row("mask_threshold", Threshold, _thresholded, _threshold_size),
    _row("mask_blur", MaskBlur, _mask_blurred, _blur_size),
    _row("mask_scale", MaskScale, _scaled, _scale_size),
)
