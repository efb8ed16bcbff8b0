"""Edits of images and masks that packs of ComfyUI's nodes have: frames by their places, sizes under a condition, crops
at a named place, adaptive sharpening, grey, two levels, masks of colours, and blurred masks.

Shape legend: T frames, H W height and width, C colours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.image_edits import NoSettings
from modelpool.pool.inference.operations.image_filters import blurred
from modelpool.pool.inference.operations.image_scaling import scaled
from modelpool.pool.inference.operations.operation import (
    IMAGE,
    MASK,
    MAX_FRAMES,
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
    as_pixels,
    each_frame,
    frames_of,
    image_like,
    levels,
    mask_like,
    masks_of,
)
from modelpool.pool.inference.operations.resampling import IMAGE_METHODS
from modelpool.pool.values.core.errors import UnusableField, counted
from modelpool.pool.values.core.stage_params import FloatArray, ImagePixels, Mask, VideoFrames, VideoMask

#: how an image is brought to a width and a height, and when
FITS = ("stretch", "within", "fill", "pad")
CONDITIONS = ("always", "larger", "smaller", "larger area", "smaller area")
#: places of a part of an image
CORNERS = (
    *("top-left", "top-center", "top-right", "right-center", "bottom-right"),
    *("bottom-center", "bottom-left", "left-center", "center"),
)
GREYS = ("luminance (Rec.709)", "luminance (Rec.601)", "average", "lightness")
#: colours with each channel either high or low
PRIMARIES = ("red", "green", "blue", "cyan", "magenta", "yellow", "black", "white")
_HIGH = dict(zip(PRIMARIES, ("100", "010", "001", "011", "101", "110", "000", "111"), strict=True))
MOST_BLURRED = 256


@dataclass(frozen=True, slots=True)
class Pick:
    """The places of the frames, from 0 on; a frame may be there several times, and a single one is an image."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """A width and a height, 0 for the image's own, or for any in proportion.

    how       "stretch", "within" (in proportion), "fill" (cut at the centre) or "pad" (in proportion, black around it)
    condition  when the size changes: "always", "larger" or "smaller" on any side, or by "larger area", "smaller area"
    multiple  sides are multiples of this: the wanted size is cut down, and then the result, at the centre
    """

    width: int
    height: int
    method: str = "bilinear"
    how: str = "stretch"
    condition: str = "always"
    multiple: int = 0


@dataclass(frozen=True, slots=True)
class CropAt:
    """A part of a size, at most the image, at a place, moved by pixels: parts outside of the image are cut off."""

    width: int
    height: int
    position: str = "center"
    x: int = 0
    y: int = 0


@dataclass(frozen=True, slots=True)
class Amount:
    """0 to 1."""

    amount: float


@dataclass(frozen=True, slots=True)
class Grey:
    """The share of the grey image, 0 to 1, and its formula."""

    factor: float = 1.0
    method: str = GREYS[0]


@dataclass(frozen=True, slots=True)
class Primary:
    """A colour of high and low channels: high is 1 - threshold and more, low is below the threshold of the channel;
    black is up to the thresholds."""

    colour: str
    red: float = 0.15
    green: float = 0.15
    blue: float = 0.15


@dataclass(frozen=True, slots=True)
class Near:
    """A colour, 0 to 255 for each channel, and the largest difference of each channel."""

    red: int
    green: int
    blue: int
    threshold: int = 0


@dataclass(frozen=True, slots=True)
class MaskGaussian:
    """The kernel has 2 * radius + 1 values on each side, with a standard deviation of `sigma` pixels; the mask is
    mirrored at its edges. `level`: above 0, values above it are 1 before, and all others 0."""

    radius: int
    sigma: float
    level: float = 0.0


def _pick_size(params: Pick, sizes: Sizes) -> Size:
    size, count = sizes["image"], len(params.indices)
    if not 0 < count <= MAX_FRAMES:
        raise UnusableField(f"indices: found {counted(count, 'place')}, expected 1 to {MAX_FRAMES}")
    if outside := [place for place in params.indices if not 0 <= place < size.count]:
        frames = counted(size.count, "image")
        raise UnusableField(f"indices: found {outside[0]} for {frames}, expected 0 to {size.count - 1}")
    return replace(size, frames=0 if count == 1 else count)


def _picked(params: Pick, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames_THWC = frames_of(inputs["image"])[list(params.indices)]
    if len(frames_THWC) == 1:
        return ImagePixels(np.ascontiguousarray(frames_THWC[0]))
    return image_like(inputs["image"], frames_THWC)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A size to which an image is scaled, and the part of it that is kept, or the space around it."""

    scaled: tuple[int, int]
    left: int = 0
    top: int = 0
    size: tuple[int, int] | None = None


