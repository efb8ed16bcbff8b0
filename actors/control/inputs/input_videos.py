"""Reads and stores the videos of requests, by the rules of `actors.control.inputs.input_images`.

At most the requested number of frames is read. A mask has the size of its video, and as many frames or one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from modelpool.actors.control.inputs.input_sizes import times_of, wanted_size
from modelpool.actors.graph.common.input_ids import input_frames_id, input_video_id
from modelpool.actors.request.control_video_fields import (
    Frames,
    InputVideo,
    TaskVideo,
    VideoSource,
    check_count,
    frames_digest,
    read_frames,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.pool.inference.operations.pixel_levels import STILL_RATE
from modelpool.pool.inference.pixels.image_ops import covering
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import PixelArray, Result, VideoFrames, VideoMask
from modelpool.pool.values.specs.spec import TaskId

#: number of stored videos that are remembered for later requests; an entry is only a reference
REMEMBERED = 64

Brought: TypeAlias = tuple[str, InputVideo, ResultRef]
#: the field of a mask: its pixels are another kind of result
_MASK = "video_mask"


@dataclass(frozen=True, slots=True)
class _Read:
    """Frames at the size at which they are used, and their original width and height."""

    frames: PixelArray
    own: tuple[int, int]


class InputVideos:
    """The input videos of one submission."""

    def __init__(self, put: Callable[[Result], ResultRef]) -> None:
        """`put` stores a video where workers find it."""
        self._put = put
        self._brought: LruCache[Hashable, tuple[Brought, ...]] = LruCache(REMEMBERED)

    def bring(self, request: GenerateRequest, refs: dict[TaskId, ResultRef]) -> dict[str, Any]:
        """Return the changed fields of `request`, with its videos stored; references are added to `refs`. Raises
        UserError naming the field for videos that cannot be read or do not fit together."""
        if request.video is None or isinstance(request.video, InputVideo | TaskVideo):
            return {}
        sources = [_identity(source) for source in (request.video, request.video_mask, request.face_video)]
        key = (*sources, request.width, request.height, request.frames)
        changed: dict[str, Any] = {}
        for name, video, ref in self._brought.get(key, lambda: tuple(self._videos_of(request))):
            refs[input_video_id(video, is_mask=name == _MASK)] = ref
            changed[name] = video
        return changed

    def bring_frames(self, name: str, source: VideoSource, refs: dict[TaskId, ResultRef]) -> InputVideo:
        """Return the video of a node of a workflow, stored at its own size with all its frames; its reference is added
        to `refs`. Raises UserError naming the node."""
        if isinstance(source, InputVideo):
            return source

        def bring() -> tuple[Brought, ...]:
            frames = _read(name, source, False, (None, None), None).frames
            return (self._brought_as(name, frames, source, VideoFrames(frames, STILL_RATE)),)

        ((_, video, ref),) = self._brought.get(("frames", _identity(source)), bring)
        refs[input_frames_id(video)] = ref
        return video

    def _videos_of(self, request: GenerateRequest) -> Iterable[Brought]:
        size = request.width, request.height
        video = _read("video", request.video, False, size, request.frames)
        height, width = video.frames.shape[1:3]
        # the frame rate is ignored: the control video is followed frame by frame
        yield self._brought_as("video", video.frames, request.video, VideoFrames(video.frames, 0.0))
        if request.face_video is not None:
            face = _read("face_video", request.face_video, False, (None, None), request.frames)
            if len(face.frames) != len(video.frames):
                found = counted(len(face.frames), "frame")
                raise unusable_field("face_video", found, f"{len(video.frames)} like the video")
            yield self._brought_as("face_video", face.frames, request.face_video, VideoFrames(face.frames, 0.0))
        if request.video_mask is None:
            return
        mask = _read("video_mask", request.video_mask, True, (width, height), request.frames)
        if mask.own != video.own:
            expected = f"{times_of(video.own)} pixels, the size of the video"
            raise unusable_field("video_mask", times_of(mask.own), expected)
        if len(mask.frames) not in (1, len(video.frames)):
            expected = f"1 frame, or {len(video.frames)} like the video"
            raise unusable_field("video_mask", counted(len(mask.frames), "frame"), expected)
        yield self._brought_as(_MASK, mask.frames, request.video_mask, VideoMask(mask.frames))

    def _brought_as(self, name: str, frames: PixelArray, source: VideoSource, result: Result) -> Brought:
        count, height, width = frames.shape[:3]
        file = os.path.basename(source) if isinstance(source, str) else ""
        return name, InputVideo(frames_digest(frames), width, height, count, file), self._put(result)


def _read(
    name: str, source: VideoSource, is_mask: bool, size: tuple[int | None, int | None], most: int | None
) -> _Read:
    """Read at most `most` frames of `source`, scaled to cover the requested `size`."""
    assert not isinstance(source, InputVideo | TaskVideo), f"{name}: the video is stored, and its mask is not"
    own: tuple[int, int] | None = None
    found: list[PixelArray] = []
    for frame in islice(_frames(name, source, is_mask), most):
        own = own or (frame.shape[1], frame.shape[0])
        width, height = wanted_size(*size, own)
        check_count(name, len(found) + 1, width * height)
        found.append(covering(frame, width, height))
    if own is None:
        raise unusable_field(name, "no frames", "at least one")
    return _Read(np.stack(found), own)


def _frames(name: str, source: str | tuple[str, ...] | Frames, is_mask: bool) -> Iterator[PixelArray]:
    return iter(source.frames) if isinstance(source, Frames) else read_frames(name, source, is_mask)


def _identity(source: VideoSource | None) -> Hashable:
    """Return a key that is equal for equal pixels, as far as known without reading them."""
    assert not isinstance(source, TaskVideo), "videos of tasks are in the pool"
    if source is None or isinstance(source, (Frames, InputVideo)):
        return None if source is None else source.sha256
    try:
        return tuple(
            (path, found.st_mtime_ns, found.st_size)
            for path in ((source,) if isinstance(source, str) else source)
            for found in (os.stat(path),)
        )
    except OSError:
        return source  # reading the file raises the error
