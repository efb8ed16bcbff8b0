"""Scales images: to a size, by a factor, to a number of pixels, to a longest side, to the nearest of some sizes.

All sizes are rounded to whole pixels with halves to the even number, as Python's `round` does, and are at least 1.
A crop first cuts off sides that are too long (`image_ops.centre_box`); without one the image is stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from modelpool.pool.inference.operations.operation import (
    IMAGE,
    MAX_SIDE,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    need_one_of,
    need_work,
)
from modelpool.pool.inference.operations.pixel_levels import as_pixels, frames_of, image_like, levels
from modelpool.pool.inference.operations.resampling import IMAGE_METHODS, resampled
from modelpool.pool.inference.pixels.image_ops import centre_box
from modelpool.pool.values.core.errors import UnusableField, counted
from modelpool.pool.values.core.stage_params import ImagePixels, PixelArray, VideoFrames

#: pixels of a megapixel, as ComfyUI's nodes count
MEGAPIXEL = 1024 * 1024
#: by which the product of a side and its own factor may be above a whole number
_ROUNDING = 1e-6
#: filters of Pillow, by name
_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
#: the factor of the sides of an image before it gets its size, and the pixels of the size: the intermediate result fits
#: in the memory of a worker
_OVERSAMPLED, _MOST_OVERSAMPLED = 8, 3 * MEGAPIXEL // 2
#: values that both filters read, about, for each pixel of the larger image
_FILTER_STEPS = 16


@dataclass(frozen=True, slots=True)
class ScaleToSize:
    """Scale to this width and height; one that is 0 follows from the other, and with both 0 nothing changes. `crop`
    first cuts off sides that are too long, at the centre."""

    width: int
    height: int
    method: str = "bilinear"
    crop: bool = False


@dataclass(frozen=True, slots=True)
class ScaleByFactor:
    """Scale both sides by a factor. `cut`: parts of a pixel are cut off, instead of rounded."""

    factor: float
    method: str = "bilinear"
    cut: bool = False


@dataclass(frozen=True, slots=True)
class ScaleToPixels:
    """Scale by sqrt(megapixels * 1024 * 1024 / pixels). With a `multiple` above 1, sides are rounded to multiples."""

    megapixels: float
    multiple: int = 1
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleToLongest:
    """Scale so that the longest side has this number of pixels."""

    longest: int
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleToShortest:
    """Scale so that the shortest side has this number of pixels."""

    shortest: int
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleLike:
    """Scale to the size of another image. `crop` first cuts off sides that are too long, at the centre."""

    method: str = "bilinear"
    crop: bool = False


@dataclass(frozen=True, slots=True)
class ScaleToMultiple:
    """Scale, in proportion, to the smallest size that covers sides cut down to multiples, and cut off the rest at the
    centre. An image with such sides, or with a side below `multiple`, stays as it is."""

    multiple: int
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleWithin:
    """Scale to the largest size with the same proportions within a width and a height; 0 is any."""

    width: int
    height: int
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleToNearest:
    """Scale, with a centre crop, to the size with the ratio of sides that is nearest to the image's; of equally near
    ones to the first. `sizes` are width and height of each, one behind the other."""

    sizes: tuple[int, ...]
    method: str = "bilinear"


@dataclass(frozen=True, slots=True)
class ScaleBySides:
    """Scale each side by a factor: parts of a pixel are cut off, then the nearest `multiple` of pixels is taken, the
    larger one of two. `crop` first cuts off sides that are too long, at the centre."""

    width_factor: float
    height_factor: float
    multiple: int = 1
    method: str = "bilinear"
    crop: bool = False


@dataclass(frozen=True, slots=True)
class ScaleByFilter:
    """Scale by a factor (parts of a pixel are cut off), or, with factor 0, to this width and height, with a filter of
    Pillow on the 8-bit values. `oversampled`: first to 8 times the size, with the same filter."""

    factor: float = 0.0
    width: int = 0
    height: int = 0
    method: str = "lanczos"
    oversampled: bool = False


@dataclass(frozen=True, slots=True)
class ScaleToCells:
    """Scale to `cell` pixels of a side for each `compression` pixels; parts of a cell are cut off. Sides that are too
    long are cut off before, at the centre."""

    compression: int
    cell: int
    method: str = "bicubic"
    crop: bool = True


def size_wanted(size: Size, width: int, height: int, least: int = 1) -> Size:
    """Return a size in which a side that is 0 follows from the other; both sides are at least `least`, unless both are
    0 and nothing changes."""
    if not width and not height:
        return size
    wide = width or round(size.width * height / size.height)
    high = height or round(size.height * width / size.width)
    return Size(max(least, wide), max(least, high), size.frames)


def factored(size: Size, factor: float, multiple: int = 1) -> Size:
    """Return a size after both sides were multiplied and rounded."""
    width, height = (max(1, round(side * factor / multiple)) * multiple for side in (size.width, size.height))
    return Size(width, height, size.frames)


def shortest_size(size: Size, shortest: int) -> Size:
    """Return a size in proportion with this shortest side."""
    if size.width < size.height:
        return Size(shortest, max(1, round(size.height * shortest / size.width)), size.frames)
    return Size(max(1, round(size.width * shortest / size.height)), shortest, size.frames)


def whole_multiples(size: Size, multiple: int) -> Size:
    """Return a size with sides cut down to multiples; as it is, if a side is below one."""
    width, height = (side // multiple * multiple for side in (size.width, size.height))
    return Size(width, height, size.frames) if width and height else size


def _to_size(params: ScaleToSize, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("width", params.width, 0, MAX_SIDE)
    need("height", params.height, 0, MAX_SIDE)
    return size_wanted(sizes["image"], params.width, params.height)


def _by_factor(params: ScaleByFactor, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("factor", params.factor, 0.001, 1000)
    size = sizes["image"]
    if params.cut:
        return Size(max(1, int(size.width * params.factor)), max(1, int(size.height * params.factor)), size.frames)
    return factored(size, params.factor)


def _to_pixels(params: ScaleToPixels, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("megapixels", params.megapixels, 0.001, 1000)
    need("multiple", params.multiple, 1, MAX_SIDE)
    size = sizes["image"]
    return factored(size, math.sqrt(params.megapixels * MEGAPIXEL / (size.width * size.height)), params.multiple)


def _to_longest(params: ScaleToLongest, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("longest", params.longest, 1, MAX_SIDE)
    size = sizes["image"]
    if size.height > size.width:
        return Size(max(1, round(size.width * params.longest / size.height)), params.longest, size.frames)
    return Size(params.longest, max(1, round(size.height * params.longest / size.width)), size.frames)


def _to_shortest(params: ScaleToShortest, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("shortest", params.shortest, 1, MAX_SIDE)
    return shortest_size(sizes["image"], params.shortest)


def _like(params: ScaleLike, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    return Size(sizes["like"].width, sizes["like"].height, sizes["image"].frames)


def _to_multiple(params: ScaleToMultiple, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("multiple", params.multiple, 1, MAX_SIDE)
    return whole_multiples(sizes["image"], params.multiple)


def _within(params: ScaleWithin, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("width", params.width, 0, MAX_SIDE)
    need("height", params.height, 0, MAX_SIDE)
    size = sizes["image"]
    limits = ((params.width, size.width), (params.height, size.height))
    return factored(size, min((wanted / side for wanted, side in limits if wanted), default=1.0))


def _to_nearest(params: ScaleToNearest, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    if not params.sizes or len(params.sizes) % 2:
        found = counted(len(params.sizes), "number")
        raise UnusableField(f"sizes: found {found}, expected width and height of at least one size")
    for side in params.sizes:
        need("sizes", side, 1, MAX_SIDE)
    size = sizes["image"]
    pairs = zip(params.sizes[::2], params.sizes[1::2], strict=True)
    width, height = min(pairs, key=lambda each: abs(size.width / size.height - each[0] / each[1]))
    return Size(width, height, size.frames)


def _by_sides(params: ScaleBySides, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("width_factor", params.width_factor, 0.001, 1000)
    need("height_factor", params.height_factor, 0.001, 1000)
    need("multiple", params.multiple, 1, MAX_SIDE)
    size, step = sizes["image"], params.multiple
    pairs = ((size.width, params.width_factor), (size.height, params.height_factor))
    width, height = ((2 * int(side * factor) + step) // (2 * step) * step for side, factor in pairs)
    if not width or not height:
        factors = f"{params.width_factor:g} and {params.height_factor:g}"
        raise UnusableField(f"width_factor, height_factor: found {factors}, expected factors that leave some pixels")
    return Size(width, height, size.frames)


def _to_cells(params: ScaleToCells, sizes: Sizes) -> Size:
    need_one_of("method", params.method, IMAGE_METHODS)
    need("compression", params.compression, 1, MAX_SIDE)
    need("cell", params.cell, 1, MAX_SIDE)
    size = sizes["image"]
    width, height = (side // params.compression * params.cell for side in (size.width, size.height))
    if not width or not height or max(width, height) > MAX_SIDE:
        found = f"{params.compression} for an image of {size.width}x{size.height}"
        raise UnusableField(f"compression: found {found}, expected sides of 1 to {MAX_SIDE // params.cell} cells")
    return Size(width, height, size.frames)


def _by_filter(params: ScaleByFilter, sizes: Sizes) -> Size:
    need_one_of("method", params.method, tuple(_FILTERS))
    size = sizes["image"]
    if params.factor:
        found = _by_factor(ScaleByFactor(params.factor, cut=True), sizes)
    else:
        need("width", params.width, 1, MAX_SIDE)
        need("height", params.height, 1, MAX_SIDE)
        found = Size(params.width, params.height, size.frames)
    if params.oversampled and found.width * found.height > _MOST_OVERSAMPLED:
        expected = f"up to {_MOST_OVERSAMPLED} pixels, as {_OVERSAMPLED} times the sides are computed first"
        raise UnusableField(f"oversampled: found {found.width}x{found.height}, expected {expected}")
    if params.oversampled:
        need_work("oversampled", _OVERSAMPLED, _FILTER_STEPS * _OVERSAMPLED**2, found)
    return found


def _filtered(params: ScaleByFilter, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames_THWC = frames_of(inputs["image"])
    size = _by_filter(params, {"image": Size(frames_THWC.shape[2], frames_THWC.shape[1])})
    return image_like(inputs["image"], np.stack([_frame_filtered(params, each, size) for each in frames_THWC]))


def _frame_filtered(params: ScaleByFilter, frame_HWC: PixelArray, size: Size) -> PixelArray:
    """Return one frame in a size: of a video, one larger image at a time is in memory."""
    for factor in (_OVERSAMPLED, 1) if params.oversampled else (1,):
        frame_HWC = _by_pillow(frame_HWC, size.width * factor, size.height * factor, _FILTERS[params.method])
    return frame_HWC


def scaled(
    image: ImagePixels | VideoFrames, width: int, height: int, method: str, crops: bool = False
) -> ImagePixels | VideoFrames:
    """Return an image in another size. "lanczos" is Pillow's filter on the 8-bit values, which averages when it makes
    an image smaller; the other methods are `resampling.resampled` on levels."""
    frames_THWC = frames_of(image)
    if crops:
        left, top, wide, high = centre_box(frames_THWC.shape[2], frames_THWC.shape[1], width, height)
        frames_THWC = frames_THWC[:, top : top + high, left : left + wide]
    if frames_THWC.shape[1:3] != (height, width):
        frames_THWC = np.stack([_frame(frame_HWC, width, height, method) for frame_HWC in frames_THWC])
    return image_like(image, frames_THWC)


def _frame(frame_HWC: PixelArray, width: int, height: int, method: str) -> PixelArray:
    if method == "lanczos":
        return _by_pillow(frame_HWC, width, height, Image.Resampling.LANCZOS)
    colours_CHW = np.moveaxis(levels(frame_HWC), -1, 0)
    return np.moveaxis(as_pixels(resampled(colours_CHW, width, height, method)), 0, -1)


def _by_pillow(frame_HWC: PixelArray, width: int, height: int, method: Image.Resampling) -> PixelArray:
    if frame_HWC.shape[-1] == 3:
        return np.asarray(Image.fromarray(frame_HWC).resize((width, height), method))
    planes = [Image.fromarray(np.ascontiguousarray(plane_HW)) for plane_HW in np.moveaxis(frame_HWC, -1, 0)]
    return np.stack([np.asarray(one.resize((width, height), method)) for one in planes], axis=-1)


def _size_of(image: ImagePixels | VideoFrames) -> Size:
    frames_THWC = frames_of(image)
    return Size(frames_THWC.shape[2], frames_THWC.shape[1])


def _row(name: str, params: type[Any], size: Any, *others: str) -> Operation:
    """Return an operation on an image, which also reads the sizes of `others`."""

    def run(given: Any, inputs: Inputs) -> ImagePixels | VideoFrames:
        image = inputs["image"]
        wanted = size(given, {other: _size_of(inputs[other]) for other in ("image", *others)})
        crops = getattr(given, "crop", False) or isinstance(given, ScaleToNearest)
        return scaled(image, wanted.width, wanted.height, given.method, crops)

    return Operation(name, params, dict.fromkeys(("image", *others), IMAGE), IMAGE, run, size)


def _covering(params: ScaleToMultiple, inputs: Inputs) -> ImagePixels | VideoFrames:
    image = inputs["image"]
    size = _size_of(image)
    wanted = _to_multiple(params, {"image": size})
    factor = max(wanted.width / size.width, wanted.height / size.height)
    wide, high = (max(least, math.ceil(side * factor - _ROUNDING)) for least, side in zip(
        (wanted.width, wanted.height), (size.width, size.height), strict=True))  # fmt: skip
    left, top = (wide - wanted.width) // 2, (high - wanted.height) // 2
    frames_THWC = frames_of(scaled(image, wide, high, params.method))
    return image_like(image, frames_THWC[:, top : top + wanted.height, left : left + wanted.width])


IMAGE_SCALING = (
    _row("image_scale", ScaleToSize, _to_size),
    _row("image_scale_by", ScaleByFactor, _by_factor),
    _row("image_scale_to_pixels", ScaleToPixels, _to_pixels),
    _row("image_scale_to_longest", ScaleToLongest, _to_longest),
    _row("image_scale_to_shortest", ScaleToShortest, _to_shortest),
    _row("image_scale_like", ScaleLike, _like, "like"),
    Operation("image_scale_to_multiple", ScaleToMultiple, {"image": IMAGE}, IMAGE, _covering, _to_multiple),
    _row("image_scale_within", ScaleWithin, _within),
    _row("image_scale_to_nearest", ScaleToNearest, _to_nearest),
    _row("image_scale_by_sides", ScaleBySides, _by_sides),
    _row("image_scale_to_cells", ScaleToCells, _to_cells),
    Operation("image_scale_by_filter", ScaleByFilter, {"image": IMAGE}, IMAGE, _filtered, _by_filter),
)
