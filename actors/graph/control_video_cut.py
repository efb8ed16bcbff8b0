"""What can be asked of models that follow a video, and what of the others; and what a run reads of one.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.graph.orders import SampleOrder
from modelpool.actors.request.control_video_fields import GivenVideo
from modelpool.actors.request.requests import SIZE_STEP, GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.families.control_video_form import follows_video
from modelpool.pool.specs.spec import TaskId


def check_video(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a video that no model of `facts` follows."""
    if request.video is not None and not follows_video(facts):
        raise unusable_field("video", "one", f"none: model {request.model!r} is told of no video to follow")


def fitting_video(request: GenerateRequest, facts: SamplingFacts) -> GenerateRequest:
    """`request`, whose video is given, with the sizes and the frames of that where it leaves them out, in whole steps
    of the model: of more frames the first are followed."""
    video = request.video
    if video is None or facts.video is None:
        return request
    assert isinstance(video, GivenVideo), f"the client brings videos to the pool, found {video!r}"
    step, multiple = facts.side_multiple or SIZE_STEP, facts.video.multiple
    own: dict[str, Any] = {
        "width": max(step, video.width // step * step),
        "height": max(step, video.height // step * step),
        "frames": 1 + (video.frames - 1) // multiple * multiple,
    }
    return request.model_copy(update={name: n for name, n in own.items() if getattr(request, name) is None})


def video_read(order: SampleOrder) -> tuple[TaskId, ...]:
    """What of the driver's own a model is told in a run of `order` that follows a video: the video, its mask, and the
    images that it works from, each where there is one."""
    given = (order.video, order.video_mask, *(each.image for each in order.references))
    return tuple(each.task_id for each in given if each is not None)


def leading_cells(order: SampleOrder, facts: SamplingFacts) -> int:
    """Cells of time before those of the video, in a run of `order`: of the images that a video is followed with, or
    of the image that leads the video."""
    if follows_video(facts):
        return len(order.references)
    return 0 if facts.video is None else facts.video.leading
