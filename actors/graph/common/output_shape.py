"""Resolves the size and the length of an output from the request and the model's defaults.

Pure functions of values; every error names a field of a request, and valid values.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import (
    AUDIO_FORMATS,
    DEFAULT_QUALITY,
    IMAGE_FORMATS,
    LAYER_FORMATS,
    MAX_QUALITY,
    RATE_FACTORS,
    VIDEO_FORMATS,
    VIDEO_QUALITY,
)
from modelpool.pool.families.parts.audio_tracks import MOST_SOUND
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.output_kinds import EXTENT, Kind, fitting_frames
from modelpool.pool.values.core.output_kinds import check_extent as check_extent
from modelpool.pool.values.core.output_kinds import kind_of as kind_of
from modelpool.pool.values.core.output_kinds import output_plural as output_plural
from modelpool.pool.values.core.output_kinds import output_shape_of as output_shape_of
from modelpool.pool.values.core.sampling_facts import AudioFacts, ModelDefaults, SamplingFacts, VideoFacts

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
                raise unsupported_field(name, model, f"generates {output_plural(facts)}, not videos", found)
    if kind != "audio" and request.seconds is not None:
        raise unsupported_field("seconds", model, f"generates {output_plural(facts)}, not audio", request.seconds)
    if facts.video is not None:
        frames = facts.video.frames if request.frames is None else request.frames
        duration = Duration(fitting_frames(frames, model, facts.video), request.frame_rate or facts.video.rate)
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
        least = f"at least {duration.frames / most:.2g} for {counted(duration.frames, 'frame')}"
        raise unusable_field(
            "frame_rate", duration.frame_rate, f"{least}: model {model!r} makes at most {most:.0f} seconds of audio"
        )


def missing_extent(request: GenerateRequest, defaults: ModelDefaults) -> dict[str, int]:
    """Return the size and length that `request` leaves out, for a model that generates videos of one extent only: its
    image is scaled to cover them."""
    found = zip(EXTENT, defaults.extent or (), strict=False)
    return {name: number for name, number in found if getattr(request, name) is None}


def format_of(format_name: str | None, model: str, facts: SamplingFacts) -> str:
    """Return the file format of the output: the named one, if `model` supports it, or the default of its kind. Raises
    UnusableField."""
    kind = kind_of(facts)
    if format_name is not None and format_name not in _FORMATS[kind]:
        expected = f"{' or '.join(_FORMATS[kind])}: model {model!r} generates {output_plural(facts)}"
        raise unusable_field("format", format_name, expected)
    return format_name or _FORMATS[kind][0]


def quality_of(quality: int | None, format_name: str) -> int | None:
    """Return the quality of a file in this format, or its default; None for formats without, and for a video without
    one of its own. Raises UnusableField."""
    if format_name in VIDEO_QUALITY:
        least = MAX_QUALITY - RATE_FACTORS[format_name]
        if quality is not None and quality < least:
            expected = f"{least} to {MAX_QUALITY} for {format_name}: 100 less the constant rate factor of its encoder"
            raise unusable_field("quality", quality, expected)
        return quality
    if quality is not None and format_name not in DEFAULT_QUALITY:
        raise unusable_field("quality", quality, f"a format that has it ({', '.join(DEFAULT_QUALITY)})")
    return quality or DEFAULT_QUALITY.get(format_name)


def _fitting_seconds(seconds: float | None, model: str, audio: AudioFacts) -> float:
    if seconds is None:
        return audio.seconds
    if seconds > audio.longest:
        raise unusable_field("seconds", seconds, f"up to {audio.longest:g} for model {model!r}")
    return seconds


def _nearest(side: int, step: int) -> str:
    lower = side - side % step
    return f"{lower} or {lower + step}" if lower else str(step)
