"""Edits of images: crop, padding with its mask, negative, blending, pasting, batches, flips, rotations, solid colours.

An image is one image or the frames of a video; of two images, the second one is scaled to the first one's size where it
must fit, and its frames are repeated from the first on.

Shape legend: T frames, H W height and width, C colours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.image_scaling import scaled
from modelpool.pool.inference.operations.operation import (
    AUDIO,
    IMAGE,
    MASK,
    MAX_FRAMES,
    MAX_SIDE,
    Inputs,
    Operation,
    Size,
    Sizes,
    first_timing,
    need,
    need_one_of,
    same_as,
)
from modelpool.pool.inference.operations.pixel_levels import (
    STILL_RATE,
    as_pixels,
    frames_of,
    image_like,
    levels,
    mask_like,
    masks_of,
    repeated_to,
)
from modelpool.pool.inference.operations.resampling import resampled
from modelpool.pool.values.core.stage_params import (
    FloatArray,
    ImagePixels,
    Mask,
    PixelArray,
    VideoFrames,
    VideoMask,
)

#: the colour of space around an image: level 0.5, rounded to the even value
GREY = 128
BLEND_MODES = ("normal", "multiply", "screen", "overlay", "soft_light", "difference")
TURNS = ("none", "90 degrees", "180 degrees", "270 degrees")
SQUARES = ("center", "top", "bottom", "left", "right")
FLIPS = ("x-axis: vertically", "y-axis: horizontally")


@dataclass(frozen=True, slots=True)
class NoSettings:
    """No parameters."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A part in pixels from the upper left corner. Its corner is moved into the image, and it ends at the image."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CropSquare:
    """Crop to the largest square at one side of the image, or at its centre."""

    position: str = "center"


@dataclass(frozen=True, slots=True)
class Pad:
    """Space around an image in pixels, and the pixels over which the mask fades inside the image."""

    left: int
    top: int
    right: int
    bottom: int
    feathering: int = 0


@dataclass(frozen=True, slots=True)
class Blend:
    """The share of the second image, and the way in which both are mixed."""

    factor: float = 0.5
    mode: str = "normal"


@dataclass(frozen=True, slots=True)
class Paste:
    """The place of the source's upper left corner; `resize` scales the source to the destination first."""

    x: int = 0
    y: int = 0
    resize: bool = False


@dataclass(frozen=True, slots=True)
class FromBatch:
    """The first frame, and the number of frames. Both are moved into the batch."""

    start: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class Repeat:
    """How often."""

    amount: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Clockwise."""

    rotation: str


@dataclass(frozen=True, slots=True)
class Flip:
    """Upside down ("x-axis: vertically") or mirrored ("y-axis: horizontally")."""

    method: str


@dataclass(frozen=True, slots=True)
class Solid:
    """A colour as 0xRRGGBB, for `count` images."""

    width: int
    height: int
    colour: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class FrameRate:
    """Frames per second."""

    rate: float


def crop_size(params: Crop, size: Size) -> tuple[int, int, Size]:
    """Return left, top and the size of a crop of an image of `size`: min(x, width - 1) and min(y, height - 1), and what
    of the wanted size is in the image. Raises UnusableField."""
    for name in ("x", "y"):
        need(name, getattr(params, name), 0, MAX_SIDE)
    for name in ("width", "height"):
        need(name, getattr(params, name), 1, MAX_SIDE)
    left, top = min(params.x, size.width - 1), min(params.y, size.height - 1)
    return (
        left,
        top,
        Size(min(params.width, size.width - left), min(params.height, size.height - top), size.frames),
    )


def _crop_size(params: Crop, sizes: Sizes) -> Size:
    return crop_size(params, sizes["image"])[2]


def _cropped(params: Crop, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames_THWC = frames_of(inputs["image"])
    left, top, size = crop_size(params, Size(frames_THWC.shape[2], frames_THWC.shape[1]))
    return image_like(inputs["image"], frames_THWC[:, top : top + size.height, left : left + size.width])


def _square_box(params: CropSquare, size: Size) -> tuple[int, int, int]:
    """Return left, top and side of the largest square of an image of `size`. Raises UnusableField."""
    need_one_of("position", params.position, SQUARES)
    side = min(size.width, size.height)
    left = {"left": 0, "right": size.width - side}.get(params.position, (size.width - side) // 2)
    top = {"top": 0, "bottom": size.height - side}.get(params.position, (size.height - side) // 2)
    return left, top, side


def _square_size(params: CropSquare, sizes: Sizes) -> Size:
    side = _square_box(params, sizes["image"])[2]
    return Size(side, side, sizes["image"].frames)


def _square(params: CropSquare, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames_THWC = frames_of(inputs["image"])
    left, top, side = _square_box(params, Size(frames_THWC.shape[2], frames_THWC.shape[1]))
    return image_like(inputs["image"], frames_THWC[:, top : top + side, left : left + side])


def _pad_size(params: Pad, sizes: Sizes) -> Size:
    for name in ("left", "top", "right", "bottom", "feathering"):
        need(name, getattr(params, name), 0, MAX_SIDE)
    size = sizes["image"]
    width, height = size.width + params.left + params.right, size.height + params.top + params.bottom
    return Size(width, height, size.frames)


def _pad_mask_size(params: Pad, sizes: Sizes) -> Size:
    return replace(_pad_size(params, sizes), frames=0)


def _padded(params: Pad, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return the image with grey space (128) around it."""
    space = ((0, 0), (params.top, params.bottom), (params.left, params.right), (0, 0))
    return image_like(inputs["image"], np.pad(frames_of(inputs["image"]), space, constant_values=GREY))


