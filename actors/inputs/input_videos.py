"""Brings the videos that requests name to the pool, as `actors.inputs.input_images` brings images, and by its rules.

Of a video whose request says how many frames are made, no more are read. A mask has the size of its video, and as many
frames or one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from modelpool.actors.graph.orders import given_video_id
from modelpool.actors.inputs.input_sizes import times_of, wanted_size
from modelpool.actors.request.control_video_fields import (
    Frames,
    GivenVideo,
    VideoSource,
    check_count,
    frames_digest,
    read_frames,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.wire.messages import ResultRef
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.stage_params import PixelArray, Result, VideoFrames, VideoMask
from modelpool.pool.pixels.image_ops import covering
from modelpool.pool.specs.spec import TaskId

#: videos that are remembered for requests that use them again; what is remembered is a reference
REMEMBERED = 64

Brought: TypeAlias = tuple[GivenVideo, ResultRef]


@dataclass(frozen=True, slots=True)
class _Read:
    """Frames at the size that they are used in, and the width and height that they had."""

    frames: PixelArray
    own: tuple[int, int]


class GivenVideos:
    """The videos of one submission."""

    def __init__(self, give: Callable[[Result], ResultRef]) -> None:
        """`give` puts a video where workers find it."""
        self._give = give
        self._brought: Recent[Hashable, tuple[Brought, ...]] = Recent(REMEMBERED)

    def bring(self, request: GenerateRequest, refs: dict[TaskId, ResultRef]) -> dict[str, Any]:
        """The fields of `request` that name videos, given; their references go to `refs`. Raises UserError naming the
        field for what cannot be read, or does not go together."""
        if request.video is None or isinstance(request.video, GivenVideo):
            return {}
        sources = _identity(request.video), _identity(request.video_mask)
        key = (*sources, request.width, request.height, request.frames)
        (video, ref), *masks = self._brought.get(key, lambda: tuple(self._videos_of(request)))
        refs[given_video_id(video)] = ref
        changed: dict[str, Any] = {"video": video}
        for mask, mask_ref in masks:
            refs[given_video_id(mask, is_mask=True)] = mask_ref
            changed["video_mask"] = mask
        return changed

    def _videos_of(self, request: GenerateRequest) -> Iterable[Brought]:
        said = request.width, request.height
        video = _read("video", request.video, False, said, request.frames)
        height, width = video.frames.shape[1:3]
        # the rate is not read: frames are followed one by one
        yield self._brought_as(video.frames, request.video, VideoFrames(video.frames, 0.0))
        if request.video_mask is None:
            return
        mask = _read("video_mask", request.video_mask, True, (width, height), request.frames)
        if mask.own != video.own:
            expected = f"{times_of(video.own)} pixels, the size of the video"
            raise unusable_field("video_mask", times_of(mask.own), expected)
        if len(mask.frames) not in (1, len(video.frames)):
            expected = f"1 or {len(video.frames)}, as many as the video has"
            raise unusable_field("video_mask", f"{len(mask.frames)} frames", expected)
        yield self._brought_as(mask.frames, request.video_mask, VideoMask(mask.frames))

    def _brought_as(self, frames: PixelArray, source: VideoSource, result: Result) -> Brought:
        count, height, width = frames.shape[:3]
        file = os.path.basename(source) if isinstance(source, str) else ""
        return GivenVideo(frames_digest(frames), width, height, count, file), self._give(result)


def _read(
    name: str, source: VideoSource, is_mask: bool, said: tuple[int | None, int | None], most: int | None
) -> _Read:
    """At most so many frames of `source`, scaled to cover the size that is `said`."""
    assert not isinstance(source, GivenVideo), f"{name}: a video is given, and its mask is not"
    own: tuple[int, int] | None = None
    found: list[PixelArray] = []
    for frame in islice(_frames(name, source, is_mask), most):
        own = own or (frame.shape[1], frame.shape[0])
        width, height = wanted_size(*said, own)
        check_count(name, len(found) + 1, width * height)
        found.append(covering(frame, width, height))
    if own is None:
        raise unusable_field(name, "no frames", "at least one")
    return _Read(np.stack(found), own)


def _frames(name: str, source: str | tuple[str, ...] | Frames, is_mask: bool) -> Iterator[PixelArray]:
    return iter(source.frames) if isinstance(source, Frames) else read_frames(name, source, is_mask)


def _identity(source: VideoSource | None) -> Hashable:
    """What is the same for the same pixels, as far as can be told without reading them."""
    if source is None or isinstance(source, (Frames, GivenVideo)):
        return None if source is None else source.sha256
    try:
        return tuple(
            (path, found.st_mtime_ns, found.st_size)
            for path in ((source,) if isinstance(source, str) else source)
            for found in (os.stat(path),)
        )
    except OSError:
        return source  # reading it will say what is wrong
