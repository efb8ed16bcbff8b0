"""The fields of a request that name videos: control video and its mask; parsed and validated.

A video is the path of a video file, the path of an image (one frame), a list of paths or images, or a numpy array.
Paths stay paths until submission; everything else becomes `Frames` at once. Only headers of files are read here.
Torch-free, ray-free; imports PyAV, Pillow and numpy when a video is set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from modelpool.actors.request.bounds import check_complete
from modelpool.actors.request.field_table import MAX_FRAMES
from modelpool.actors.request.image_decoding import UprightImage, check_size, open_image, plain_pixels
from modelpool.actors.request.image_fields import TaskOutput, checked_image
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import CorruptFile, UnusableField, UserError, counted, unusable_field

if TYPE_CHECKING:
    from av.container import InputContainer

    from modelpool.pool.values.core.stage_params import PixelArray

#: file extensions of videos; every other file is read as an image
VIDEO_ENDINGS = (".mp4", ".webm", ".gif", ".mov", ".mkv", ".avi", ".m4v")
#: FFmpeg demuxers and protocols that may be used: single files only, none that refers to other files
_DEMUXERS = {"format_whitelist": "mov,matroska,avi,gif", "protocol_whitelist": "file"}
#: most pixels of all frames together; reading them takes three bytes each
MAX_VIDEO_PIXELS = 1 << 29
_VIDEO = "the path of a video, a list of paths or images, or a numpy array"


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames [T, H, W, 3], or masks [T, H, W], in the driver's memory. Equal when their pixels are equal."""

    sha256: str
    frames: PixelArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InputVideo:
    """A video, or its mask, on its way to the pool, at the size at which it is used.

    sha256  of shape and pixels
    file    name of the source file, for display; empty for a video from memory
    """

    sha256: str
    width: int
    height: int
    frames: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class TaskVideo(TaskOutput):
    """A video, or its mask."""

    frames: int


#: value of a video field after validation
VideoSource: TypeAlias = str | tuple[str, ...] | Frames | InputVideo | TaskVideo


def frames_digest(frames: PixelArray) -> str:
    """Return the SHA-256 of the shape and the bytes of frames."""
    import numpy as np

    return hashlib.sha256(repr(frames.shape).encode() + np.ascontiguousarray(frames).tobytes()).hexdigest()


def checked_video(name: str, value: Any, is_mask: bool = False) -> VideoSource | None:
    """Validate the video, or mask, in the field `name`. Raises UserError naming the field, and the file for a path."""
    if value is None or isinstance(value, (Frames, InputVideo, TaskVideo)):
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
    """Raise UnusableField for a video with no frames, or with too many frames or pixels (`pixels` for each frame)."""
    if not 0 < frames <= MAX_FRAMES or frames * pixels > MAX_VIDEO_PIXELS:
        expected = f"1 to {MAX_FRAMES} frames, and up to {MAX_VIDEO_PIXELS} pixels in all frames together"
        raise unusable_field(name, counted(frames, "frame") + (f" of {pixels} pixels" if pixels > 1 else ""), expected)


@dataclass(frozen=True, slots=True)
class VideoFile:
    """What a video file says about itself: the size of its frames as they are shown, their number, and their rate."""

    path: str
    width: int
    height: int
    frames: int
    frame_rate: float
    has_sound: bool


def video_facts(name: str, path: str) -> VideoFile:
    """Return the facts of the video at `path`; frames are counted. Raises UserError naming the field `name`."""
    with open_video(name, path) as video:
        stream, first = video.streams.video[0], next(video.decode(video=0), None)
        if first is None:
            raise unusable_field(name, "no frames", "at least one")
        sides = (first.width, first.height) if first.rotation % 180 == 0 else (first.height, first.width)
        rate, has_sound = float(stream.average_rate or stream.guessed_rate or 1), bool(video.streams.audio)
    with open_video(name, path) as video:
        frames = sum(1 for _ in islice((1 for packet in video.demux(video=0) if packet.size), MAX_FRAMES + 1))
    check_count(name, frames, sides[0] * sides[1])
    return VideoFile(path, *sides, frames, rate, has_sound)


