"""Placeholder images and videos with sizes but no pixels, to plan requests to models that require them."""

from __future__ import annotations

from typing import Any

from modelpool.actors.request.control_video_fields import InputVideo
from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import follows_video, takes_face_video
from modelpool.pool.values.core.sampling_facts import LastFrameMode, ModelDefaults


def with_placeholders(request: GenerateRequest, defaults: ModelDefaults) -> GenerateRequest:
    """Return `request` with placeholders for the images that its model requires and it does not name, of the size of
    the request or the model's default."""
    facts = defaults.sampling
    width, height = (
        (side or default) // facts.enlarges
        for side, default in ((request.width, defaults.width), (request.height, defaults.height))
    )
    video = facts.video
    begins = video is not None and video.begins is not None and video.begins.is_required
    wanted = {
        "image": begins or facts.image_concat is not None or facts.image_labels is not None,
        "mask": facts.inpaints,
        "last_image": video is not None and video.ends is LastFrameMode.MUST,
        "reference": facts.needs_reference or takes_face_video(facts),
    }
    found: dict[str, Any] = {
        name: InputImage(f"a placeholder for {name}", width, height)
        for name, is_wanted in wanted.items()
        if is_wanted and getattr(request, name) is None
    }
    videos = {"video": takes_face_video(facts) or follows_video(facts), "face_video": takes_face_video(facts)}
    if video is not None:
        frames = request.frames or video.frames
        found |= {
            name: InputVideo(f"a placeholder for {name}", width, height, frames)
            for name, is_wanted in videos.items()
            if is_wanted and getattr(request, name) is None
        }
    return request.model_copy(update=found) if found else request