def _pad_mask(params: Pad, inputs: Inputs) -> Mask:
    """Return a mask that is 1 in the space around an image, and in it (1 - d / feathering)^2, where d is the distance
    in pixels, from 0, to the nearest side with some space, at most `feathering`. The image has no gradient if twice the
    feathering reaches its width or height, or if no side has space."""
    _, high, wide, _ = frames_of(inputs["image"]).shape
    inner_HW: FloatArray = np.zeros((high, wide), np.float32)
    feathering = params.feathering
    if feathering and 2 * feathering < min(high, wide):
        rows, columns = np.arange(high, dtype=np.float32), np.arange(wide, dtype=np.float32)
        vertical, horizontal = np.full(high, np.inf, np.float32), np.full(wide, np.inf, np.float32)
        for distances, places, begins, ends in (
            (vertical, rows, params.top, params.bottom),
            (horizontal, columns, params.left, params.right),
        ):
            if begins:
                np.minimum(distances, places, out=distances)
            if ends:
                np.minimum(distances, places[::-1], out=distances)
        distance_HW = np.minimum(vertical[:, None], horizontal[None, :])
        inner_HW = np.asarray(np.clip(1 - distance_HW / feathering, 0, 1) ** 2, np.float32)
    space = ((params.top, params.bottom), (params.left, params.right))
    return Mask(as_pixels(np.pad(inner_HW, space, constant_values=1.0)))


