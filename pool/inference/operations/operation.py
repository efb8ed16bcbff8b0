"""`Operation`: a pure function over results, with parameters, the kinds of its inputs, and the size of its result.

Torch-free, so that a process that only plans work can check parameters and compute sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.pool.values.core.errors import UnusableField, counted
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    Encoded,
    ImagePixels,
    Latent,
    Mask,
    Result,
    VideoFrames,
    VideoMask,
)

#: kinds of inputs and results. An image is one image, or frames of equal size; a mask likewise
IMAGE, MASK, LATENT, ENCODED, AUDIO = "image", "mask", "latent", "encoded", "audio"
KINDS: Mapping[str, tuple[type[Any], ...]] = MappingProxyType(
    {
        IMAGE: (ImagePixels, VideoFrames),
        MASK: (Mask, VideoMask),
        LATENT: (Latent,),
        ENCODED: (Encoded,),
        AUDIO: (AudioSamples,),
    }
)
#: of a result: its longest side, its frames, and its pixels or cells in all frames
MAX_SIDE, MAX_FRAMES, MAX_CELLS = 16384, 4096, 1 << 28
#: values that an operation reads or compares: its pixels times the steps for each; a minute or two of one core
MAX_WORK = 1 << 36


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of an image, a mask or a latent, in pixels or cells; `frames` is 0 for a single image."""

    width: int
    height: int
    frames: int = 0

    @property
    def count(self) -> int:
        """The number of images: at least one."""
        return max(1, self.frames)


#: types of parameters, as they are annotated, for messages
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "a text",
        "tuple[int, ...]": "whole numbers",
        "tuple[float, ...]": "numbers",
    }
)
#: sizes of the inputs by name; encoded texts and audio have none
Sizes: TypeAlias = "Mapping[str, Size]"
Inputs: TypeAlias = "Mapping[str, Any]"
#: frames per second of images and seconds of audio, by name of the input; single images have none
Timings: TypeAlias = "Mapping[str, float]"
_NO_SIZE = Size(0, 0)


def first_timing(params: Any, timings: Timings) -> float:
    """Return the timing of the first input that has one; 0 for none."""
    return next(iter(timings.values()), 0.0)


