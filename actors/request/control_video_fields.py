"""The fields of a request that name videos: a video that a model is to follow, and what of it is made anew. Checked
here, as `actors.request.image_fields` does images.

A video is the path of a file (of a video, or of an image, which is one frame), several paths or images in a list, or
an array of numpy. Paths stay such until they are submitted; all else becomes `Frames` at once. Of files the headers are
read. Torch-free, ray-free; imports PyAV, Pillow and numpy when a video is there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from modelpool.actors.request.image_fields import check_size, checked_image, open_image, plain_pixels
from modelpool.actors.request.video_output_fields import MOST_FRAMES
from modelpool.pool.core.errors import CorruptFile, UnusableField, UserError, unusable_field
from modelpool.pool.formats.regular_file import open_regular

if TYPE_CHECKING:
    from av.container import InputContainer

    from modelpool.pool.core.stage_params import PixelArray

#: endings of the names of videos; every other file is read as an image
VIDEO_ENDINGS = (".mp4", ".webm", ".gif", ".mov", ".mkv", ".avi", ".m4v")
#: what such files are read as, in FFmpeg's names: one file each, none of which names others
_DEMUXERS = {"format_whitelist": "mov,matroska,avi,gif", "protocol_whitelist": "file"}
#: most pixels of all frames together: what is read takes three times as many bytes
MOST_VIDEO_PIXELS = 1 << 29
_VIDEO = "the path of a video, paths or images in a list, or an array of numpy"


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames [T, H, W, 3], or of a mask [T, H, W], of the driver's own, in memory. Equal when their pixels are."""

    sha256: str
    frames: PixelArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GivenVideo:
    """A video or the mask of one on its way to the pool, at the size that it is used in.

    sha256  of its sizes and pixels
    file    the name of the file that it came from, for people; empty for one from memory
    """

    sha256: str
    width: int
    height: int
    frames: int
    file: str = ""


#: what a field that names a video holds once it is checked
VideoSource: TypeAlias = str | tuple[str, ...] | Frames | GivenVideo


def frames_digest(frames: PixelArray) -> str:
    """SHA-256 of the shape and the bytes of frames."""
    import numpy as np

    return hashlib.sha256(repr(frames.shape).encode() + np.ascontiguousarray(frames).tobytes()).hexdigest()