def _negative(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return 255 minus each value; an opacity stays."""
    frames_THWC = frames_of(inputs["image"]).copy()
    frames_THWC[..., :3] = 255 - frames_THWC[..., :3]
    return image_like(inputs["image"], frames_THWC)


def _blend_size(params: Blend, sizes: Sizes) -> Size:
    need("factor", params.factor, 0, 1)
    need_one_of("mode", params.mode, BLEND_MODES)
    return sizes["first"]


def _blended(params: Blend, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return first * (1 - factor) + mixed * factor, limited to 0 to 1; `mixed` of both levels a and b is

    normal b | multiply a * b | screen 1 - (1 - a)(1 - b) | difference a - b
    overlay: 2ab if a <= 0.5, else 1 - 2(1 - a)(1 - b)
    soft_light: a - (1 - 2b) * a * (1 - a) if b <= 0.5, else a + (2b - 1) * (g(a) - a), where
    g(a) = ((16a - 12)a + 4)a if a <= 0.25, else sqrt(a)

    A second image of another size is scaled with "bicubic" and a centre crop."""
    image = inputs["first"]
    frames_THWC = frames_of(image)
    second_THWC = repeated_to(frames_of(_fitted(inputs["second"], frames_THWC, "bicubic")), len(frames_THWC))
    mixed = [_mixed_frame(params, one, other) for one, other in zip(frames_THWC, second_THWC, strict=True)]
    return image_like(image, np.stack(mixed))


def _mixed_frame(params: Blend, first_HWC: PixelArray, second_HWC: PixelArray) -> PixelArray:
    one, other = levels(first_HWC), levels(second_HWC)
    return as_pixels(one * (1 - params.factor) + mixed_levels(one, other, params.mode) * params.factor)


def mixed_levels(a: FloatArray, b: FloatArray, mode: str) -> FloatArray:
    """Return the mixture of two levels in one of the `BLEND_MODES` (`_blended`)."""
    match mode:
        case "multiply":
            return a * b
        case "screen":
            return 1 - (1 - a) * (1 - b)
        case "overlay":
            return np.where(a <= 0.5, 2 * a * b, 1 - 2 * (1 - a) * (1 - b))
        case "soft_light":
            lifted = np.where(a <= 0.25, ((16 * a - 12) * a + 4) * a, np.sqrt(a))
            return np.where(b <= 0.5, a - (1 - 2 * b) * a * (1 - a), a + (2 * b - 1) * (lifted - a))
        case "difference":
            return a - b
    return b


def _fitted(image: ImagePixels | VideoFrames, like_THWC: PixelArray, method: str) -> ImagePixels | VideoFrames:
    """Return an image in the size of another, with a centre crop, and with an alpha channel as `_with_channels`."""
    image = _with_channels(image, like_THWC.shape[-1])
    if frames_of(image).shape[1:3] == like_THWC.shape[1:3]:
        return image
    return scaled(image, like_THWC.shape[2], like_THWC.shape[1], method, crops=True)


def alike_in_channels(
    one: ImagePixels | VideoFrames, other: ImagePixels | VideoFrames
) -> tuple[ImagePixels | VideoFrames, ImagePixels | VideoFrames]:
    """Return both images with an alpha channel if one of them has it; the one that is added is opaque."""
    channels = max(frames_of(each).shape[-1] for each in (one, other))
    return _with_channels(one, channels), _with_channels(other, channels)


def _with_channels(image: ImagePixels | VideoFrames, channels: int) -> ImagePixels | VideoFrames:
    """Return an image with so many channels: its alpha channel is left out, or one is added, which is opaque."""
    frames_THWC = frames_of(image)
    if frames_THWC.shape[-1] > channels:
        return image_like(image, frames_THWC[..., :channels])
    if frames_THWC.shape[-1] < channels:
        opaque = np.full((*frames_THWC.shape[:3], 1), 255, np.uint8)
        return image_like(image, np.concatenate([frames_THWC, opaque], axis=-1))
    return image


def _paste_size(params: Paste, sizes: Sizes) -> Size:
    for name in ("x", "y"):
        need(name, getattr(params, name), -MAX_SIDE, MAX_SIDE)
    return sizes["destination"]


def _pasted(params: Paste, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return the destination with the source in it at (x, y), which may be outside: source * mask + destination *
    (1 - mask). Without a mask it is 1; a mask of another size is scaled with "bilinear". `resize` uses "bilinear". The
    destination decides about an alpha channel."""
    destination = inputs["destination"]
    under_THWC = frames_of(destination)
    source = _with_channels(inputs["source"], under_THWC.shape[-1])
    if params.resize:
        source = scaled(source, under_THWC.shape[2], under_THWC.shape[1], "bilinear")
    over_THWC = repeated_to(frames_of(source), len(under_THWC))
    share_THW = _share(inputs.get("mask"), over_THWC)
    found_THWC = under_THWC.copy()
    left, top = max(0, params.x), max(0, params.y)
    right, bottom = params.x + over_THWC.shape[2], params.y + over_THWC.shape[1]
    # only what changes: a tile is pasted into an image of a hundred times its size
    for found, over, share in zip(found_THWC, over_THWC, share_THW, strict=True):
        there = found[top : max(top, bottom), left : max(left, right)]
        shown = np.moveaxis(levels(there), -1, 0), np.moveaxis(levels(over), -1, 0)
        there[...] = np.moveaxis(as_pixels(placed(*shown, share, params.x - left, params.y - top)), 0, -1)
    return image_like(destination, found_THWC)


def _share(mask: Mask | VideoMask | None, like_THWC: PixelArray) -> FloatArray:
    count, high, wide = like_THWC.shape[:3]
    if mask is None:
        return np.ones((count, high, wide), np.float32)
    return repeated_to(resampled(levels(masks_of(mask)), wide, high, "bilinear"), count)


def placed(under_NHW: FloatArray, over_NHW: FloatArray, share_HW: FloatArray, x: int, y: int) -> FloatArray:
    """Return `under` with `over` at (x, y), mixed by a share of the size of `over`. What lies outside is left out."""
    found = under_NHW.copy()
    left, top = max(0, x), max(0, y)
    right = min(under_NHW.shape[-1], x + over_NHW.shape[-1])
    bottom = min(under_NHW.shape[-2], y + over_NHW.shape[-2])
    if right <= left or bottom <= top:
        return found
    there = (..., slice(top, bottom), slice(left, right))
    here = (..., slice(top - y, bottom - y), slice(left - x, right - x))
    share = share_HW[here]
    found[there] = over_NHW[here] * share + under_NHW[there] * (1 - share)
    return found


def _batch_size(params: NoSettings, sizes: Sizes) -> Size:
    first, second = sizes["first"], sizes["second"]
    return replace(first, frames=first.count + second.count)


def _batch(params: NoSettings, inputs: Inputs) -> VideoFrames:
    """Return the frames of both images, one behind the other. The second image is scaled with "bilinear" and a centre
    crop. Both have an alpha channel if one has. Rate and sound are the first image's, or the second's if the first is
    no video; else 1 per second."""
    first, second = alike_in_channels(inputs["first"], inputs["second"])
    first_THWC = frames_of(first)
    frames_THWC = np.concatenate([first_THWC, frames_of(_fitted(second, first_THWC, "bilinear"))])
    video = next((one for one in (first, second) if isinstance(one, VideoFrames)), VideoFrames(frames_THWC, STILL_RATE))
    return replace(video, frames_THWC=frames_THWC)


def from_batch_span(params: FromBatch, count: int) -> tuple[int, int]:
    """Return the first frame and the one behind the last: min(start, count - 1), and at least one frame."""
    need("start", params.start, 0, MAX_FRAMES)
    need("length", params.length, 1, MAX_FRAMES)
    start = min(params.start, count - 1)
    return start, min(start + params.length, count)


def _from_batch_size(params: FromBatch, sizes: Sizes) -> Size:
    start, end = from_batch_span(params, sizes["image"].count)
    return replace(sizes["image"], frames=0 if end - start == 1 else end - start)


def _from_batch(params: FromBatch, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return some frames; a single one as an image."""
    frames_THWC = frames_of(inputs["image"])
    start, end = from_batch_span(params, len(frames_THWC))
    if end - start == 1:
        return ImagePixels(np.ascontiguousarray(frames_THWC[start]))
    return image_like(inputs["image"], frames_THWC[start:end])


def _repeat_size(params: Repeat, sizes: Sizes) -> Size:
    need("amount", params.amount, 1, MAX_FRAMES)
    return replace(sizes["image"], frames=sizes["image"].count * params.amount)


def _repeated(params: Repeat, inputs: Inputs) -> VideoFrames:
    """Return all frames as often as asked, the whole batch each time."""
    image = inputs["image"]
    frames_THWC = np.concatenate([frames_of(image)] * params.amount)
    return (
        replace(image, frames_THWC=frames_THWC)
        if isinstance(image, VideoFrames)
        else VideoFrames(frames_THWC, STILL_RATE)
    )


def frames_there_and_back(count: int) -> int:
    """Return the number of frames that play forwards and backwards again: neither end is there twice, so that the video
    repeats without a pause."""
    return count + max(0, count - 2)


def _there_and_back_size(params: NoSettings, sizes: Sizes) -> Size:
    size = sizes["image"]
    return replace(size, frames=frames_there_and_back(size.frames)) if size.frames else size


def _there_and_back(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return frames, and those between both ends once more, backwards; without sound."""
    image: ImagePixels | VideoFrames = inputs["image"]
    if not isinstance(image, VideoFrames):
        return image
    frames_THWC = image.frames_THWC
    return replace(image, frames_THWC=np.concatenate([frames_THWC, frames_THWC[-2:0:-1]]), sound=None)


def turned_size(rotation: str, size: Size) -> Size:
    """Return the size after a rotation. Raises UnusableField for an unknown one."""
    need_one_of("rotation", rotation, TURNS)
    return Size(size.height, size.width, size.frames) if TURNS.index(rotation) % 2 else size


def _turned(params: Turn, inputs: Inputs) -> ImagePixels | VideoFrames:
    turns = -TURNS.index(params.rotation)
    return image_like(inputs["image"], np.rot90(frames_of(inputs["image"]), turns, axes=(1, 2)))


def _flip_size(params: Flip, sizes: Sizes) -> Size:
    need_one_of("method", params.method, FLIPS)
    return sizes["image"]


def _flipped(params: Flip, inputs: Inputs) -> ImagePixels | VideoFrames:
    axis = 1 + FLIPS.index(params.method)
    return image_like(inputs["image"], np.flip(frames_of(inputs["image"]), axis))


def _solid_size(params: Solid, sizes: Sizes) -> Size:
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    need("colour", params.colour, 0, 0xFFFFFF)
    need("count", params.count, 1, MAX_FRAMES)
    return Size(params.width, params.height, params.count if params.count > 1 else 0)


def _solid(params: Solid, inputs: Inputs) -> ImagePixels | VideoFrames:
    colour = [params.colour >> shift & 255 for shift in (16, 8, 0)]
    one_HWC = np.full((params.height, params.width, 3), colour, np.uint8)
    if params.count == 1:
        return ImagePixels(one_HWC)
    return VideoFrames(np.repeat(one_HWC[None], params.count, axis=0), STILL_RATE)


def _video_size(params: FrameRate, sizes: Sizes) -> Size:
    need("rate", params.rate, 0.01, 1000)
    return replace(sizes["image"], frames=sizes["image"].count)


def _video(params: FrameRate, inputs: Inputs) -> VideoFrames:
    """Return frames as a video with this rate, and with the sound of `sound` if there is one."""
    image = inputs["image"]
    sound = inputs.get("sound") or getattr(image, "sound", None)
    return VideoFrames(np.ascontiguousarray(frames_of(image)), params.rate, sound)


def mask_crop(params: Crop, mask: Mask | VideoMask) -> Mask | VideoMask:
    """Return a part of a mask, as of an image."""
    values_THW = masks_of(mask)
    left, top, size = crop_size(params, Size(values_THW.shape[2], values_THW.shape[1]))
    return mask_like(mask, values_THW[:, top : top + size.height, left : left + size.width])


def _row(
    name: str,
    params: type[Any],
    inputs: dict[str, str],
    run: Any,
    size: Any,
    result: str = IMAGE,
    optional: tuple[str, ...] = (),
    timing: Any = first_timing,
) -> Operation:
    return Operation(name, params, inputs, result, run, size, frozenset(optional), timing)


_ONE, _TWO = {"image": IMAGE}, {"first": IMAGE, "second": IMAGE}
IMAGE_EDITS = (
    _row("image_crop", Crop, _ONE, _cropped, _crop_size),
    _row("image_crop_square", CropSquare, _ONE, _square, _square_size),
    _row("image_pad", Pad, _ONE, _padded, _pad_size),
    _row("image_pad_mask", Pad, _ONE, _pad_mask, _pad_mask_size, MASK),
    _row("image_invert", NoSettings, _ONE, _negative, same_as("image")),
    _row("image_blend", Blend, _TWO, _blended, _blend_size),
    _row(
        "image_composite",
        Paste,
        {"destination": IMAGE, "source": IMAGE, "mask": MASK},
        _pasted,
        _paste_size,
        optional=("mask",),
    ),
    _row("image_batch", NoSettings, _TWO, _batch, _batch_size),
    _row("image_from_batch", FromBatch, _ONE, _from_batch, _from_batch_size),
    _row("image_repeat", Repeat, _ONE, _repeated, _repeat_size),
    _row("image_there_and_back", NoSettings, _ONE, _there_and_back, _there_and_back_size),
    _row("image_rotate", Turn, _ONE, _turned, lambda given, sizes: turned_size(given.rotation, sizes["image"])),
    _row("image_flip", Flip, _ONE, _flipped, _flip_size),
    _row("image_solid", Solid, {}, _solid, _solid_size),
    _row(
        "video_of_images",
        FrameRate,
        {"image": IMAGE, "sound": AUDIO},
        _video,
        _video_size,
        optional=("sound",),
        timing=lambda given, timings: given.rate,
    ),
)
