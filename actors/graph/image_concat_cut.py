"""What can be asked of models that work from an image which they are shown, and what of the others: checks, numbers,
sizes.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from modelpool.actors.graph.orders import EncodeImageOrder, GivenOrder, SampleOrder
from modelpool.actors.request.image_fields import MOST_SIDE, InputImage
from modelpool.actors.request.requests import SIZE_STEP, GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import Guidance, MadeFor, SamplingFacts, Shown
from modelpool.pool.specs.spec import TaskId

#: pixels that models make of images which their text encoder sees too. Source: the pipelines of diffusers for
#: Qwen-Image's editing models
EDIT_PIXELS = 1024**2


@dataclass(frozen=True, slots=True)
class ShownImage:
    """How a run has the image that its model is shown.

    is_shown     it is shown one, and no noise is added to that: nothing is left out of the schedule
    is_pixels    it reads the image itself
    image_cfg, noise_level, enlarges  as `SampleWork` and `SamplingFacts` have them
    """

    is_shown: bool = False
    is_pixels: bool = False
    image_cfg: float = 0.0
    noise_level: int = 0
    enlarges: int = 1


def check_shown(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what no model of `facts` can be asked for in what it makes of images."""
    if request.image_cfg is not None and not _is_guided_by_image(facts):
        expected = f"nothing: model {request.model!r} is not guided by text and image"
        raise unusable_field("image_cfg", request.image_cfg, expected)
    if request.noise_level is not None and facts.shown is not Shown.PIXELS:
        expected = f"nothing: model {request.model!r} puts no noise on an image to make it larger"
        raise unusable_field("noise_level", request.noise_level, expected)
    if facts.shown is None or facts.shown.is_hole:
        return
    others = {"mask": request.mask, "strength": request.strength, "hires": request.hires}
    if facts.shown is Shown.PIXELS:
        others["controls"] = request.controls or None
    for name, value in others.items():
        if value is not None:
            raise unusable_field(name, "one", f"none: model {request.model!r} is shown the whole image as it is")


def shown_image(order: SampleOrder, model: str, facts: SamplingFacts) -> ShownImage:
    """How a run of `order` has its image. Raises UnusableField where there is none and the model must have one."""
    if facts.shown is None or facts.shown.is_hole:
        return ShownImage()
    if not isinstance(order.start, EncodeImageOrder) or order.hole is not None:
        raise unusable_field("image", "nothing", f"an image: model {model!r} works from one that it is shown")
    if max(order.width or 0, order.height or 0) * facts.enlarges > MOST_SIDE:
        expected = f"one of up to {MOST_SIDE // facts.enlarges} pixels a side, as model {model!r} enlarges it"
        raise unusable_field("image", f"an image of {order.width}x{order.height} pixels", expected)
    usual = facts.usual
    return ShownImage(
        is_shown=True,
        is_pixels=facts.shown is Shown.PIXELS,
        image_cfg=_or_usual(order.image_cfg, 0.0 if usual is None else usual.image_cfg),
        noise_level=int(_or_usual(order.noise_level, 0 if usual is None else usual.noise_level)),
        enlarges=facts.enlarges,
    )


def given_task(start: EncodeImageOrder | SampleOrder) -> TaskId:
    """The image of a driver's own that a run would start from."""
    image = start.image if isinstance(start, EncodeImageOrder) else None
    assert isinstance(image, GivenOrder), f"a model is shown images of the driver's own alone, found {start}"
    return image.task_id


def fitting_image(request: GenerateRequest, facts: SamplingFacts) -> GenerateRequest:
    """`request`, whose image is given, with the sizes of that where it leaves them out, in whole steps of the model:
    it is brought to cover them where it is read. A model that is shown its image, or begins a video with it, makes all
    steps."""
    if request.image is None:
        return request
    step = facts.side_multiple or SIZE_STEP
    own = {"width": request.image.width, "height": request.image.height}
    found: dict[str, Any] = {
        name: max(step, side // step * step) for name, side in own.items() if getattr(request, name) is None
    }
    if facts.video is not None or (facts.shown is not None and not facts.shown.is_hole):
        found["strength"] = 1.0
    return request.model_copy(update=found)


def sized_as_reference(request: GenerateRequest, own: MadeFor) -> GenerateRequest:
    """`request` with the proportions of its last reference where it leaves sizes out, and about as many pixels as the
    model was made for. Videos have sizes of their own, into which references are fitted."""
    if (
        not request.references
        or own.sampling.video is not None
        or (request.width is not None and request.height is not None)
    ):
        return request
    reference = request.references[-1]
    assert isinstance(reference, InputImage), f"the client brings images to the pool, found {reference!r}"
    found, step = (reference.width, reference.height), own.sampling.side_multiple or SIZE_STEP
    if request.width is None and request.height is None:
        most = own.width * own.height if own.sampling.text_sight is None else EDIT_PIXELS
        width, height = reference_size(found, min(own.width * own.height, most), step)
    elif request.width is None:
        assert request.height is not None
        width, height = _stepped(request.height * found[0] / found[1], step), request.height
    else:
        width, height = request.width, _stepped(request.width * found[1] / found[0], step)
    return request.model_copy(update={"width": width, "height": height})


def reference_size(found: tuple[int, int], pixels: int, step: int) -> tuple[int, int]:
    """The width and height in which an image of the size `found` is read: its own proportions in multiples of `step`,
    and about so many pixels."""
    scale = math.sqrt(pixels / (found[0] * found[1]))
    return _stepped(found[0] * scale, step), _stepped(found[1] * scale, step)


def _stepped(pixels: float, step: int) -> int:
    return min(max(step, round(pixels / step) * step), MOST_SIDE // step * step)


def _or_usual(value: float | None, usual: float) -> float:
    return usual if value is None else value


def _is_guided_by_image(facts: SamplingFacts) -> bool:
    return facts.usual is not None and facts.usual.guidance is Guidance.TEXT_AND_IMAGE
