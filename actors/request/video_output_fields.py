"""The fields of a request for the length and the file format of a video or an audio clip; parsed and validated.

Whether a model supports them is checked with the catalog. Torch-free, ray-free.
"""

from __future__ import annotations

import math
import re
from typing import Any

from modelpool.actors.request.number_fields import finite_number
from modelpool.pool.core.errors import unusable_field

#: file formats of videos and audio clips, the default first
VIDEO_FORMATS, AUDIO_FORMATS = ("mp4", "webm", "gif"), ("wav", "flac")
FORMATS = ("png", *VIDEO_FORMATS, *AUDIO_FORMATS)
#: bounds of a request; far above what models generate in one run
MAX_FRAMES, MAX_FRAME_RATE, MAX_SECONDS = 1 << 14, 240.0, 3600.0
#: ranges of the conditioning numbers of videos: amount of motion, as in the training of Stable Video Diffusion;
#: standard deviation of the noise on pixels from -1 to 1; camera elevation in degrees
VIDEO_NUMBERS = {"motion": (0.0, 255.0), "image_noise": (0.0, 1.0), "elevation": (-90.0, 90.0)}


def checked_frames(value: Any) -> int | None:
    """Validate a number of frames. Raises UnusableField."""
    is_written = isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if value is None:
        return None
    if isinstance(value, bool) or not (is_whole or is_written) or not 1 <= int(value) <= MAX_FRAMES:
        raise unusable_field("frames", value, f"a whole number from 1 to {MAX_FRAMES}")
    return int(value)


def checked_frame_rate(value: float | None) -> float | None:
    """Validate frames per second. Raises UnusableField."""
    return _positive("frame_rate", value, MAX_FRAME_RATE)


def checked_seconds(value: float | None) -> float | None:
    """Validate seconds of audio. Raises UnusableField."""
    return _positive("seconds", value, MAX_SECONDS)


def checked_video_number(name: str, value: Any) -> float | None:
    """Validate a conditioning number of videos, one of `VIDEO_NUMBERS`; motion is whole. Raises UnusableField."""
    if value is None:
        return None
    (least, most), number = VIDEO_NUMBERS[name], finite_number(value)
    kind = "a whole number" if name == "motion" else "a number"
    if number is None or not least <= number <= most or (name == "motion" and not number.is_integer()):
        raise unusable_field(name, value, f"{kind} from {least:g} to {most:g}")
    return int(number) if name == "motion" else number


def checked_format(value: Any) -> str | None:
    """Validate a file format by its extension, with or without a dot, in any case. Raises UnusableField."""
    if value is None:
        return None
    found = value.strip().lower().removeprefix(".") if isinstance(value, str) else ""
    if found not in FORMATS:
        raise unusable_field("format", value, f"one of {', '.join(FORMATS)}")
    return found


def _positive(name: str, value: float | None, most: float) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise unusable_field(name, value, f"a number above 0 up to {most:g}")
    return value
