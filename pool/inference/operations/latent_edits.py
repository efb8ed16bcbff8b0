"""Edits of latents: empty, scaled, cropped, flipped, rotated, pasted, added, interpolated.

A `Latent` is one latent of an image or of a video, in the scale of the diffusion model. It holds neither a batch nor a
noise mask: a batch is as many latents, with a task each, so that batch, from batch and repeat are lists of latents of
whoever plans the tasks, and a noise mask is a `Mask` next to the latent. `NOT_LATENT_EDITS` names them.

Sizes and places are in pixels; a cell is `downscale` pixels, and parts of a cell are cut off. Formulas that depend on
the scale of the latents (all but moving and linear scaling) are computed in the VAE's scale (`VaeScale`), as ComfyUI
has latents between nodes.

Shape legend: C channels, H W latent height and width; frames of a video may be between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from modelpool.pool.families.parts.audio_tracks import MOST_SOUND
from modelpool.pool.inference.operations.image_edits import FLIPS, TURNS, Flip, Turn, placed, turned_size
from modelpool.pool.inference.operations.operation import (
    LATENT,
    MASK,
    MAX_FRAMES,
    MAX_SIDE,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    need_one_of,
    same_as,
)
from modelpool.pool.inference.operations.pixel_levels import levels, masks_of
from modelpool.pool.inference.operations.resampling import LATENT_METHODS, SLERP, resampled, slerped
from modelpool.pool.inference.pixels.image_ops import centre_box
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import FloatArray, Latent

#: changes of latents that are no operation on one result, and why
NOT_LATENT_EDITS: Mapping[str, str] = MappingProxyType(
    {
        "latent_batch": "a Latent holds no batch: a batch is a list of latents",
        "latent_from_batch": "a Latent holds no batch: a batch is a list of latents",
        "latent_repeat": "a Latent holds no batch: a batch is a list of latents",
        "latent_noise_mask": "a Latent holds no mask: sampling reads a Mask next to it",
    }
)
#: pixels of a cell in ComfyUI's nodes, whatever the model
DOWNSCALE = 8
#: numbers of a scale: their products with latents are finite
_MOST = 1e12
#: least side of a latent that was scaled to a size, in pixels
_LEAST_SIDE = 64
#: how far the mean, and the deviation, of a cell moves: down, and up
_MOST_MEAN, _MOST_DEVIATION = (0.3, 0.35), (0.35, 0.5)


@dataclass(frozen=True, slots=True)
class VaeScale:
    """Latents of the diffusion model are (latents of the VAE - shift - means) / deviations * factor, by channel.

    As a setting of an operation it is `numbers`: factor, shift, the means and the deviations."""

    factor: float = 1.0
    shift: float = 0.0
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    @classmethod
    def of(cls, latent: LatentFacts) -> VaeScale:
        """Return the scale of a family."""
        return cls(latent.scaling_factor, latent.shift, latent.means, latent.deviations)

    @classmethod
    def of_numbers(cls, numbers: tuple[float, ...]) -> VaeScale:
        """Return the scale of a setting; () is the scale in which both are one. Raises UnusableField."""
        if not numbers:
            return cls()
        if len(numbers) < 2 or len(numbers) % 2 or not all(abs(each) <= _MOST for each in numbers) or not numbers[0]:
            raise UnusableField(f"scale: found {numbers}, expected a factor, a shift, and means and deviations")
        factor, shift, *others = numbers
        half = len(others) // 2
        if not all(others[half:]):
            raise UnusableField(f"scale: found the deviations {others[half:]}, expected none that is 0")
        return cls(factor, shift, tuple(others[:half]), tuple(others[half:]))

    @property
    def numbers(self) -> tuple[float, ...]:
        """As a setting."""
        return (self.factor, self.shift, *self.means, *self.deviations)

    def to_vae(self, samples_CHW: FloatArray) -> FloatArray:
        """Return latents in the VAE's scale."""
        found = samples_CHW / np.float32(self.factor)
        if self.means:
            found = found * _by_channel(self.deviations, found) + _by_channel(self.means, found)
        return np.asarray(found + np.float32(self.shift), np.float32)

    def to_model(self, samples_CHW: FloatArray) -> FloatArray:
        """Return latents in the diffusion model's scale."""
        found = samples_CHW - np.float32(self.shift)
        if self.means:
            found = (found - _by_channel(self.means, found)) / _by_channel(self.deviations, found)
        return np.asarray(found * np.float32(self.factor), np.float32)


