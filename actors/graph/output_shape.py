"""Resolves the size and the length of an output from the request and the model's defaults.

Pure functions of values; every error names a field of a request, and valid values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import (
    AUDIO_FORMATS,
    DEFAULT_QUALITY,
    IMAGE_FORMATS,
    LAYER_FORMATS,
    VIDEO_FORMATS,
)
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import AudioFacts, ModelDefaults, SamplingFacts, VideoFacts
from modelpool.pool.core.stage_params import OutputShape
from modelpool.pool.families.parts.sound import MOST_SOUND

#: kind of output
Kind = Literal["image", "video", "layers", "audio"]
_FORMATS: dict[Kind, tuple[str, ...]] = {
    "image": IMAGE_FORMATS,
    "video": VIDEO_FORMATS,
    "layers": LAYER_FORMATS,
    "audio": AUDIO_FORMATS,
}


@dataclass(frozen=True, slots=True)
class Duration:
    """Frames and frame rate of a video or of the layers of an image, seconds of an audio clip; all 0 for an image."""

    frames: int = 0
    frame_rate: float = 0.0
    seconds: float = 0.0


def kind_of(facts: SamplingFacts) -> Kind:
    """Return the kind of output of models of `facts`."""
    if facts.video is not None:
        return "layers" if facts.video.layers else "video"
    return "audio" if facts.audio is not None else "image"


def size_of(request: GenerateRequest, model: str, defaults: ModelDefaults, scale: float = 1.0) -> tuple[int, int]:
    """Return width and height in pixels of the output of `request` by `model`, times `scale` in whole latent cells;
    both 0 for audio. Raises UnusableField."""
    facts = defaults.sampling
    if facts.audio is not None:
        for name, side in (("width", request.width), ("height", request.height)):
            if side is not None:
                raise unsupported_field(name, model, "generates audio", side)
        return 0, 0
    step, (width, height) = facts.side_multiple, (request.width or defaults.width, request.height or defaults.height)
    if scale == 1:
        for name, side in (("width", width), ("height", height)):
            if step and side % step:
                expected = f"a multiple of {step} for model {model!r} ({_nearest(side, step)})"
                raise unusable_field(name, side, expected)
        return width, height
    width, height = (round(side * scale / (step or SIZE_STEP)) * (step or SIZE_STEP) for side in (width, height))
    if max(width, height) > MAX_SIDE:
        raise unusable_field("hires.scale", scale, f"a scale that gives sides of up to {MAX_SIDE} pixels")
    return width, height


def duration_of(request: GenerateRequest, model: str, facts: SamplingFacts) -> Duration:
    """Return the length of the output of `request` by `model`. Raises UnusableField."""
    kind = kind_of(facts)
    if facts.video is None:
        for name, found in (("frames", request.frames), ("frame_rate", request.frame_rate)):
            if found is not None:
                raise unsupported_field(name, model, f"generates {_PLURALS[kind]}, not videos", found)
    if kind != "audio" and request.seconds is not None:
        raise unsupported_field("seconds", model, f"generates {_PLURALS[kind]}, not audio", request.seconds)
    if facts.video is not None:
        frames = facts.video.frames if request.frames is None else request.frames
        duration = Duration(_fitting_frames(frames, model, facts.video), request.frame_rate or facts.video.rate)
        _check_sound(duration, model, facts.video)
        return duration
    if facts.audio is not None:
        return Duration(seconds=_fitting_seconds(request.seconds, model, facts.audio))
    return Duration()


def _check_sound(duration: Duration, model: str, video: VideoFacts) -> None:
    """Raise UnusableField for a frame rate so low that the audio of the video is too long."""
    if video.sound is None:
        return
    most = MOST_SOUND / video.sound.cells_per_second
    if duration.frames / duration.frame_rate > most:
        least = f"at least {duration.frames / most:.2g} for {duration.frames} frames"
        raise unusable_field(
            "frame_rate", duration.frame_rate, f"{least}: model {model!r} makes at most {most:.0f} seconds of audio"
        )


#: the fields of a request that an extent consists of
_EXTENT = ("width", "height", "frames")


def missing_extent(request: GenerateRequest, defaults: ModelDefaults) -> dict[str, int]:
    """Return the size and length that `request` leaves out, for a model that generates videos of one extent only: its
    image is scaled to cover them."""
    found = zip(_EXTENT, defaults.extent or (), strict=False)
    return {name: number for name, number in found if getattr(request, name) is None}


def check_extent(size: tuple[int, int], frames: int, model: str, defaults: ModelDefaults) -> None:
    """Raise UnusableField for a video of another size or length than those of a model that generates one only."""
    if defaults.extent is None:
        return
    width, height, length = defaults.extent
    for name, found, expected in zip(_EXTENT, (*size, frames), defaults.extent, strict=True):
        if found != expected:
            only = f"model {model!r} has positions for {width} x {height} pixels and {length} frames only"
            raise unusable_field(name, found, f"{expected}: {only}")


def output_shape_of(cells: tuple[int, ...], model: str, model_defaults: ModelDefaults) -> OutputShape:
    """Return the shape of what `model` decodes from a latent of this shape after the channels. Raises UnusableField for
    a latent of another kind."""
    facts, sides = model_defaults.sampling, tuple(cell * model_defaults.downscale for cell in cells[-2:])
    audio = facts.audio
    if audio is not None and len(cells) == 1 and (seconds := audio.seconds_of(cells[0], model_defaults.downscale)):
        return OutputShape(0, 0, seconds=seconds)
    if facts.video is not None and len(cells) == 3 and cells[0] > facts.video.leading:
        leading = facts.video.leading
        frames = 1 + (cells[0] - 1 - leading) * facts.video.frames_per_cell
        return OutputShape(sides[1], sides[0], frames, facts.video.rate, leading=leading)
    if kind_of(facts) == "image" and len(cells) == 2:
        return OutputShape(sides[1], sides[0])
    expected = f"a latent of a {kind_of(facts)}: model {model!r} generates {_PLURALS[kind_of(facts)]}"
    raise unusable_field("latent", f"shape {cells}", expected)


def format_of(format_name: str | None, model: str, facts: SamplingFacts) -> str:
    """Return the file format of the output: the named one, if `model` supports it, or the default of its kind. Raises
    UnusableField."""
    kind = kind_of(facts)
    if format_name is not None and format_name not in _FORMATS[kind]:
        expected = f"{' or '.join(_FORMATS[kind])}: model {model!r} generates {_PLURALS[kind]}"
        raise unusable_field("format", format_name, expected)
    return format_name or _FORMATS[kind][0]


def quality_of(quality: int | None, format_name: str) -> int | None:
    """Return the quality of a file in this format, or its default; None for formats without. Raises UnusableField."""
    if quality is not None and format_name not in DEFAULT_QUALITY:
        raise unusable_field("quality", quality, f"a format that has it ({', '.join(DEFAULT_QUALITY)})")
    return quality or DEFAULT_QUALITY.get(format_name)


def output_plural(facts: SamplingFacts) -> str:
    """Return the kind of output in the plural."""
    return _PLURALS[kind_of(facts)]


_PLURALS: dict[Kind, str] = {
    "image": "images",
    "video": "videos",
    "layers": "layers of images",
    "audio": "audio clips",
}


def _fitting_frames(frames: int, model: str, video: VideoFacts) -> int:
    beyond = (frames - 1) % video.multiple
    if beyond:
        fewer, more = frames - beyond, frames - beyond + video.multiple
        expected = f"a multiple of {video.multiple} plus 1 for model {model!r} ({fewer} or {more})"
        raise unusable_field("frames", frames, expected)
    return frames


def _fitting_seconds(seconds: float | None, model: str, audio: AudioFacts) -> float:
    if seconds is None:
        return audio.seconds
    if seconds > audio.longest:
        raise unusable_field("seconds", seconds, f"up to {audio.longest:g} for model {model!r}")
    return seconds


def _nearest(side: int, step: int) -> str:
    lower = side - side % step
    return f"{lower} or {lower + step}" if lower else str(step)
