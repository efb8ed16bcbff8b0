"""The images that a model works from: in which sizes they are read, and how its text encoder is shown them.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from modelpool.actors.graph.image_concat_cut import EDIT_PIXELS, reference_size
from modelpool.actors.graph.orders import EncodeImageOrder, SampleOrder
from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.request.requests import SIZE_STEP, GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import SamplingFacts, TextSight
from modelpool.pool.core.stage_params import ModelRef, SeeImageWork
from modelpool.pool.families.control_video_form import follows_video
from modelpool.pool.models.text.vision_prompt import MOST_PROPORTION
from modelpool.pool.specs.spec import TaskId

#: pixels in which a text encoder sees images with numbers, at most; and what the sides of images that it sees are
#: multiples of. Source: the pipelines of diffusers for Qwen-Image's editing models
NUMBERED_PIXELS, EDIT_STEP = 384**2, 32
#: "edit" in a name, as a word: not as a part of "credit" or "edited"
_EDIT = r"(?:(?<![A-Za-z])(?i:edit)|(?<=[a-z])Edit|(?i:(?:qwen|image)edit))"
_EDIT_NAMES = re.compile(rf"{_EDIT}(?![a-z])|{_EDIT}(?i:plus)")
#: names of models that were made for images with numbers: Qwen-Image-Edit 2509 (the year, the month) and later ones
_NUMBERED_NAMES = re.compile(
    rf"{_EDIT}[^A-Za-z0-9]?(?i:plus)(?![a-z])"
    rf"|{_EDIT}(?![a-z]).*(?<!\d)(?:25(?:09|1[0-2])|(?:2[6-9]|3\d)(?:0[1-9]|1[0-2]))(?!\d)"
)
#: rows of models that take several images, and whose text encoders see none
_TAKE_SEVERAL = frozenset({"flux2", "flux2_dev", "flux2_klein", "wan_vace"})
#: the row of models whose text encoder's file has to have a part that sees images
_QWEN_IMAGE = "qwen_image"


@dataclass(frozen=True, slots=True)
class ReferencesRead:
    """How a run reads the images that it works from, in order.

    images  the driver's own
    orders    each, to be turned into a latent
    sizes     width and height of these
    seen      the same in which the text encoder sees them; empty where it sees none
    numbered  it is told their numbers
    """

    images: tuple[TaskId, ...] = ()
    orders: tuple[EncodeImageOrder, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    numbered: bool = False

    def sights(self, model: ModelRef) -> Iterator[tuple[SeeImageWork, tuple[TaskId, ...]]]:
        """How each is seen, and what that reads."""
        for image, size in zip(self.images, self.seen, strict=False):
            yield SeeImageWork(model, 1, *size), (image,)


NO_REFERENCES = ReferencesRead()


def check_references(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for images to work from that no model of `facts` can be told, or not so."""
    count = len(request.references)
    if count and not facts.takes_reference:
        raise unusable_field("reference", "one", f"none: model {request.model!r} {_why_none(facts)}")
    if len({each.sha256 for each in request.references if isinstance(each, InputImage)}) < count:
        raise unusable_field("reference", "one image twice", "different ones")
    if count > 1 and facts.text_sight is None and facts.model not in _TAKE_SEVERAL:
        raise unusable_field("reference", f"{count} images", f"one: model {request.model!r} is told of no more")
    if request.reference_as is None:
        return
    if not count or facts.text_sight is None:
        expected = f"nothing: model {request.model!r} has no text encoder that is shown a reference"
        raise unusable_field("reference_as", request.reference_as, expected if count else "nothing without a reference")
    if count > 1 and request.reference_as == TextSight.WHOLE.value:
        raise unusable_field("reference_as", request.reference_as, f"{TextSight.NUMBERED.value} for several images")


def _why_none(facts: SamplingFacts) -> str:
    """Why models of `facts`, which take no reference, take none."""
    if facts.model == _QWEN_IMAGE and facts.unseeing:
        part = "has a text encoder whose part that sees images (tensors visual.*) is not that of Qwen 2.5 VL"
        return f"{part}, which its edits need: {facts.unseeing}"
    if facts.model == _QWEN_IMAGE:
        return "has a text encoder without the part that sees images (tensors visual.*), which its edits need"
    if facts.shown is not None:
        return "is shown the image that it works from: give it as image"
    return "is told of no image to work from"


def with_sight(request: GenerateRequest, facts: SamplingFacts, model: ModelRef) -> GenerateRequest:
    """`request` with how the text encoder is shown its images: as it says; with numbers where there are several; and
    otherwise as its `model` was made for, as far as that or the name of its file tells. As it is where the encoder
    sees none."""
    if not request.references or facts.text_sight is None or request.reference_as is not None:
        return request
    sight = facts.text_sight
    if sight is TextSight.BY_NAME:
        sight = TextSight.NUMBERED if _is_called(_NUMBERED_NAMES, request, model) else TextSight.WHOLE
    if len(request.references) > 1:
        sight = TextSight.NUMBERED
    return request.model_copy(update={"reference_as": sight.value})


def started_edits(request: GenerateRequest, facts: SamplingFacts, model: ModelRef) -> Iterator[str]:
    """What to tell of a request that has an editing model begin with an image, and not work from it: the images of
    other such models are an `image`."""
    if request.image is None or request.references or facts.model != _QWEN_IMAGE:
        return
    if _is_called(_EDIT_NAMES, request, model):
        yield (
            f"model {request.model!r} begins with image and does not see it; what an editing model is to work from "
            "is given as reference"
        )


def _is_called(names: re.Pattern[str], request: GenerateRequest, model: ModelRef) -> bool:
    """Whether one of `names` is what a model is called, by the request or by its own file."""
    own = model.assembly
    file = "" if own is None else PurePath(own.diffusion_model or own.checkpoint).name
    return any(map(names.search, (request.model, model.name, file)))


def references_read(order: SampleOrder, facts: SamplingFacts, made: tuple[int, int]) -> ReferencesRead:
    """How a run of `order` reads its images, which makes one of this width and height before it is scaled up: each in
    its own proportions, and in about as many pixels as that. Raises UnusableField for one that is too long or too wide
    to be seen. Nothing for a model that has them before a video to follow (`actors.graph.control_video_cut`), and
    one seen for each text where the image that a video begins with is."""
    if facts.sight is not None and not facts.sight.is_told:
        return ReferencesRead(seen=((0, 0),))
    if not order.references or follows_video(facts):
        return ReferencesRead()
    step, pixels = facts.side_multiple or SIZE_STEP, made[0] * made[1]
    own = [each.size for each in order.references]
    if facts.text_sight is not None:
        step, pixels = max(step, EDIT_STEP), min(pixels, EDIT_PIXELS)
    sizes = tuple(reference_size(size, pixels, step) for size in own)
    numbered = order.reference_as == TextSight.NUMBERED.value
    seen = sizes if order.reference_as else ()
    if numbered:
        seen = tuple(reference_size(size, min(pixels, NUMBERED_PIXELS), step) for size in own)
    for found, size in zip(own, seen, strict=False):
        if max(size) > MOST_PROPORTION * min(size):
            which = f"an image of {found[0]}x{found[1]} pixels, seen in {size[0]}x{size[1]}"
            expected = f"one at most {MOST_PROPORTION} times as long as wide, or as wide as long"
            raise unusable_field("reference", which, expected)
    orders = tuple(
        EncodeImageOrder(each.image, order.model, *size) for each, size in zip(order.references, sizes, strict=True)
    )
    return ReferencesRead(tuple(each.image.task_id for each in order.references), orders, sizes, seen, numbered)
