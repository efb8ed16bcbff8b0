"""What can be asked of models that see an image through a vision encoder and of those that are told of a video in
numbers, and what of the others: checks, numbers, which texts are read.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from modelpool.actors.graph.orders import EncodeImageOrder, EncodeOrder, GivenOrder, SampleOrder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import Beginning, SamplingFacts, VideoNumbers
from modelpool.pool.specs.spec import TaskId

#: what requests call the numbers that a model may be told, and which of them it must know
_NUMBERS: dict[str, frozenset[VideoNumbers]] = {
    "motion": frozenset({VideoNumbers.MOTION}),
    "image_noise": frozenset(VideoNumbers),
    "elevation": frozenset({VideoNumbers.VIEWS}),
}
_MEANINGS = {
    "motion": "is told of no amount of motion",
    "image_noise": "puts no noise on an image that a video begins with",
    "elevation": "is told of no place to look from",
}


@dataclass(frozen=True, slots=True)
class VideoTold:
    """What a model is told of a video, as `SampleWork` has it; all 0 where it is told nothing."""

    image_noise: float = 0.0
    motion: int = 0
    elevation: float = 0.0


def check_video_numbers(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a number that no model of `facts` is told."""
    known = None if facts.video is None else facts.video.numbers
    for name, kinds in _NUMBERS.items():
        value = getattr(request, name)
        if value is not None and known not in kinds:
            raise unusable_field(name, value, f"nothing: model {request.model!r} {_MEANINGS[name]}")


def video_told(order: SampleOrder, facts: SamplingFacts) -> VideoTold:
    """What a run of `order` is told of its video: what it says, and otherwise the model's own."""
    if facts.video is None or facts.video.numbers is None:
        return VideoTold()
    usual, numbers = facts.usual, facts.video.numbers
    assert usual is not None, "a model that is told numbers has usual ones"
    return VideoTold(
        image_noise=usual.image_noise if order.image_noise is None else order.image_noise,
        motion=0 if numbers not in _NUMBERS["motion"] else usual.motion if order.motion is None else order.motion,
        elevation=order.elevation or 0.0 if numbers in _NUMBERS["elevation"] else 0.0,
    )


def texts_read(order: SampleOrder, facts: SamplingFacts, cfg: float) -> list[EncodeOrder]:
    """The texts that a run with this guidance reads, in order; none for a model that is told of images alone."""
    if not facts.reads_text:
        return []
    negative = [] if order.negative is None or cfg == 1 else [order.negative]
    return [order.positive, *negative, *(region.text for region in order.regions)]


def unread_texts(order: SampleOrder, model: str, facts: SamplingFacts, cfg: float) -> Iterator[str]:
    """What to tell of texts that are given and not read."""
    if order.positive.text and not facts.reads_text:
        yield f"prompt: model {model!r} reads none, it is left out"
    if order.negative is not None and order.negative.text and (cfg == 1 or not facts.reads_text):
        yield f"negative prompt: model {model!r} reads none, it is left out"


def seen_lengths(facts: SamplingFacts, cfg: float) -> tuple[int, ...] | None:
    """The lengths of what a model reads that is told of images alone: of one state, and of zeros as long. None for
    models that read texts."""
    return None if facts.reads_text else (1,) * (1 if cfg == 1 else 2)


def seen_images(order: SampleOrder, facts: SamplingFacts) -> tuple[TaskId, ...]:
    """The images of the driver's own that a model sees, each once; none for models that see none. That they are there
    was checked with how its videos begin."""
    if facts.sight is None:
        return ()
    start = order.start
    image = start.image if isinstance(start, EncodeImageOrder) else None
    assert isinstance(image, GivenOrder), f"a model sees images of the driver's own alone, found {start}"
    return tuple(dict.fromkeys((image.task_id, *(() if order.last is None else (order.last.task_id,)))))


def looks(order: SampleOrder, facts: SamplingFacts) -> Callable[[EncodeOrder | None], tuple[TaskId, ...]]:
    """The images that are seen for a text, or for the model itself where that is None: those of the driver's own, and
    none for what a video is not to show."""
    images = seen_images(order, facts)
    return lambda text: () if text is not None and text.is_negative else images


def beginning_order(order: SampleOrder, begins: Beginning | None, frames: int, noise: float) -> EncodeImageOrder | None:
    """The image that a video of so many frames begins with, as it is encoded for a model that is told it so; None
    where it is encoded as any other."""
    start = order.start
    if not isinstance(start, EncodeImageOrder):
        return None
    match begins:
        case Beginning.JOINED:
            return replace(start, frames=frames, last=order.last)
        case Beginning.REPEATED:
            return replace(start, noise=noise, seed=order.seed if noise else 0)
        case _:
            return None
