"""Images that stand in for a driver's own, for planning requests to models that work from images: sizes alone,
which nobody reads."""

from __future__ import annotations

from typing import Any

from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.sampling_facts import Ending, MadeFor


def with_stand_ins(request: GenerateRequest, own: MadeFor) -> GenerateRequest:
    """`request` with the images, of its size or the model's own, that its model must have and it does not name."""
    facts = own.sampling
    width, height = (
        (said or usual) // facts.enlarges for said, usual in ((request.width, own.width), (request.height, own.height))
    )
    video = facts.video
    begins = video is not None and video.begins is not None and video.begins.is_always_there
    wanted = {
        "image": begins or facts.shown is not None,
        "mask": facts.fills_holes,
        "last_image": video is not None and video.ends is Ending.MUST,
    }
    found: dict[str, Any] = {
        name: InputImage(f"a stand-in for {name}", width, height)
        for name, is_wanted in wanted.items()
        if is_wanted and getattr(request, name) is None
    }
    return request.model_copy(update=found) if found else request
