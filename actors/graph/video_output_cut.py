"""What can be asked of models that make videos, and what of the others: checks, and how a video begins with an image.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from modelpool.actors.graph.orders import EncodeImageOrder, SampleOrder
from modelpool.actors.graph.output_shape import format_of, kind_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import Beginning, Ending, SamplingFacts
from modelpool.pool.families.control_video_form import follows_video


def check_video_output(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what no model of `facts` can be asked for in a video or an audio clip."""
    format_of(request.format, request.model, facts)
    if (kind := kind_of(facts)) == "image":
        return
    images_alone = {
        "mask": request.mask,
        "hires": request.hires,
        "controls": request.controls or None,
        "regions": request.regions or None,
        "strength": request.strength,
    }
    for name, value in images_alone.items():
        if value is not None:
            raise unusable_field(name, "one", f"none: model {request.model!r} makes {kind}s, and it is for images")
    if kind == "audio" and request.image is not None:
        raise unusable_field("image", "one", f"none: model {request.model!r} makes audio clips")


def video_beginning(order: SampleOrder, model: str, facts: SamplingFacts) -> Beginning | None:
    """How a video begins with the image of `order`; None where it has none, or what is made is no video. Raises
    UnusableField for an image where the model is told of none, and for none where it must have one."""
    if facts.video is None:
        if order.last is not None:
            raise unusable_field("last_image", "one", f"none: model {model!r} makes no videos")
        return None
    begins, ends = facts.video.begins, facts.video.ends
    if order.last is not None and ends is None:
        raise unusable_field("last_image", "one", f"none: the videos of model {model!r} end with no image")
    if order.last is None and ends is Ending.MUST:
        raise unusable_field("last_image", "nothing", f"an image: the videos of model {model!r} end with one too")
    if order.last is not None and order.frames == 1:
        raise unusable_field("frames", 1, "at least 2 for a video with a first and a last image")
    if order.start is None:
        if begins is not None and begins.is_always_there:
            raise unusable_field("image", "nothing", f"an image: the videos of model {model!r} begin with one")
        return None
    if begins is None or not isinstance(order.start, EncodeImageOrder):
        how = "is told images as reference and video" if follows_video(facts) else "makes videos of texts alone"
        raise unusable_field("image", "one", f"none: model {model!r} {how}")
    return begins
