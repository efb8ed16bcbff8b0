"""Options for videos and audio: length, format, and the inputs that only some models accept.

Knows words on a command line; `actors.request.video_output_fields` parses them.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Videos and audio"


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=_PANEL, show_default=False, metavar=metavar)


_FORMAT = "Format of videos: mp4, webm, gif (default: mp4); of audio: wav, flac (default: wav)."

_LAST = "Last frame of the video, for models that accept one in addition to --image."
_VIDEO = "Control video, for models that accept one (Wan VACE); sets size and frames."
_VIDEO_MASK = "Mask video or image for --video; white areas are regenerated, black areas are kept."
_MOTION = "Amount of motion, 0 to 255, for models that accept it (default: depends on the model)."
_NOISE = "Noise added to --image, 0 to 1, for models that accept it (default: depends on the model)."
_ELEVATION = "Camera elevation in degrees, -90 to 90, for orbit videos (default: 0)."

Frames = Annotated[int | None, _option("--frames", "Number of video frames (default: depends on the model).", "N")]
Rate = Annotated[float | None, _option("--fps", "Frames per second (default: depends on the model).", "X")]
Seconds = Annotated[
    float | None, _option("--seconds", "Length of audio in seconds (default: the model's maximum).", "X")
]
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
    """Return the fields of a request that were set."""
    fields = {"frames": frames, "frame_rate": frame_rate, "seconds": seconds, "format": format_name}
    return {name: value for name, value in fields.items() if value is not None}


def conditioning_fields(
    last_image: str | None,
    motion: int | None,
    image_noise: float | None,
    elevation: float | None,
    video: str | None,
    video_mask: str | None,
) -> dict[str, Any]:
    """Return the conditioning fields of a request that were set, for models that accept them."""
    fields = {
        "last_image": last_image,
        "motion": motion,
        "image_noise": image_noise,
        "elevation": elevation,
        "video": video,
        "video_mask": video_mask,
    }
    return {name: value for name, value in fields.items() if value is not None}
