"""Builds the control video of a run: checks, sizes, and the inputs that the model reads.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.input_ids import input_image_id, input_video_id
from modelpool.actors.graph.common.sampling_runs import StageTask
from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    Line,
    RecipeSource,
    Section,
    find_input,
    image_line,
)
from modelpool.actors.request.control_video_fields import InputVideo, TaskVideo
from modelpool.actors.request.field_errors import missing_field, unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import follows_video, takes_control_video, takes_face_video
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ControlVideo, EncodeImageParams, ModelRef, OutputShape
from modelpool.pool.values.core.task_inputs import REFERENCE, VIDEO, VIDEO_MASK, numbered
from modelpool.pool.values.specs.spec import TaskId

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages


def check_video(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a control video if models of `facts` do not accept one."""
    if request.video is not None and not takes_control_video(facts):
        raise unsupported_field("video", request.model, "accepts no control video")
    if not takes_face_video(facts) and request.face_video is not None:
        raise unsupported_field("face_video", request.model, "animates no character")
    if follows_video(facts):
        if request.video_mask is not None:
            raise unsupported_field("video_mask", request.model, "follows a video as a whole")
        if request.video is None:
            raise missing_field("video", f"model {request.model!r} follows a video")
    if not takes_face_video(facts):
        return
    if request.video_mask is not None:
        raise unsupported_field("video_mask", request.model, "animates a character without a background")
    reason = f"model {request.model!r} animates a character"
    for name in ("video", "face_video", "reference"):
        if getattr(request, name) is None:
            raise missing_field(name, reason)


def video_size(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, int]:
    """Return the sizes and frames that `request` leaves out, from its control video, in multiples of the model's steps;
    of a longer video, the first frames are used."""
    video, facts = request.video, defaults.sampling
    if video is None or facts.video is None:
        return {}
    assert isinstance(video, InputVideo | TaskVideo), f"the client brings videos to the pool, found {video!r}"
    step, multiple = facts.side_multiple or SIZE_STEP, facts.video.multiple
    sizes = {
        "width": max(step, video.width // step * step),
        "height": max(step, video.height // step * step),
        "frames": 1 + (video.frames - 1) // multiple * multiple,
    }
    return {name: n for name, n in sizes.items() if getattr(request, name) is None}


def control_video_task(
    request: GenerateRequest, model: ModelRef, shape: OutputShape, facts: SamplingFacts, stops: bool = False
) -> StageTask:
    """Return the encoding of the control video of a run that generates `shape`: of the video, its mask, and the
    reference images, each if it is set. It `stops`: nothing follows the last frame of a shorter video. Raises
    UnusableField for a model that follows none."""
    if stops and not follows_video(facts):
        raise unsupported_field("video_stops", request.model, "follows no video as a whole")
    needs: dict[str, TaskId] = {}
    if request.video is not None:
        needs[VIDEO] = input_video_id(request.video)
    if request.video_mask is not None:
        needs[VIDEO_MASK] = input_video_id(request.video_mask, is_mask=True)
    needs |= {numbered(REFERENCE, number): input_image_id(each) for number, each in enumerate(request.references)}
    is_shorter = request.video is not None and request.video.frames < shape.frames
    video = ControlVideo(shape.frames, takes_face_video(facts), stops and is_shorter)
    return StageTask(EncodeImageParams(model, shape.width, shape.height, video=video), needs)


def leading_cells(request: GenerateRequest, facts: SamplingFacts) -> int:
    """Return how many latent frames precede the video: of the reference images of a control video, or of the
    image that leads the video."""
    if takes_control_video(facts):
        return len(request.references)
    return 0 if facts.video is None else facts.video.leading


#: the videos of a request, and the last frame of its output, in the order of the lines
_INPUTS = ("last_image", "video", "video_mask", "face_video")


def _recorded(source: RecipeSource) -> dict[str, Any]:
    found: dict[str, str] = {}
    for name in _INPUTS:
        if (given := getattr(source.request, name)) is not None:
            found |= {f"{name}_sha256": given.sha256, f"{name}_file": given.file}
    return found


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    used = [name for name in _INPUTS if getattr(images, f"{name}_sha256")]
    return {name: find_input(name, getattr(images, f"{name}_file"), find) for name in used}


def _lines(images: RecipeImages) -> Iterator[Line]:
    for name in _INPUTS:
        if sha256 := getattr(images, f"{name}_sha256"):
            yield name.replace("_", " "), image_line(getattr(images, f"{name}_file"), sha256)


VIDEOS = Feature(check_video, video_size, images=Section(_recorded, _restored, _lines))