def _fitted(params: Fit, size: Size) -> _Fitted:
    """Return what a fit does to an image, without its multiples and its condition."""
    own = (size.width, size.height)
    step = max(1, params.multiple)
    wanted = [side // step * step for side in (params.width, params.height)]
    if params.how in ("within", "pad"):
        other = (wanted[1], wanted[0])
        limits = [
            one or (own[place] if own[1 - place] >= other[place] else MAX_SIDE) for place, one in enumerate(wanted)
        ]
        ratio = min(limits[0] / own[0], limits[1] / own[1])
        found = (max(1, round(own[0] * ratio)), max(1, round(own[1] * ratio)))
        if params.how == "within":
            return _Fitted(found)
        space = [(limit - side) // 2 for limit, side in zip(limits, found, strict=True)]
        return _Fitted(found, -space[0], -space[1], (limits[0], limits[1]))
    sides = (wanted[0] or own[0], wanted[1] or own[1])
    if params.how == "stretch":
        return _Fitted(sides)
    ratio = max(sides[0] / own[0], sides[1] / own[1])
    found = (max(1, round(own[0] * ratio)), max(1, round(own[1] * ratio)))
    left, top = (max(0, (one - side) // 2) for one, side in zip(found, sides, strict=True))
    return _Fitted(found, left, top, (min(sides[0], found[0]), min(sides[1], found[1])))


def _is_met(condition: str, own: Size, scaled_to: tuple[int, int]) -> bool:
    (wide, high), area = scaled_to, scaled_to[0] * scaled_to[1]
    return {
        "always": True,
        "larger": own.height > high or own.width > wide,
        "smaller": own.height < high or own.width < wide,
        "larger area": own.height * own.width > area,
        "smaller area": own.height * own.width < area,
    }[condition]


def _fit_of(params: Fit, size: Size) -> tuple[_Fitted | None, Size]:
    """Return the change of an image, None for no change, and the size after it, before it is cut to multiples."""
    need_one_of("method", params.method, IMAGE_METHODS)
    need_one_of("how", params.how, FITS)
    need_one_of("condition", params.condition, CONDITIONS)
    for name, side in (("width", params.width), ("height", params.height), ("multiple", params.multiple)):
        need(name, side, 0, MAX_SIDE)
    fit = _fitted(params, size)
    if not _is_met(params.condition, size, fit.scaled):
        return None, size
    width, height = fit.size or fit.scaled
    need("width", width, 1, MAX_SIDE)
    need("height", height, 1, MAX_SIDE)
    return fit, Size(width, height, size.frames)


def fit_size(params: Fit, size: Size) -> Size:
    """Return the size of an image after a fit. Raises UnusableField."""
    found = _fit_of(params, size)[1]
    step = max(1, params.multiple)
    width, height = found.width // step * step, found.height // step * step
    if not width or not height:
        raise UnusableField(f"multiple: found {step} for {found.width}x{found.height}, expected up to the sides")
    return replace(found, width=width, height=height)


def _fit(params: Fit, inputs: Inputs) -> ImagePixels | VideoFrames:
    image = inputs["image"]
    high, wide = frames_of(image).shape[1:3]
    fit, found = _fit_of(params, Size(wide, high))
    frames_THWC = frames_of(image if fit is None else scaled(image, *fit.scaled, params.method))
    if fit is not None and fit.size is not None:
        if params.how == "pad":
            count, (wide, high) = len(frames_THWC), fit.scaled
            padded = np.zeros((count, found.height, found.width, frames_THWC.shape[-1]), np.uint8)
            padded[:, -fit.top : high - fit.top, -fit.left : wide - fit.left] = frames_THWC
            frames_THWC = padded
        else:
            frames_THWC = frames_THWC[:, fit.top : fit.top + found.height, fit.left : fit.left + found.width]
    step = max(1, params.multiple)
    width, height = found.width // step * step, found.height // step * step
    left, top = (found.width % step) // 2, (found.height % step) // 2
    return image_like(image, frames_THWC[:, top : top + height, left : left + width])


def crop_box(params: CropAt, size: Size) -> tuple[int, int, Size]:
    """Return the corner of a crop at a place, and its size. Raises UnusableField for a part without a pixel."""
    need_one_of("position", params.position, CORNERS)
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    wide, high = min(size.width, params.width), min(size.height, params.height)
    down, _, across = params.position.partition("-")
    if down in ("left", "right"):
        down, across = "center", down
    places = {"left": 0, "top": 0, "right": size.width - wide, "bottom": size.height - high}
    left = places.get(across, round((size.width - wide) / 2)) + params.x
    top = places.get(down, round((size.height - high) / 2)) + params.y
    right, bottom = min(left + wide, size.width), min(top + high, size.height)
    left, top = max(0, left), max(0, top)
    if right <= left or bottom <= top:
        raise UnusableField(
            f"x, y: found {params.x}, {params.y} for an image of {size.width}x{size.height}, expected a part in it"
        )
    return left, top, replace(size, width=right - left, height=bottom - top)


def _cropped_at(params: CropAt, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames_THWC = frames_of(inputs["image"])
    left, top, size = crop_box(params, Size(frames_THWC.shape[2], frames_THWC.shape[1]))
    return image_like(inputs["image"], frames_THWC[:, top : top + size.height, left : left + size.width])


def _amount_size(params: Amount, sizes: Sizes) -> Size:
    need("amount", params.amount, 0, 1)
    return sizes["image"]


def _adaptively_sharpened(params: Amount, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return (e + w * (b + d + f + h)) / (1 + 4w) for a pixel e and its four neighbours, with
    w = -sqrt(min(low, 2 - high) / high) * (1/8 + amount * (1/5 - 1/8)). `low` and `high` are the smallest and the
    largest level of the five pixels, plus these of the four diagonal ones; outside of the image levels are 0.

    Source: AMD's contrast-adaptive sharpening, in the form for an image of the same size."""
    peak = np.float32(1 / 8 + params.amount * (1 / 5 - 1 / 8))

    def sharpened(levels_HWC: FloatArray) -> FloatArray:
        high, wide = levels_HWC.shape[:2]
        space = np.pad(levels_HWC, ((1, 1), (1, 1), (0, 0)))
        parts = {(y, x): space[y : y + high, x : x + wide] for y in range(3) for x in range(3)}
        sides = [parts[place] for place in ((0, 1), (1, 0), (1, 2), (2, 1))]
        five, four = [*sides, parts[1, 1]], [parts[place] for place in ((0, 0), (0, 2), (2, 0), (2, 2))]
        low = np.minimum.reduce(five) + np.minimum.reduce(four)
        most = np.maximum.reduce(five) + np.maximum.reduce(four)
        weight = -np.sqrt(np.maximum(np.minimum(low, 2 - most), 0) / (most + np.float32(1e-5))) * peak
        return np.asarray((parts[1, 1] + weight * sum(sides)) / (1 + 4 * weight), np.float32)

    return each_frame(inputs["image"], sharpened)


def _grey_size(params: Grey, sizes: Sizes) -> Size:
    need("factor", params.factor, 0, 1)
    need_one_of("method", params.method, GREYS)
    return sizes["image"]


def _grey(params: Grey, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return an image mixed with its grey image: weighted by a recommendation, the mean of the channels, or the mean of
    the highest and the lowest one. Opacity stays."""
    weights = {GREYS[0]: (0.2126, 0.7152, 0.0722), GREYS[1]: (0.299, 0.587, 0.114), GREYS[2]: (1 / 3, 1 / 3, 1 / 3)}
    share = np.float32(params.factor)

    def change(levels_HWC: FloatArray) -> FloatArray:
        colours = levels_HWC[..., :3]
        if params.method in weights:
            grey = colours @ np.asarray(weights[params.method], np.float32)
        else:
            grey = (colours.max(-1) + colours.min(-1)) / 2
        found = levels_HWC.copy()
        found[..., :3] = (1 - share) * colours + share * grey[..., None]
        return found

    return each_frame(inputs["image"], change)


def _opaque(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return the colours of an image without its opacity."""
    return image_like(inputs["image"], frames_of(inputs["image"])[..., :3])


def _two_levels(params: Amount, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return white where the mean of the channels is above the amount, and black elsewhere."""

    def change(levels_HWC: FloatArray) -> FloatArray:
        above = levels_HWC[..., :3].mean(-1, keepdims=True) > params.amount
        return np.broadcast_to(above, (*levels_HWC.shape[:2], 3)).astype(np.float32)

    return each_frame(inputs["image"], change)


def _primary_size(params: Primary, sizes: Sizes) -> Size:
    need_one_of("colour", params.colour, PRIMARIES)
    for name in ("red", "green", "blue"):
        need(name, getattr(params, name), 0, 1)
    return sizes["image"]


def _of_primary(params: Primary, inputs: Inputs) -> Mask | VideoMask:
    colours = levels(frames_of(inputs["image"])[..., :3])
    found = np.ones(colours.shape[:3], bool)
    for place, threshold in enumerate((params.red, params.green, params.blue)):
        channel = colours[..., place]
        if _HIGH[params.colour][place] == "1":
            found &= channel >= np.float32(1 - threshold)
        else:
            found &= channel <= np.float32(threshold) if params.colour == "black" else channel < np.float32(threshold)
    return _as_mask(inputs["image"], found)


def _near_size(params: Near, sizes: Sizes) -> Size:
    for name in ("red", "green", "blue", "threshold"):
        need(name, getattr(params, name), 0, 255)
    return sizes["image"]


def _near(params: Near, inputs: Inputs) -> Mask | VideoMask:
    away = np.abs(frames_of(inputs["image"])[..., :3].astype(np.int16) - (params.red, params.green, params.blue))
    return _as_mask(inputs["image"], (away <= params.threshold).all(-1))


def _as_mask(image: ImagePixels | VideoFrames, found_THW: Any) -> Mask | VideoMask:
    values_THW = np.where(found_THW, 255, 0).astype(np.uint8)
    return Mask(values_THW[0]) if isinstance(image, ImagePixels) else VideoMask(values_THW)


def _gaussian_size(params: MaskGaussian, sizes: Sizes) -> Size:
    need("radius", params.radius, 0, MOST_BLURRED)
    need("sigma", params.sigma, 0.01, MOST_BLURRED)
    need("level", params.level, 0, 1)
    size = sizes["mask"]
    need_work("radius", params.radius, 6 * (2 * params.radius + 1), size)
    if params.radius >= min(size.width, size.height):
        raise UnusableField(f"radius: found {params.radius} for a mask of {size.width}x{size.height}, expected less")
    return size


def _gaussian(params: MaskGaussian, inputs: Inputs) -> Mask | VideoMask:
    places = np.arange(-params.radius, params.radius + 1)
    weights = np.exp(-(places**2) / (2 * params.sigma**2))
    weights = np.asarray(weights / weights.sum(), np.float32)
    found = []
    for one_HW in masks_of(inputs["mask"]):
        levels_HW = levels(one_HW)
        if params.level:
            levels_HW = (levels_HW > params.level).astype(np.float32)
        found.append(as_pixels(blurred(levels_HW, weights)))
    return mask_like(inputs["mask"], np.stack(found))


def _row(name: str, params: type[Any], run: Any, size: Any, result: str = IMAGE) -> Operation:
    return Operation(name, params, {"image": IMAGE}, result, run, size)


PACK_EDITS = (
    _row("image_pick", Pick, _picked, _pick_size),
    _row("image_fit", Fit, _fit, lambda given, sizes: fit_size(given, sizes["image"])),
    _row("image_crop_at", CropAt, _cropped_at, lambda given, sizes: crop_box(given, sizes["image"])[2]),
    _row("image_sharpen_adaptive", Amount, _adaptively_sharpened, _amount_size),
    _row("image_grey", Grey, _grey, _grey_size),
    _row("image_without_alpha", NoSettings, _opaque, same_as("image")),
    _row("image_two_levels", Amount, _two_levels, _amount_size),
    _row("mask_of_primary", Primary, _of_primary, _primary_size, MASK),
    _row("mask_of_near_colour", Near, _near, _near_size, MASK),
    Operation("mask_gaussian", MaskGaussian, {"mask": MASK}, MASK, _gaussian, _gaussian_size),
)
