"""The options that say how long a video or an audio clip is, and what it is written as.

Knows words on a command line; what they mean stands in `actors.request.video_output_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Videos and audio clips"


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=_PANEL, show_default=False, metavar=metavar)


_FORMAT = "Write videos as mp4, webm, gif (default: mp4), audio clips as wav, flac (default: wav)."

_LAST = "An image that a video ends with, for models that are told one beside --image."
_VIDEO = "A video to follow, with models that are told one (Wan VACE); sets size and frames."
_VIDEO_MASK = "A video or an image that is white where --video is made anew, black where it is kept."
_MOTION = "How much moves, 0 to 255, with models that are told it (default: the model's own)."
_NOISE = "Noise, 0 to 1, on the --image of a model that is told it (default: the model's own)."
_ELEVATION = "Degrees above the middle, -90 to 90, that a video looks from which goes around a thing (default: 0)."

Frames = Annotated[int | None, _option("--frames", "Frames of a video (default: the model's own).", "N")]
Rate = Annotated[float | None, _option("--fps", "Frames a second (default: the model's own).", "X")]
Seconds = Annotated[float | None, _option("--seconds", "Seconds of audio (default: the most of the model).", "X")]
Format = Annotated[str | None, _option("--format", _FORMAT, "NAME")]
LastImage = Annotated[str | None, _option("--last-image", _LAST, "FILE")]
Video = Annotated[str | None, _option("--video", _VIDEO, "FILE")]
VideoMask = Annotated[str | None, _option("--video-mask", _VIDEO_MASK, "FILE")]
Motion = Annotated[int | None, _option("--motion", _MOTION, "N")]
ImageNoise = Annotated[float | None, _option("--image-noise", _NOISE, "X")]
Elevation = Annotated[float | None, _option("--elevation", _ELEVATION, "X")]


def video_fields(
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
    """The fields of a request that were given, of what only some models are told of a video."""
    said = {
        "last_image": last_image,
        "motion": motion,
        "image_noise": image_noise,
        "elevation": elevation,
        "video": video,
        "video_mask": video_mask,
    }
    return {name: value for name, value in said.items() if value is not None}
