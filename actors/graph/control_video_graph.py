"""Builds the control video of a run: checks, sizes, and the inputs that the model reads.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.graph.orders import SampleOrder
from modelpool.actors.request.control_video_fields import InputVideo
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.core.task_inputs import REFERENCE, VIDEO, VIDEO_MASK, enumerated
from modelpool.pool.families.control_video import takes_control_video
from modelpool.pool.specs.spec import TaskId


def check_video(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a control video if models of `facts` do not accept one."""
    if request.video is not None and not takes_control_video(facts):
        raise unsupported_field("video", request.model, "accepts no control video")


def with_video_size(request: GenerateRequest, facts: SamplingFacts) -> GenerateRequest:
    """Return `request` with missing sizes and frames taken from its control video, in multiples of the model's steps;
    of a longer video, the first frames are used."""
    video = request.video
    if video is None or facts.video is None:
        return request
    assert isinstance(video, InputVideo), f"the client brings videos to the pool, found {video!r}"
    step, multiple = facts.side_multiple or SIZE_STEP, facts.video.multiple
    sizes: dict[str, Any] = {
        "width": max(step, video.width // step * step),
        "height": max(step, video.height // step * step),
        "frames": 1 + (video.frames - 1) // multiple * multiple,
    }
    return request.model_copy(update={name: n for name, n in sizes.items() if getattr(request, name) is None})


def video_read(order: SampleOrder) -> dict[str, TaskId]:
    """Return the inputs of the encoding of a control video in a run of `order`: the video, its mask, and the reference
    images, each if it is set."""
    inputs = {VIDEO: order.video, VIDEO_MASK: order.video_mask}
    images = (each.image for each in order.references)
    inputs |= zip(enumerated(REFERENCE, order.references), images, strict=True)
    return {name: each.task_id for name, each in inputs.items() if each is not None}


def leading_cells(order: SampleOrder, facts: SamplingFacts) -> int:
    """Return how many latent frames precede those of the video in a run of `order`: of the reference images of a
    control video, or of the image that leads the video."""
    if takes_control_video(facts):
        return len(order.references)
    return 0 if facts.video is None else facts.video.leading
