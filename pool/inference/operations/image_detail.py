"""Operations on the details and the frame of images: edges, morphology, noise, two images side by side, space around an
image, brightness and colour differences, and an alpha channel.

Shape legend: T frames, H W height and width, C colours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.image_edits import NoSettings, alike_in_channels
from modelpool.pool.inference.operations.image_filters import blurred
from modelpool.pool.inference.operations.image_scaling import scaled
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
    as_pixels,
    frames_of,
    image_like,
    levels,
    masks_of,
    repeated_to,
)
from modelpool.pool.inference.operations.resampling import IMAGE_METHODS
from modelpool.pool.values.core.stage_params import (
    FloatArray,
    ImagePixels,
    Mask,
    PixelArray,
    VideoFrames,
    VideoMask,
)

MORPHOLOGY = ("erode", "dilate", "open", "close", "gradient", "bottom_hat", "top_hat")
DIRECTIONS = ("right", "down", "left", "up")
COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "white": (255, 255, 255),
        "black": (0, 0, 0),
        "red": (255, 0, 0),
        "green": (0, 255, 0),
        "blue": (0, 0, 255),
    }
)
PLANES = ("Y", "U", "V")
#: side of the square of a morphological operation
MAX_KERNEL = 999
#: shares of red, green and blue in the brightness, and factors of the differences of blue and red to it. Source: ITU-R
#: BT.601
_BRIGHTNESS, _DIFFERENCES = (0.299, 0.587, 0.114), (0.564, 0.713)
#: steps for each pixel: of edges; and of a morphological operation, for each doubling of its square
_EDGE_STEPS, _MORPHOLOGY_STEPS = 128, 12
#: (row, column) of the neighbour in each direction, from the right by eighths of a turn, downwards first
_NEIGHBOURS = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))


@dataclass(frozen=True, slots=True)
class Edges:
    """Thresholds of the steepness: edges above `high`, and edges above `low` that are connected to one of them."""

    low: float = 0.4
    high: float = 0.8


@dataclass(frozen=True, slots=True)
class Morphology:
    """One of `MORPHOLOGY`, with a square of so many pixels."""

    operation: str
    kernel: int = 3


@dataclass(frozen=True, slots=True)
class AddedNoise:
    """Normal noise of this standard deviation, in levels from 0 to 1."""

    seed: int
    strength: float


@dataclass(frozen=True, slots=True)
class Stitch:
    """Where the second image is, whether it is scaled to the side at which both meet, and the pixels and the colour
    between both."""

    direction: str = "right"
    matches: bool = True
    spacing: int = 0
    colour: str = "white"


@dataclass(frozen=True, slots=True)
class Letterbox:
    """The size, the colour of the space around the image, and the method by which it is scaled."""

    width: int
    height: int
    colour: str = "white"
    method: str = "area"


@dataclass(frozen=True, slots=True)
class Plane:
    """Brightness (Y), or the difference of blue (U) or red (V) to it."""

    plane: str


def _edges_size(params: Edges, sizes: Sizes) -> Size:
    need("low", params.low, 0, 1)
    need("high", params.high, 0, 1)
    need_work("high", params.high, _EDGE_STEPS, sizes["image"])
    return sizes["image"]


def _edges(params: Edges, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Canny edges: a blur of 5 x 5 pixels, Sobel's gradient, its local maxima, and two thresholds."""
    weights = np.exp(-(np.arange(-2, 3, dtype=np.float64) ** 2) / 2)
    weights = np.asarray(weights / weights.sum(), np.float32)
    found = []
    for frame_HWC in frames_of(inputs["image"]):
        grey_HW = np.asarray(levels(frame_HWC[..., :3]) @ np.asarray(_BRIGHTNESS, np.float32), np.float32)
        across_HW, down_HW = _gradient(blurred(grey_HW, weights, "reflect"))
        steep_HW = np.sqrt(across_HW**2 + down_HW**2 + 1e-6)
        turn_HW = np.round(np.arctan2(down_HW, across_HW) / (np.pi / 4)).astype(int)
        drops_8HW = np.stack([steep_HW - _moved(steep_HW, *place) for place in _NEIGHBOURS])
        drops = (np.take_along_axis(drops_8HW, (turn_HW + half)[None] % 8, 0)[0] for half in (0, 4))
        ridge_HW = steep_HW * (np.minimum(*drops) > 0)
        edges_HW = _connected(ridge_HW > params.high, ridge_HW > params.low)
        found.append(np.repeat(edges_HW.astype(np.uint8)[..., None] * 255, 3, axis=-1))
    return image_like(inputs["image"], np.stack(found))


