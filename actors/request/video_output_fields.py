"""The fields of a request that say how long a video or an audio clip is, and what it is written as. Checked here, as
`actors.request.requests` is; whether a model can make it, the catalog says.

Torch-free, ray-free.
"""

from __future__ import annotations

import math
import re
from typing import Any

from modelpool.actors.request.number_fields import finite_number
from modelpool.pool.core.errors import unusable_field

#: what videos and audio clips can be written as, the usual one first
VIDEO_FORMATS, AUDIO_FORMATS = ("mp4", "webm", "gif"), ("wav", "flac")
FORMATS = ("png", *VIDEO_FORMATS, *AUDIO_FORMATS)
#: far beyond what a model makes at once; what is asked for has a size
MOST_FRAMES, MOST_FRAME_RATE, MOST_SECONDS = 1 << 14, 240.0, 3600.0
#: numbers that videos are told by, from and to: how much moves, as Stable Video Diffusion's training counted it; the
#: deviation of noise on pixels from -1 to 1; degrees above the middle
VIDEO_NUMBERS = {"motion": (0.0, 255.0), "image_noise": (0.0, 1.0), "elevation": (-90.0, 90.0)}


def checked_frames(value: Any) -> int | None:
    """How many frames. Raises UnusableField."""
    is_written = isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if value is None:
        return None
    if isinstance(value, bool) or not (is_whole or is_written) or not 1 <= int(value) <= MOST_FRAMES:
        raise unusable_field("frames", value, f"a whole number from 1 to {MOST_FRAMES}")
    return int(value)


def checked_frame_rate(value: float | None) -> float | None:
    """Frames a second. Raises UnusableField."""
    return _positive("frame_rate", value, MOST_FRAME_RATE)


def checked_seconds(value: float | None) -> float | None:
    """Seconds of audio. Raises UnusableField."""
    return _positive("seconds", value, MOST_SECONDS)


def checked_video_number(name: str, value: Any) -> float | None:
    """A number that videos are told by, one of `VIDEO_NUMBERS`; motion is a whole one. Raises UnusableField."""
    if value is None:
        return None
    (least, most), number = VIDEO_NUMBERS[name], finite_number(value)
    kind = "a whole number" if name == "motion" else "a number"
    if number is None or not least <= number <= most or (name == "motion" and not number.is_integer()):
        raise unusable_field(name, value, f"{kind} from {least:g} to {most:g}")
    return int(number) if name == "motion" else number


def checked_format(value: Any) -> str | None:
    """A format of files by its ending, with a dot or without, in any case. Raises UnusableField."""
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
