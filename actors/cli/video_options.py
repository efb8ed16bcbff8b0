"""The options that say how long a film or a sound is, and what it is written as.

Knows words on a command line; what they mean stands in `actors.request.video_output_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Films and sounds"


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=_PANEL, show_default=False, metavar=metavar)


_FORMAT = "Write films as mp4, webm, gif (default: mp4), sounds as wav, flac (default: wav)."

_LAST = "A picture that a film ends with, for models that are told one beside --image."
_VIDEO = "A film to follow, with models that are told one (Wan VACE); sets size and frames."
_VIDEO_MASK = "A film or a picture that is white where --video is made anew, black where it is kept."
_MOTION = "How much moves, 0 to 255, with models that are told it (default: the model's own)."
_NOISE = "Noise, 0 to 1, on the --image of a model that is told it (default: the model's own)."
_ELEVATION = "Degrees above the middle, -90 to 90, that a film looks from which goes around a thing (default: 0)."

Frames = Annotated[int | None, _option("--frames", "Frames of a film (default: the model's own).", "N")]
Rate = Annotated[float | None, _option("--fps", "Frames a second (default: the model's own).", "X")]
Seconds = Annotated[float | None, _option("--seconds", "Seconds of sound (default: the most of the model).", "X")]
Format = Annotated[str | None, _option("--format", _FORMAT, "NAME")]
LastImage = Annotated[str | None, _option("--last-image", _LAST, "FILE")]
Video = Annotated[str | None, _option("--video", _VIDEO, "FILE")]
VideoMask = Annotated[str | None, _option("--video-mask", _VIDEO_MASK, "FILE")]
Motion = Annotated[int | None, _option("--motion", _MOTION, "N")]
ImageNoise = Annotated[float | None, _option("--image-noise", _NOISE, "X")]
Elevation = Annotated[float | None, _option("--elevation", _ELEVATION, "X")]


def film_fields(
    frames: int | None, frame_rate: float | None, seconds: float | None, format_name: str | None
) -> dict[str, Any]:
    """The fields of a request that were given."""
    said = {"frames": frames, "frame_rate": frame_rate, "seconds": seconds, "format": format_name}
    return {name: value for name, value in said.items() if value is not None}


def told_fields(
    last_image: str | None,
    motion: int | None,
    image_noise: float | None,
    elevation: float | None,
    video: str | None,
    video_mask: str | None,
) -> dict[str, Any]:
    """The fields of a request that were given, of what only some models are told of a film."""
    said = {
        "last_image": last_image,
        "motion": motion,
        "image_noise": image_noise,
        "elevation": elevation,
        "video": video,
        "video_mask": video_mask,
    }
    return {name: value for name, value in said.items() if value is not None}