def _gradient(grey_HW: FloatArray) -> tuple[FloatArray, FloatArray]:
    padded = np.pad(grey_HW, 1, "edge")
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2]


def _moved(values_HW: Any, rows: int, columns: int) -> Any:
    """Return the neighbour of each place; 0 outside."""
    height, width = values_HW.shape
    padded = np.pad(values_HW, 1)
    return padded[1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]


def _connected(strong_HW: Any, weak_HW: Any) -> Any:
    """Return the strong places, and the weak ones that are connected to them. However long a line is, the number of
    rounds is about the logarithm of its length."""
    there_HW = strong_HW | weak_HW
    count = int(there_HW.sum())
    names_HW = np.full(there_HW.shape, -1, np.int32 if count < 1 << 31 else np.int64)
    names_HW[there_HW] = np.arange(count)
    pairs = []
    for rows, columns in _NEIGHBOURS[:4]:
        others_HW = _moved(names_HW + 1, rows, columns) - 1
        both_HW = there_HW & (others_HW >= 0)
        pairs.append((names_HW[both_HW], others_HW[both_HW]))
    one, other = (np.concatenate(each) for each in zip(*pairs, strict=True))
    parts = np.arange(count, dtype=names_HW.dtype)
    while not np.array_equal(joined := joined_parts(parts, one, other), parts):
        parts = joined
    is_strong = np.zeros(count, bool)
    is_strong[parts[strong_HW[there_HW]]] = True
    found = np.zeros(there_HW.shape, bool)
    found[there_HW] = is_strong[parts]
    return found


def joined_parts(parts: Any, one: Any, other: Any) -> Any:
    """Return the least known member of each one's part, after one round in which `one` and `other`, which are
    neighbours, tell theirs to each other, and each looks up that of its own. Source: Zhang et al. 2020, FastSV."""
    known = parts[parts]
    found = known.copy()
    for here, there in ((one, other), (other, one)):
        np.minimum.at(found, parts[here], known[there])
        np.minimum.at(found, here, known[there])
    return found


def _morphology_size(params: Morphology, sizes: Sizes) -> Size:
    need_one_of("operation", params.operation, MORPHOLOGY)
    need("kernel", params.kernel, 1, MAX_KERNEL)
    need_work("kernel", params.kernel, _MORPHOLOGY_STEPS * params.kernel.bit_length(), sizes["image"])
    return sizes["image"]


def _morphed(params: Morphology, inputs: Inputs) -> ImagePixels | VideoFrames:
    frames = frames_of(inputs["image"])
    narrow, wide = (partial(extreme, size=params.kernel, choose=choose) for choose in (np.minimum, np.maximum))
    match params.operation:
        case "erode":
            found = narrow(frames)
        case "dilate":
            found = wide(frames)
        case "open":
            found = wide(narrow(frames))
        case "close":
            found = narrow(wide(frames))
        case "gradient":
            found = _less(wide(frames), narrow(frames))
        case "top_hat":
            found = _less(frames, wide(narrow(frames)))
        case _:
            found = _less(narrow(wide(frames)), frames)
    return image_like(inputs["image"], found)


def _less(one_THWC: PixelArray, other_THWC: PixelArray) -> PixelArray:
    """Return the difference, at least 0: squares of an even side are not in the middle."""
    return np.asarray(np.maximum(one_THWC.astype(np.int16) - other_THWC, 0), np.uint8)