def checked_video(name: str, value: Any, is_mask: bool = False) -> VideoSource | None:
    """The video in the field `name`, or the mask of one. Raises UserError naming the field, and the file where it is
    one."""
    if value is None or isinstance(value, (Frames, GivenVideo)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return _checked_path(name, value)
    if isinstance(value, (list, tuple)):
        check_count(name, len(value))
        if all(isinstance(each, (str, os.PathLike)) for each in value):
            return tuple(_checked_path(name, each, is_image=True) for each in value)
        return _framed(_stacked(name, [_pixels_of(name, each, is_mask) for each in value]))
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise unusable_field(name, type(value).__name__, _VIDEO)
    return _framed(_of_array(name, value, is_mask))


def check_count(name: str, frames: int, pixels: int = 1) -> None:
    """Raise UnusableField for a video without frames, or with too many, of so many pixels each."""
    if not 0 < frames <= MOST_FRAMES or frames * pixels > MOST_VIDEO_PIXELS:
        expected = f"1 to {MOST_FRAMES} of them, and up to {MOST_VIDEO_PIXELS} pixels in all"
        raise unusable_field(name, f"{frames} frames" + (f" of {pixels} pixels" if pixels > 1 else ""), expected)


@contextmanager
def open_video(name: str, path: str) -> Iterator[InputContainer]:
    """The video at `path`, its header read and its size checked. Raises UserError naming the field `name`, for what is
    no regular file, what cannot be read as a video, and what goes wrong inside of the block while it is read."""
    import av

    if not os.path.exists(path):
        raise unusable_field(name, path, "a file that is there")
    try:
        with open_regular(path, "a video") as (file, _), av.open(file, "r", options=_DEMUXERS) as video:
            if not video.streams.video:
                raise UserError(f"{name}: {path} holds no images, expected a video")
            stream = video.streams.video[0]
            check_size(name, (stream.width, stream.height))
            yield video
    except CorruptFile as problem:
        raise UserError(f"{name}: {problem}") from None
    except av.FFmpegError as error:
        raise UserError(f"{name}: {path} cannot be read as a video ({error.strerror})") from None


def is_video(path: str) -> bool:
    """Whether a file of this name is read as a video, not as an image."""
    return path.lower().endswith(VIDEO_ENDINGS)


def read_frames(name: str, source: str | tuple[str, ...], is_mask: bool) -> Iterator[PixelArray]:
    """The frames in files, one after the other, each [H, W, 3] or of a mask [H, W]. Raises UserError."""
    if isinstance(source, str) and is_video(source):
        yield from _video_frames(name, source, is_mask)
        return
    for path in (source,) if isinstance(source, str) else source:
        with open_image(name, path) as image:
            yield plain_pixels(name, image, is_mask)


def _video_frames(name: str, path: str, is_mask: bool) -> Iterator[PixelArray]:
    import numpy as np
    from PIL import Image

    with open_video(name, path) as video:
        for frame in video.decode(video=0):
            check_size(name, (frame.width, frame.height))  # which may be other than the first one's
            pixels_HWC = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
            yield np.array(image.convert("L") if is_mask else image)


def _checked_path(name: str, value: str | os.PathLike[str], is_image: bool = False) -> str:
    path = os.fsdecode(value)
    try:
        with open_video(name, path) if is_video(path) and not is_image else open_image(name, path):
            return path
    except UserError as problem:
        if is_image or is_video(path) or isinstance(problem, UnusableField):
            raise
        raise UserError(f"{problem}, or a video, whose name ends in {', '.join(VIDEO_ENDINGS)}") from None


def _pixels_of(name: str, value: Any, is_mask: bool) -> PixelArray:
    """One frame of several, which are not all paths."""
    found = checked_image(name, value, is_mask)
    if isinstance(found, str):
        with open_image(name, found) as image:
            return plain_pixels(name, image, is_mask)
    pixels: PixelArray | None = getattr(found, "pixels", None)
    if pixels is None:
        raise unusable_field(name, "nothing among several" if value is None else type(value).__name__, _VIDEO)
    return pixels


def _stacked(name: str, frames: list[PixelArray]) -> PixelArray:
    import numpy as np

    sizes = {frame.shape[:2] for frame in frames}
    if len(sizes) > 1:
        found = " and ".join(f"{width}x{height}" for height, width in sorted(sizes))
        raise unusable_field(name, f"frames of {found} pixels", "one size")
    check_count(name, len(frames), frames[0].shape[0] * frames[0].shape[1])
    return np.stack(frames)


def _framed(frames: PixelArray) -> Frames:
    return Frames(frames_digest(frames), frames)


def _of_array(name: str, array: Any, is_mask: bool) -> PixelArray:
    import numpy as np

    if is_mask:
        expected = "an array [height, width] or [frames, height, width] of uint8 (255 is made anew) or bool"
        if array.ndim not in (2, 3) or array.dtype not in (np.uint8, np.bool_):
            raise unusable_field(name, f"an array {list(array.shape)} of {array.dtype}", expected)
        array = array.astype(np.uint8) * 255 if array.dtype == np.bool_ else array
        array = array[None] if array.ndim == 2 else array
    elif array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8:
        expected = "an array [frames, height, width, 3] of uint8"
        raise unusable_field(name, f"an array {list(array.shape)} of {array.dtype}", expected)
    check_size(name, (array.shape[2], array.shape[1]))
    check_count(name, array.shape[0], array.shape[1] * array.shape[2])
    copy: PixelArray = np.array(array, order="C")
    return copy
