"""Builds the video fields of a run: checks, and the first frame of image-to-video.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from modelpool.actors.graph.common.output_shape import format_of, kind_of, output_plural, quality_of
from modelpool.actors.request.field_errors import missing_field, unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import follows_video, takes_control_video
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import FirstFrameMode, LastFrameMode, SamplingFacts


def check_video_output(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for fields that models of `facts` do not support in a video or an audio clip."""
    quality_of(request.quality, format_of(request.format, request.model, facts))
    if (kind := kind_of(facts)) == "image":
        return
    image_only = {
        "mask": request.mask,
        "hires": request.hires,
        "controls": request.controls or None,
        "regions": request.regions or None,
        "strength": request.strength,
    }
    for name, value in image_only.items():
        if value is not None:
            raise unsupported_field(name, request.model, f"generates {output_plural(facts)}; the field is for images")
    if kind == "audio" and request.image is not None:
        raise unsupported_field("image", request.model, "generates audio clips")


def first_frame_mode(request: GenerateRequest, model: str, facts: SamplingFacts) -> FirstFrameMode | None:
    """Return how the model reads the first frame of `request`; None without a first frame, or for images. Raises
    UnusableField for an image that the model does not accept, and for a missing one that it requires."""
    if facts.video is None:
        if request.last_image is not None:
            raise unsupported_field("last_image", model, "generates no videos")
        return None
    begins, ends = facts.video.begins, facts.video.ends
    if request.last_image is not None and ends is None:
        raise unsupported_field("last_image", model, "accepts no last frame")
    if request.last_image is None and ends is LastFrameMode.MUST:
        raise missing_field("last_image", f"model {model!r} requires the last frame of the video")
    if request.last_image is not None and request.frames == 1:
        raise unusable_field("frames", 1, "at least 2 for a video with first and last frame")
    if request.image is None:
        if begins is not None and begins.is_required:
            raise missing_field("image", f"model {model!r} requires the first frame of the video")
        return None
    if begins is None:
        reason = "generates videos from text only"
        if facts.makes_layers:
            reason = "accepts the image that it splits into layers as reference"
        elif takes_control_video(facts):
            reason = "follows a video" if follows_video(facts) else "accepts images as reference or video"
        raise unsupported_field("image", model, reason)
    return begins