@contextmanager
def open_video(name: str, path: str) -> Iterator[InputContainer]:
    """Open the video at `path`, read its header and check its size. Raises UserError naming the field `name` if the
    path is not a regular file, cannot be read as a video, or if decoding fails inside the block."""
    import av

    if not os.path.exists(path):
        raise unusable_field(name, path, "an existing file")
    try:
        with open_regular(path, "a video") as (file, _), _opened(name, path, file) as video:
            yield video
    except CorruptFile as problem:
        raise UserError(f"{name}: {problem}") from None
    except av.FFmpegError as error:
        raise UserError(f"{name}: {path} cannot be read as a video ({error.strerror})") from None


@contextmanager
def _opened(name: str, shown: str, file: BinaryIO) -> Iterator[InputContainer]:
    """Open a file as a video and check the size of its frames. `shown` is its name, for messages."""
    import av

    with av.open(file, "r", options=_DEMUXERS) as video:
        if not video.streams.video:
            raise UserError(f"{name}: {shown} contains no video stream, expected a video")
        stream = video.streams.video[0]
        check_size(name, (stream.width, stream.height))
        yield video


def check_video_content(name: str, shown: str, content: bytes) -> None:
    """Raise UserError naming the field `name` unless the content of a file is a video with a frame; `shown` is the name
    of the file."""
    import av

    try:
        with _opened(name, shown, BytesIO(content)) as video:
            if next(video.decode(video=0), None) is None:
                raise unusable_field(name, "no frames", "at least one")
    except av.FFmpegError as error:
        raise UserError(f"{name}: {shown} cannot be read as a video ({error.strerror})") from None


def is_moving(name: str) -> bool:
    """Whether a file of this name is a video, and no image that may have several frames."""
    return is_video(name) and not name.lower().endswith(".gif")


def is_video(path: str) -> bool:
    """Whether a file of this name is read as a video rather than as an image."""
    return path.lower().endswith(VIDEO_ENDINGS)


def read_frames(name: str, source: str | tuple[str, ...], is_mask: bool) -> Iterator[PixelArray]:
    """Yield the frames of files in order, each [H, W, 3], or [H, W] for a mask. Raises UserError."""
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
            check_size(name, (frame.width, frame.height))  # frames may differ in size from the first one
            has_alpha = any(component.is_alpha for component in frame.format.components)
            stored_HWC = frame.to_ndarray(format="rgba" if has_alpha else "rgb24")
            pixels_HWC = np.ascontiguousarray(np.rot90(stored_HWC, frame.rotation // 90))
            alpha = Image.fromarray(pixels_HWC[..., 3].copy()) if has_alpha else None
            image = UprightImage(Image.fromarray(pixels_HWC[..., :3].copy()), alpha)
            yield np.array(image.as_mask() if is_mask else image.on_white())


def _checked_path(name: str, value: str | os.PathLike[str], is_image: bool = False) -> str:
    path = os.fsdecode(value)
    check_complete(name, path)
    try:
        with open_video(name, path) if is_video(path) and not is_image else open_image(name, path):
            return path
    except UserError as problem:
        if is_image or is_video(path) or isinstance(problem, UnusableField):
            raise
        raise UserError(f"{problem}, or a video file ({', '.join(VIDEO_ENDINGS)})") from None


def _pixels_of(name: str, value: Any, is_mask: bool) -> PixelArray:
    """Return the pixels of one frame of a list that mixes paths and images."""
    found = checked_image(name, value, is_mask)
    if isinstance(found, str):
        with open_image(name, found) as image:
            return plain_pixels(name, image, is_mask)
    pixels: PixelArray | None = getattr(found, "pixels", None)
    if pixels is None:
        raise unusable_field(name, "None in a list" if value is None else type(value).__name__, _VIDEO)
    return pixels


def _stacked(name: str, frames: list[PixelArray]) -> PixelArray:
    import numpy as np

    sizes = {frame.shape[:2] for frame in frames}
    if len(sizes) > 1:
        found = " and ".join(f"{width}x{height}" for height, width in sorted(sizes))
        raise unusable_field(name, f"frames of {found} pixels", "frames of one size")
    check_count(name, len(frames), frames[0].shape[0] * frames[0].shape[1])
    return np.stack(frames)


def _framed(frames: PixelArray) -> Frames:
    return Frames(frames_digest(frames), frames)


def _of_array(name: str, array: Any, is_mask: bool) -> PixelArray:
    import numpy as np

    if is_mask:
        expected = "an array [height, width] or [frames, height, width] of uint8 (255 is regenerated) or bool"
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