def _by_channel(values: tuple[float, ...], like_CHW: FloatArray) -> FloatArray:
    if len(values) != len(like_CHW):
        found = counted(len(values), "mean and deviation", "means and deviations")
        raise UnusableField(f"scale: found {found}, expected {len(like_CHW)}")
    return np.asarray(values, np.float32).reshape(-1, *[1] * (like_CHW.ndim - 1))


@dataclass(frozen=True, slots=True)
class EmptyLatent:
    """Zeros in the diffusion model's scale, in cells; `frames` cells in time, 0 for an image."""

    channels: int
    width: int
    height: int
    frames: int = 0


@dataclass(frozen=True, slots=True)
class LatentToCells:
    """Scale to a width and height in cells. `crop` first cuts off sides that are too long, at the centre."""

    width: int
    height: int
    method: str = "bilinear"
    crop: bool = False
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentToPixels:
    """Scale to pixels: each side has max(64, pixels) // downscale cells. A side that is 0 follows from the other in
    cells, rounded to pixels with halves to the even number; with both 0 nothing changes."""

    width: int
    height: int
    method: str = "bilinear"
    crop: bool = False
    downscale: int = DOWNSCALE
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentByFactor:
    """Scale both sides by a factor; cells are rounded with halves to the even number."""

    factor: float
    method: str = "bilinear"
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentBySides:
    """Scale each side by a factor: parts of a cell are cut off, then the nearest `multiple` of cells is taken, the
    larger one of two. `crop` first cuts off sides that are too long, at the centre."""

    width_factor: float
    height_factor: float
    multiple: int = 1
    method: str = "bilinear"
    crop: bool = False
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentCrop:
    """A part in pixels. A corner that is less than 8 cells from the far side is moved there."""

    x: int
    y: int
    width: int
    height: int
    downscale: int = DOWNSCALE


@dataclass(frozen=True, slots=True)
class LatentPaste:
    """The place of the source, and the pixels over which its sides inside the destination fade."""

    x: int = 0
    y: int = 0
    feather: int = 0
    resize: bool = False
    downscale: int = DOWNSCALE


@dataclass(frozen=True, slots=True)
class LatentMix:
    """The scale in which both latents are mixed."""

    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentFactor:
    """A factor of all values."""

    factor: float
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentRatio:
    """The share of the first latent."""

    ratio: float
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentFrames:
    """Cells in time: the first one, and their number."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LatentPlace:
    """The cell in time at which other cells are put; from the end if it is negative."""

    index: int


@dataclass(frozen=True, slots=True)
class LatentStart:
    """Cells in time at the start that become like those behind them, and how many of those are read."""

    start: int
    reference: int
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SoundTrackOf:
    """The latent of an empty audio track, which takes the place of "sound" where that is missing: zeros in the
    diffusion model's scale, `length` positions of `width` numbers. The pool fills both in."""

    length: int = 0
    width: int = 0


def _empty_size(params: EmptyLatent, sizes: Sizes) -> Size:
    need("channels", params.channels, 1, 1024)
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    need("frames", params.frames, 0, MAX_FRAMES)
    return Size(params.width, params.height, params.frames)


def _empty(params: EmptyLatent, inputs: Inputs) -> Latent:
    time = (params.frames,) if params.frames else ()
    return Latent(np.zeros((params.channels, *time, params.height, params.width), np.float32))


def _to_cells(params: LatentToCells, sizes: Sizes) -> Size:
    need_one_of("method", params.method, LATENT_METHODS)
    need("width", params.width, 1, MAX_SIDE)
    need("height", params.height, 1, MAX_SIDE)
    return replace(sizes["samples"], width=params.width, height=params.height)


