"""The file formats of images, videos and audio clips, and their quality. Torch-free, ray-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.values.core.errors import unusable_field

#: file formats of images, videos and audio clips, the default first
IMAGE_FORMATS = ("png", "webp", "jpg", "avif")
VIDEO_FORMATS, AUDIO_FORMATS = ("mp4", "webm", "gif", "webp"), ("wav", "flac", "mp3", "opus")
#: of the layers of an image
LAYER_FORMATS = ("png",)
#: of both images and videos: files of several frames are videos
SHARED_FORMATS = frozenset(("webp",))
FORMATS = tuple(dict.fromkeys((*IMAGE_FORMATS, *VIDEO_FORMATS, *AUDIO_FORMATS)))
#: default quality of formats that have one, in the scale of Pillow: no visible loss at normal size
DEFAULT_QUALITY: Mapping[str, int] = MappingProxyType({"webp": 90, "jpg": 95, "avif": 85})
#: quality of video files by default: 100 less the constant rate factor of their encoder; and the largest factor
VIDEO_QUALITY: Mapping[str, int] = MappingProxyType({"mp4": 83, "webm": 76})
RATE_FACTORS: Mapping[str, int] = MappingProxyType({"mp4": 51, "webm": 63})
MAX_QUALITY = 100
_OTHER_NAMES = {"jpeg": "jpg"}


def checked_format(value: Any) -> str | None:
    """Validate a file format by its extension, with or without a dot, in any case. Raises UnusableField."""
    if value is None:
        return None
    found = value.strip().lower().removeprefix(".") if isinstance(value, str) else ""
    found = _OTHER_NAMES.get(found, found)
    if found not in FORMATS:
        raise unusable_field("format", value, f"one of {', '.join(FORMATS)}")
    return found
