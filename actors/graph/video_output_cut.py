"""What can be asked of models that make films, and what of the others: checks, and how a film begins with a picture.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from modelpool.actors.graph.orders import EncodePictureOrder, SampleOrder
from modelpool.actors.graph.output_shape import format_of, kind_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import Beginning, Ending, SamplingFacts
from modelpool.pool.families.control_video_form import follows_video


def check_film(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what no model of `facts` can be asked for in a film or a sound."""
    format_of(request.format, request.model, facts)
    if (kind := kind_of(facts)) == "picture":
        return
    pictures_alone = {
        "mask": request.mask,
        "hires": request.hires,
        "controls": request.controls or None,
        "regions": request.regions or None,
        "strength": request.strength,
    }
    for name, value in pictures_alone.items():
        if value is not None:
            raise unusable_field(name, "one", f"none: model {request.model!r} makes {kind}s, and it is for pictures")
    if kind == "sound" and request.image is not None:
        raise unusable_field("image", "one", f"none: model {request.model!r} makes sounds")


def film_beginning(order: SampleOrder, model: str, facts: SamplingFacts) -> Beginning | None:
    """How a film begins with the picture of `order`; None where it has none, or what is made is no film. Raises
    UnusableField for a picture where the model is told of none, and for none where it must have one."""
    if facts.film is None:
        if order.last is not None:
            raise unusable_field("last_image", "one", f"none: model {model!r} makes no films")
        return None
    begins, ends = facts.film.begins, facts.film.ends
    if order.last is not None and ends is None:
        raise unusable_field("last_image", "one", f"none: the films of model {model!r} end with no picture")
    if order.last is None and ends is Ending.MUST:
        raise unusable_field("last_image", "nothing", f"a picture: the films of model {model!r} end with one too")
    if order.last is not None and order.frames == 1:
        raise unusable_field("frames", 1, "at least 2 for a film with a first and a last picture")
    if order.start is None:
        if begins is not None and begins.is_always_there:
            raise unusable_field("image", "nothing", f"a picture: the films of model {model!r} begin with one")
        return None
    if begins is None or not isinstance(order.start, EncodePictureOrder):
        how = "is told pictures as reference and video" if follows_video(facts) else "makes films of texts alone"
        raise unusable_field("image", "one", f"none: model {model!r} {how}")
    return begins