def extreme(frames_THWC: PixelArray, size: int, choose: Callable[[Any, Any], Any]) -> PixelArray:
    """Return the extreme of a square of pixels, of which there are `size // 2` before each; outside is left out. Each
    round doubles the pixels that are compared."""
    for axis in (1, 2):
        length = frames_THWC.shape[axis]
        before, after = min(size // 2, length - 1), min(size - 1 - size // 2, length - 1)
        pads = [(0, 0)] * 4
        pads[axis] = (before, after)
        made, width, whole = np.moveaxis(np.pad(frames_THWC, pads, "edge"), axis, 0), 1, before + after + 1
        while 2 * width <= whole:
            made, width = choose(made[:-width], made[width:]), 2 * width
        frames_THWC = np.moveaxis(choose(made[:length], made[whole - width : whole - width + length]), 0, axis)
    return np.ascontiguousarray(frames_THWC)


def _noise_size(params: AddedNoise, sizes: Sizes) -> Size:
    need("seed", params.seed, 0, 2**64 - 1)
    need("strength", params.strength, 0, 1)
    return sizes["image"]


def _with_noise(params: AddedNoise, inputs: Inputs) -> ImagePixels | VideoFrames:
    drawn = np.random.default_rng(params.seed)
    found = []
    for frame_HWC in frames_of(inputs["image"]):
        noise_HWC = drawn.standard_normal(frame_HWC.shape, np.float32) * np.float32(params.strength)
        found.append(as_pixels(levels(frame_HWC) + noise_HWC))
    return image_like(inputs["image"], np.stack(found))


def _stitch_sizes(params: Stitch, sizes: Sizes) -> tuple[Size, Size, int]:
    """Return the sizes of both images as they are put together, and the pixels between them, which are even."""
    need_one_of("direction", params.direction, DIRECTIONS)
    need_one_of("colour", params.colour, tuple(COLOURS))
    need("spacing", params.spacing, 0, 1024)
    first, second = sizes["first"], sizes["second"]
    if params.matches and _is_beside(params):
        width = max(1, int(first.height * second.width / second.height))
        second = replace(second, width=width, height=first.height)
    elif params.matches:
        second = replace(second, width=first.width, height=max(1, int(first.width * second.height / second.width)))
    return first, second, params.spacing + params.spacing % 2


def _is_beside(params: Stitch) -> bool:
    return params.direction in ("left", "right")


def stitch_size(params: Stitch, sizes: Sizes) -> Size:
    """Return the size of two images, "first" and "second", side by side. Raises UnusableField."""
    first, second, space = _stitch_sizes(params, sizes)
    frames = max(first.frames, second.frames)
    if _is_beside(params):
        return Size(first.width + space + second.width, max(first.height, second.height), frames)
    return Size(max(first.width, second.width), first.height + space + second.height, frames)


def _stitched(params: Stitch, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return both images side by side, each in the middle of black space if it is smaller. Both have an alpha channel
    if one has: that space is transparent then, and the space between them is not."""
    one, other = alike_in_channels(inputs["first"], inputs["second"])
    sizes = {
        name: Size(frames_of(image).shape[2], frames_of(image).shape[1])
        for name, image in (("first", one), ("second", other))
    }
    _, second, space = _stitch_sizes(params, sizes)
    one_THWC, other_THWC = frames_of(one), frames_of(other)
    if other_THWC.shape[1:3] != (second.height, second.width):
        other_THWC = frames_of(scaled(image_like(other, other_THWC), second.width, second.height, "lanczos"))
    count = max(len(one_THWC), len(other_THWC))
    one_THWC, other_THWC = (_lasting(each, count) for each in (one_THWC, other_THWC))
    axis = 2 if _is_beside(params) else 1
    side = max(one_THWC.shape[3 - axis], other_THWC.shape[3 - axis])
    parts = [_centred(each, side, 3 - axis) for each in (one_THWC, other_THWC)]
    if space:
        shape = list(parts[0].shape)
        shape[axis] = space
        colour = (*COLOURS[params.colour], 255)[: shape[-1]]
        parts.insert(1, np.broadcast_to(np.asarray(colour, np.uint8), shape))
    if params.direction in ("left", "up"):
        parts.reverse()
    like = one if isinstance(one, VideoFrames) or not isinstance(other, VideoFrames) else other
    return image_like(like, np.concatenate(parts, axis))


def _lasting(frames_THWC: PixelArray, count: int) -> PixelArray:
    """Return so many frames: the last one is repeated."""
    return np.concatenate([frames_THWC, *[frames_THWC[-1:]] * (count - len(frames_THWC))])


def _centred(frames_THWC: PixelArray, side: int, axis: int) -> PixelArray:
    missing = side - frames_THWC.shape[axis]
    pads = [(0, 0)] * 4
    pads[axis] = (missing // 2, missing - missing // 2)
    return np.pad(frames_THWC, pads)


def _letterbox_size(params: Letterbox, sizes: Sizes) -> Size:
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    need_one_of("colour", params.colour, tuple(COLOURS))
    need_one_of("method", params.method, IMAGE_METHODS)
    return replace(sizes["image"], width=params.width, height=params.height)


def _letterboxed(params: Letterbox, inputs: Inputs) -> ImagePixels | VideoFrames:
    image = image_like(inputs["image"], frames_of(inputs["image"])[..., :3])
    _, height, width, _ = frames_of(image).shape
    scale = min(params.width / width, params.height / height)
    wide, high = max(1, int(width * scale)), max(1, int(height * scale))
    inner_THWC = frames_of(scaled(image, wide, high, params.method))
    left, top = (params.width - wide) // 2, (params.height - high) // 2
    colour = np.asarray(COLOURS[params.colour], np.uint8)
    found = np.broadcast_to(colour, (len(inner_THWC), params.height, params.width, 3)).copy()
    found[:, top : top + high, left : left + wide] = inner_THWC
    return image_like(image, found)


def _plane_size(params: Plane, sizes: Sizes) -> Size:
    need_one_of("plane", params.plane, PLANES)
    return sizes["image"]


def _plane(params: Plane, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return a plane as a grey image; differences are 0.5 where there is none."""
    found = []
    for frame_HWC in frames_of(inputs["image"]):
        colours_HWC = levels(frame_HWC[..., :3])
        bright_HW = colours_HWC @ np.asarray(_BRIGHTNESS, np.float32)
        plane_HW = bright_HW
        if params.plane != "Y":
            colour, factor = (2, _DIFFERENCES[0]) if params.plane == "U" else (0, _DIFFERENCES[1])
            plane_HW = (colours_HWC[..., colour] - bright_HW) * np.float32(factor) + np.float32(0.5)
        found.append(np.repeat(as_pixels(plane_HW)[..., None], 3, axis=-1))
    return image_like(inputs["image"], np.stack(found))


def _of_planes(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return the image of three grey images: the inverse of `image_plane`. The others get the size of the first."""
    count, height, width, _ = frames_of(inputs["Y"]).shape
    planes = [frames_of(scaled(inputs[name], width, height, "bilinear"))[..., :3] for name in PLANES]
    bright, blue, red = (levels(repeated_to(each, count)).mean(-1) for each in planes)
    reddish, blueish = red - np.float32(0.5), blue - np.float32(0.5)
    found = [
        bright + np.float32(1.403) * reddish,
        bright - np.float32(0.714) * reddish - np.float32(0.344) * blueish,
        bright + np.float32(1.773) * blueish,
    ]
    return image_like(inputs["Y"], as_pixels(np.stack(found, axis=-1)))


def _with_alpha(params: NoSettings, inputs: Inputs) -> ImagePixels | VideoFrames:
    """Return an image that is transparent where the mask is white; the mask is scaled to it."""
    image, mask = inputs["image"], inputs["mask"]
    frames_THWC = frames_of(image)[..., :3]
    _, height, width, _ = frames_THWC.shape
    grey = image_like(image, np.repeat(masks_of(mask)[..., None], 3, axis=-1))
    masks_THW = repeated_to(frames_of(scaled(grey, width, height, "bilinear"))[..., 0], len(frames_THWC))
    return image_like(image, np.concatenate([frames_THWC, 255 - masks_THW[..., None]], axis=-1))


def _alpha_mask(params: NoSettings, inputs: Inputs) -> Mask | VideoMask:
    """Return the transparency of an image: black for one without an alpha channel."""
    frames_THWC = frames_of(inputs["image"])
    found_THW = 255 - frames_THWC[..., 3] if frames_THWC.shape[-1] > 3 else np.zeros(frames_THWC.shape[:3], np.uint8)
    return VideoMask(found_THW) if isinstance(inputs["image"], VideoFrames) else Mask(found_THW[0])


def _row(name: str, params: type[Any], run: Any, size: Any, inputs: dict[str, str] | None = None) -> Operation:
    return Operation(name, params, {"image": IMAGE} if inputs is None else inputs, IMAGE, run, size)


IMAGE_DETAIL = (
    _row("image_edges", Edges, _edges, _edges_size),
    _row("image_morphology", Morphology, _morphed, _morphology_size),
    _row("image_noise", AddedNoise, _with_noise, _noise_size),
    _row("image_stitch", Stitch, _stitched, stitch_size, {"first": IMAGE, "second": IMAGE}),
    _row("image_letterbox", Letterbox, _letterboxed, _letterbox_size),
    _row("image_plane", Plane, _plane, _plane_size),
    _row("image_of_planes", NoSettings, _of_planes, same_as("Y"), dict.fromkeys(PLANES, IMAGE)),
    _row("image_with_alpha", NoSettings, _with_alpha, same_as("image"), {"image": IMAGE, "mask": MASK}),
    Operation("image_alpha_mask", NoSettings, {"image": IMAGE}, MASK, _alpha_mask, same_as("image")),
)