@dataclass(frozen=True, slots=True)
class Operation:
    """A pure function over results.

    params    class of its parameters: a frozen dataclass of numbers, texts and tuples
    inputs    kinds of its inputs, by name
    optional  names of the inputs that may be missing
    result    kind of its result
    run       (parameters, inputs) -> result; same inputs, same bytes
    size      (parameters, sizes of the inputs) -> size of the result. Raises UnusableField for impossible parameters,
              so that errors are known before anything runs
    """

    name: str
    params: type[Any]
    inputs: Mapping[str, str]
    result: str
    run: Callable[[Any, Inputs], Result]
    size: Callable[[Any, Sizes], Size]
    optional: frozenset[str] = frozenset()
    timing: Callable[[Any, Timings], float] = first_timing

    def params_of(self, settings: Mapping[str, Any]) -> Any:
        """Return the parameters with these settings, defaults for the others. Raises UnusableField for unknown names,
        for settings that are missing, and for values of another type."""
        self.check_settings(settings)
        known = {one.name: one for one in dataclasses.fields(self.params)}
        missing = [name for name, one in known.items() if name not in settings and one.default is dataclasses.MISSING]
        if missing:
            raise UnusableField(f"{self.name}: expected the settings {', '.join(missing)}")
        return self.params(**settings)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise UnusableField for settings of unknown names, and for values of another type."""
        known = {one.name: one for one in dataclasses.fields(self.params)}
        if unknown := sorted(set(settings) - set(known)):
            expected = ", ".join(known) or "none"
            raise UnusableField(f"{self.name}: found the settings {', '.join(unknown)}, expected {expected}")
        for name, value in settings.items():
            expected = str(known[name].type)
            if not _is_of(value, expected):
                raise UnusableField(f"{self.name}: {name}: found {str(value)[:100]!r}, expected {_TYPES[expected]}")

    def size_of(self, params: Any, sizes: Sizes) -> Size:
        """Return the size of the result. Raises UnusableField, also for a result that is too large."""
        found = self.size(params, sizes)
        cells = found.width * found.height * found.count
        if max(found.width, found.height) > MAX_SIDE or found.frames > MAX_FRAMES or cells > MAX_CELLS:
            frames = f" in {counted(found.frames, 'frame')}" if found.frames else ""
            limits = f"sides up to {MAX_SIDE}, up to {MAX_FRAMES} frames, and up to {MAX_CELLS} pixels in all"
            raise UnusableField(f"{self.name}: its result has {found.width}x{found.height}{frames}; expected {limits}")
        return found

    def __call__(self, params: Any, inputs: Inputs) -> Result:
        """Return the result of these parameters and inputs. Raises UnusableField."""
        for name, kind in self.inputs.items():
            value = inputs.get(name)
            if value is None and name in self.optional:
                continue
            if not isinstance(value, KINDS[kind]):
                found = "nothing" if value is None else type(value).__name__
                raise UnusableField(f"{self.name}: {name}: found {found}, expected {_expected(kind)}")
        if unknown := sorted(set(inputs) - set(self.inputs)):
            raise UnusableField(
                f"{self.name}: found the inputs {', '.join(unknown)}, expected {', '.join(self.inputs)}"
            )
        self.size_of(params, {name: size_of_result(value) for name, value in inputs.items() if value is not None})
        return self.run(params, inputs)


def _is_of(value: Any, expected: str) -> bool:
    """Whether a value has the type of a parameter, as its annotation says."""
    if expected.startswith("tuple"):
        item = "int" if "int" in expected else "float"
        return isinstance(value, tuple) and all(_is_of(each, item) for each in value)
    if expected == "bool" or isinstance(value, bool):
        return expected == "bool" and isinstance(value, bool)
    if expected == "float":
        return isinstance(value, int | float)
    return isinstance(value, int if expected == "int" else str)


def size_of_result(value: Result) -> Size:
    """Return the size of an image, a mask or a latent; 0 by 0 for other results."""
    match value:
        case ImagePixels():
            height, width = value.pixels_HWC.shape[:2]
            return Size(width, height)
        case VideoFrames():
            frames, height, width = value.frames_THWC.shape[:3]
            return Size(width, height, frames)
        case Mask():
            height, width = value.values_HW.shape
            return Size(width, height)
        case VideoMask():
            frames, height, width = value.values_THW.shape
            return Size(width, height, frames)
        case Latent() if value.samples_CHW.ndim >= 3:
            *_, height, width = value.samples_CHW.shape
            return Size(width, height, value.samples_CHW.shape[1] if value.samples_CHW.ndim == 4 else 0)
    return _NO_SIZE


def no_size(params: Any, sizes: Sizes) -> Size:
    """The size of an encoded text or of audio: none."""
    return _NO_SIZE


def same_as(name: str) -> Callable[[Any, Sizes], Size]:
    """Return the size function of a result with the size of the input `name`."""
    return lambda params, sizes: sizes[name]


def need(what: str, found: float, least: float, most: float) -> None:
    """Raise UnusableField unless a setting is within its range."""
    if not least <= found <= most:
        raise UnusableField(f"{what}: found {found:g}, expected {least:g} to {most:g}")


def need_work(what: str, found: float, steps: float, size: Size) -> None:
    """Raise UnusableField if a setting takes so many steps for each pixel that all take too long."""
    pixels = size.width * size.height * size.count
    if pixels * steps > MAX_WORK:
        where = f"{size.width}x{size.height}" + (f" in {counted(size.frames, 'frame')}" if size.frames else "")
        raise UnusableField(
            f"{what}: found {found:g} for {where}, which is {steps:,.0f} steps for each of {counted(pixels, 'pixel')}; "
            f"expected up to {MAX_WORK:,} steps in all"
        )


def need_one_of(what: str, found: str, known: tuple[str, ...]) -> None:
    """Raise UnusableField unless a setting is one of the known names."""
    if found not in known:
        raise UnusableField(f"{what}: found {found[:100]!r}, expected one of {', '.join(known)}")


def _expected(kind: str) -> str:
    return " or ".join(one.__name__ for one in KINDS[kind])