def _to_pixels(params: LatentToPixels, sizes: Sizes) -> Size:
    need_one_of("method", params.method, LATENT_METHODS)
    need("downscale", params.downscale, 1, 256)
    need("width", params.width, 0, MAX_SIDE)
    need("height", params.height, 0, MAX_SIDE)
    size = sizes["samples"]
    width, height = params.width, params.height
    if not width and not height:
        return size
    wide = max(_LEAST_SIDE, width) if width else 0
    high = max(_LEAST_SIDE, height) if height else 0
    wide, high = (
        wide or max(_LEAST_SIDE, round(size.width * high / size.height)),
        high or max(_LEAST_SIDE, round(size.height * wide / size.width)),
    )
    return Size(max(1, wide // params.downscale), max(1, high // params.downscale), size.frames)


def _by_factor(params: LatentByFactor, sizes: Sizes) -> Size:
    need_one_of("method", params.method, LATENT_METHODS)
    need("factor", params.factor, 0.001, 1000)
    size = sizes["samples"]
    return Size(max(1, round(size.width * params.factor)), max(1, round(size.height * params.factor)), size.frames)


def _by_sides(params: LatentBySides, sizes: Sizes) -> Size:
    need_one_of("method", params.method, LATENT_METHODS)
    need("multiple", params.multiple, 1, 256)
    need("width_factor", params.width_factor, 0.001, 1000)
    need("height_factor", params.height_factor, 0.001, 1000)
    size = sizes["samples"]
    sides = (cells_of_side(size.width, params.width_factor, params.multiple),
             cells_of_side(size.height, params.height_factor, params.multiple))  # fmt: skip
    if not all(sides):
        factors = f"{params.width_factor:g} and {params.height_factor:g}"
        raise UnusableField(f"width_factor, height_factor: found {factors}, expected factors that leave some cells")
    return Size(*sides, size.frames)


def cells_of_side(cells: int, factor: float, multiple: int) -> int:
    """Return the cells of a side after scaling, as `LatentBySides`."""
    return (2 * int(cells * factor) + multiple) // (2 * multiple) * multiple


def _scaled_to(size: Callable[[Any, Sizes], Size]) -> Callable[[Any, Inputs], Latent]:
    def run(params: Any, inputs: Inputs) -> Latent:
        latent: Latent = inputs["samples"]
        wanted = size(params, {"samples": _cells(latent)})
        crops = getattr(params, "crop", False)
        return replace(latent, samples_CHW=_scaled(latent, wanted, params.method, params.scale, crops))

    return run


def _cells(latent: Latent) -> Size:
    return Size(latent.samples_CHW.shape[-1], latent.samples_CHW.shape[-2])


def _scaled(latent: Latent, size: Size, method: str, numbers: tuple[float, ...], crops: bool = False) -> FloatArray:
    samples_CHW = latent.samples_CHW
    if crops:
        left, top, wide, high = centre_box(samples_CHW.shape[-1], samples_CHW.shape[-2], size.width, size.height)
        samples_CHW = samples_CHW[..., top : top + high, left : left + wide]
    if method == SLERP:
        scale = VaeScale.of_numbers(numbers)
        return scale.to_model(slerped(scale.to_vae(samples_CHW), size.width, size.height))
    return resampled(samples_CHW, size.width, size.height, method)


def _crop_place(params: LatentCrop, size: Size) -> tuple[int, int, Size]:
    need("downscale", params.downscale, 1, 256)
    for name in ("x", "y"):
        need(name, getattr(params, name), 0, MAX_SIDE)
    for name in ("width", "height"):
        need(name, getattr(params, name), params.downscale, MAX_SIDE)
    left = min(params.x // params.downscale, max(0, size.width - 8))
    top = min(params.y // params.downscale, max(0, size.height - 8))
    wide, high = params.width // params.downscale, params.height // params.downscale
    return left, top, Size(min(wide, size.width - left), min(high, size.height - top), size.frames)


def _cropped(params: LatentCrop, inputs: Inputs) -> Latent:
    latent: Latent = inputs["samples"]
    left, top, size = _crop_place(params, _cells(latent))
    return _moved(latent, latent.samples_CHW[..., top : top + size.height, left : left + size.width])


def _moved(latent: Latent, samples_CHW: FloatArray) -> Latent:
    return replace(latent, samples_CHW=np.ascontiguousarray(samples_CHW))


def _flip_size(params: Flip, sizes: Sizes) -> Size:
    need_one_of("method", params.method, FLIPS)
    return sizes["samples"]


def _flipped(params: Flip, inputs: Inputs) -> Latent:
    return _moved(inputs["samples"], np.flip(inputs["samples"].samples_CHW, FLIPS.index(params.method) - 2))


def _turned(params: Turn, inputs: Inputs) -> Latent:
    turns = -TURNS.index(params.rotation)
    return _moved(inputs["samples"], np.rot90(inputs["samples"].samples_CHW, turns, axes=(-2, -1)))


def _paste_size(params: LatentPaste, sizes: Sizes) -> Size:
    for name in ("x", "y"):
        need(name, getattr(params, name), -MAX_SIDE, MAX_SIDE)
    need("feather", params.feather, 0, MAX_SIDE)
    need("downscale", params.downscale, 1, 256)
    return sizes["destination"]


def _pasted(params: LatentPaste, inputs: Inputs) -> Latent:
    """Return the destination with the source in it: source * share + destination * (1 - share).

    The share is the mask, scaled to the source with "bilinear", or 1; with n cells of feather, it is multiplied by
    (i + 1) / n at the place i from each side of the source that lies inside the destination."""
    destination, source = inputs["destination"], inputs["source"]
    under, over = destination.samples_CHW, source.samples_CHW
    _check_alike("source", under, over, sides=False)
    if params.resize:
        over = resampled(over, under.shape[-1], under.shape[-2], "bilinear")
    x, y = (int(place / params.downscale) for place in (params.x, params.y))
    mask = inputs.get("mask")
    if mask is None:
        share_HW = np.ones(over.shape[-2:], np.float32)
    else:
        share_HW = resampled(levels(masks_of(mask)[0]), over.shape[-1], over.shape[-2], "bilinear")
    feather = params.feather // params.downscale
    if feather:
        high, wide = over.shape[-2:]
        rows = _fade(high, feather if y else 0, feather if y + high < under.shape[-2] else 0)
        columns = _fade(wide, feather if x else 0, feather if x + wide < under.shape[-1] else 0)
        share_HW = share_HW * rows[:, None] * columns
    return _moved(destination, placed(under, over, share_HW, x, y))


def _fade(length: int, begin: int, end: int) -> FloatArray:
    found = np.ones(length, np.float32)
    for cells, place in ((begin, found), (end, found[::-1])):
        count = min(cells, length)
        place[:count] *= np.arange(1, count + 1, dtype=np.float32) / max(1, cells)
    return found


def _check_alike(name: str, expected: FloatArray, found: FloatArray, sides: bool = True) -> None:
    """Raise UnusableField for latents of different kinds."""
    one, other = (each.shape if sides else each.shape[:-2] for each in (expected, found))
    if one != other:
        raise UnusableField(f"{name}: found a latent of {found.shape}, expected one like {expected.shape}")


def _both(params: Any, inputs: Inputs, method: str) -> tuple[Latent, FloatArray, FloatArray]:
    """Return the first latent, and both in the VAE's scale, the second in the first's size after a centre crop."""
    first, second = inputs["first"], inputs["second"]
    if first.sound_LA is not None or second.sound_LA is not None:
        raise UnusableField("first, second: expected latents without sound")
    other = second.samples_CHW
    _check_alike("second", first.samples_CHW, other, sides=False)
    if other.shape != first.samples_CHW.shape:
        other = _scaled(second, _cells(first), method, params.scale, crops=True)
    scale = VaeScale.of_numbers(params.scale)
    return first, scale.to_vae(first.samples_CHW), scale.to_vae(other)


def _sum_of(sign: int) -> Callable[[LatentMix, Inputs], Latent]:
    def run(params: LatentMix, inputs: Inputs) -> Latent:
        first, one, other = _both(params, inputs, "bilinear")
        return _moved(first, VaeScale.of_numbers(params.scale).to_model(one + np.float32(sign) * other))

    return run


def _multiplied(params: LatentFactor, inputs: Inputs) -> Latent:
    latent: Latent = inputs["samples"]
    scale = VaeScale.of_numbers(params.scale)
    return _moved(latent, scale.to_model(scale.to_vae(latent.samples_CHW) * np.float32(params.factor)))


def _interpolated(params: LatentRatio, inputs: Inputs) -> Latent:
    """Return vectors of the channels with the direction of u1 * ratio + u2 * (1 - ratio), for the unit vectors of both
    latents, and the length |a1| * ratio + |a2| * (1 - ratio). A vector of length 0 has the direction 0."""
    first, one, other = _both(params, inputs, "bilinear")
    lengths = [np.linalg.norm(each, axis=0, keepdims=True) for each in (one, other)]
    units = [_divided(each, length) for each, length in zip((one, other), lengths, strict=True)]
    mixed = units[0] * params.ratio + units[1] * (1 - params.ratio)
    direction = _divided(mixed, np.linalg.norm(mixed, axis=0, keepdims=True))
    found = direction * (lengths[0] * params.ratio + lengths[1] * (1 - params.ratio))
    return _moved(first, VaeScale.of_numbers(params.scale).to_model(np.asarray(found, np.float32)))


def _divided(values: Any, lengths: Any) -> Any:
    return np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)


def _blended(params: LatentRatio, inputs: Inputs) -> Latent:
    """Return first * ratio + second * (1 - ratio); a second one of another size is scaled with "bicubic"."""
    first, one, other = _both(params, inputs, "bicubic")
    found = one * np.float32(params.ratio) + other * np.float32(1 - params.ratio)
    return _moved(first, VaeScale.of_numbers(params.scale).to_model(found))


def _ratio_size(params: LatentRatio, sizes: Sizes) -> Size:
    need("ratio", params.ratio, 0, 1)
    return sizes["first"]


def _factor_size(params: LatentFactor, sizes: Sizes) -> Size:
    need("factor", params.factor, -1e6, 1e6)
    return sizes["samples"]


def _frames_size(params: LatentFrames, sizes: Sizes) -> Size:
    size = sizes["samples"]
    if not size.frames:
        raise UnusableField("samples: found the latent of an image, expected the latent of a video")
    need("start", params.start, 0, size.frames - 1)
    need("length", params.length, 1, size.frames - params.start)
    return replace(size, frames=params.length)


def _some_frames(params: LatentFrames, inputs: Inputs) -> Latent:
    return _moved(inputs["samples"], inputs["samples"].samples_CHW[:, params.start : params.start + params.length])


def _first_cell(params: LatentPlace, sizes: Sizes) -> int:
    """Return the first cell that is replaced. Raises UnusableField."""
    size, source = sizes["destination"], sizes["source"]
    if not size.frames:
        raise UnusableField("destination: found the latent of an image, expected the latent of a video")
    need("index", params.index, -size.frames, size.frames - 1)
    first = params.index % size.frames
    if (source.width, source.height) != (size.width, size.height):
        expected = f"{size.width}x{size.height} cells, as of destination"
        raise unusable_field("source", f"{source.width}x{source.height} cells", expected)
    if first + source.count > size.frames:
        found = f"{source.count} behind the first {first}"
        raise unusable_field("source", found, f"latent frames that fit into {size.frames}")
    return first


def _replaced_size(params: LatentPlace, sizes: Sizes) -> Size:
    _first_cell(params, sizes)
    return sizes["destination"]


def _replaced(params: LatentPlace, inputs: Inputs) -> Latent:
    """Return the destination with the cells of the source in the place of its own."""
    destination, source = inputs["destination"], inputs["source"]
    under, over = destination.samples_CHW, source.samples_CHW
    over = over[:, None] if over.ndim < under.ndim else over
    if (under.shape[0], *under.shape[2:]) != (over.shape[0], *over.shape[2:]):
        raise UnusableField(f"source: found a latent of {over.shape}, expected one like {under.shape}")
    first = params.index % under.shape[1]
    found = under.copy()
    found[:, first : first + over.shape[1]] = over
    return _moved(destination, found)


def _normalized_size(params: LatentStart, sizes: Sizes) -> Size:
    need("start", params.start, 1, MAX_FRAMES)
    need("reference", params.reference, 1, MAX_FRAMES)
    if not sizes["samples"].frames:
        raise UnusableField("samples: found the latent of an image, expected the latent of a video")
    return sizes["samples"]


def _normalized(params: LatentStart, inputs: Inputs) -> Latent:
    """Return a video of which the first cells have the mean and the deviation of those behind them, as far as each
    cell's may move (`_MOST_MEAN`, `_MOST_DEVIATION`), in the VAE's scale. A video without cells behind them stays."""
    latent: Latent = inputs["samples"]
    scale = VaeScale.of_numbers(params.scale)
    found_CTHW = scale.to_vae(latent.samples_CHW)
    like_CTHW = found_CTHW[:, params.start : params.start + params.reference]
    if not like_CTHW.size:
        return latent
    first_CTHW = found_CTHW[:, : params.start]
    all_but_time = (0, 2, 3)
    mean_T = first_CTHW.mean(all_but_time, keepdims=True)
    deviation_T = first_CTHW.std(all_but_time, ddof=1, keepdims=True)
    mean = np.clip(like_CTHW.mean(), mean_T - _MOST_MEAN[0], mean_T + _MOST_MEAN[1])
    deviation = np.clip(like_CTHW.std(ddof=1), deviation_T - _MOST_DEVIATION[0], deviation_T + _MOST_DEVIATION[1])
    found_CTHW[:, : params.start] = _divided(first_CTHW - mean_T, deviation_T) * deviation + mean
    return _moved(latent, scale.to_model(found_CTHW))


def _sound_track_size(params: SoundTrackOf, sizes: Sizes) -> Size:
    need("length", params.length, 0, MOST_SOUND)
    need("width", params.width, 0, MAX_SIDE)
    return sizes["samples"]


def _with_sound_track(params: SoundTrackOf, inputs: Inputs) -> Latent:
    sound_LA = np.zeros((params.length, params.width), np.float32)
    if "sound" in inputs:
        found: Latent = inputs["sound"]
        if found.sound_LA is None:
            raise UnusableField("sound: found a latent without audio, expected one with it")
        sound_LA = found.sound_LA
    samples: Latent = inputs["samples"]
    return replace(samples, sound_LA=sound_LA)


def _row(
    name: str,
    params: type[Any],
    run: Any,
    size: Any,
    inputs: Mapping[str, str] = MappingProxyType({"samples": LATENT}),
    optional: tuple[str, ...] = (),
) -> Operation:
    def checked(given: Any, sizes: Sizes) -> Size:
        VaeScale.of_numbers(getattr(given, "scale", ()))
        return size(given, sizes)  # type: ignore[no-any-return]

    return Operation(name, params, inputs, LATENT, run, checked, frozenset(optional))


_TWO = MappingProxyType({"first": LATENT, "second": LATENT})
_PASTE = MappingProxyType({"destination": LATENT, "source": LATENT, "mask": MASK})
_CELLS = MappingProxyType({"destination": LATENT, "source": LATENT})
LATENT_EDITS = (
    _row("latent_empty", EmptyLatent, _empty, _empty_size, MappingProxyType({})),
    _row("latent_upscale", LatentToCells, _scaled_to(_to_cells), _to_cells),
    _row("latent_upscale_to_pixels", LatentToPixels, _scaled_to(_to_pixels), _to_pixels),
    _row("latent_upscale_by", LatentByFactor, _scaled_to(_by_factor), _by_factor),
    _row("latent_upscale_by_sides", LatentBySides, _scaled_to(_by_sides), _by_sides),
    _row("latent_crop", LatentCrop, _cropped, lambda given, sizes: _crop_place(given, sizes["samples"])[2]),
    _row("latent_flip", Flip, _flipped, _flip_size),
    _row("latent_rotate", Turn, _turned, lambda given, sizes: turned_size(given.rotation, sizes["samples"])),
    _row("latent_composite", LatentPaste, _pasted, _paste_size, _PASTE, ("mask",)),
    _row("latent_add", LatentMix, _sum_of(1), same_as("first"), _TWO),
    _row("latent_subtract", LatentMix, _sum_of(-1), same_as("first"), _TWO),
    _row("latent_multiply", LatentFactor, _multiplied, _factor_size),
    _row("latent_interpolate", LatentRatio, _interpolated, _ratio_size, _TWO),
    _row("latent_blend", LatentRatio, _blended, _ratio_size, _TWO),
    _row("latent_frames", LatentFrames, _some_frames, _frames_size),
    _row("latent_replace_frames", LatentPlace, _replaced, _replaced_size, _CELLS),
    _row("latent_normalize_start", LatentStart, _normalized, _normalized_size),
    _row(
        "latent_sound_track",
        SoundTrackOf,
        _with_sound_track,
        _sound_track_size,
        MappingProxyType({"samples": LATENT, "sound": LATENT}),
        ("sound",),
    ),
)
