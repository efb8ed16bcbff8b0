"""The file formats of images, videos and audio clips. Torch-free, ray-free."""

from __future__ import annotations

from typing import Any

from modelpool.pool.core.errors import unusable_field

#: file formats of videos and audio clips, the default first
VIDEO_FORMATS, AUDIO_FORMATS = ("mp4", "webm", "gif"), ("wav", "flac")
FORMATS = ("png", *VIDEO_FORMATS, *AUDIO_FORMATS)


def checked_format(value: Any) -> str | None:
    """Validate a file format by its extension, with or without a dot, in any case. Raises UnusableField."""
    if value is None:
        return None
    found = value.strip().lower().removeprefix(".") if isinstance(value, str) else ""
    if found not in FORMATS:
        raise unusable_field("format", value, f"one of {', '.join(FORMATS)}")
    return found
