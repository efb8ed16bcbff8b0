"""Builds the vision inputs and the conditioning numbers of a run, and selects the texts that it reads.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from modelpool.actors.graph.orders import EncodeImageOrder, EncodeOrder, InputRef, SampleOrder
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.sampling_facts import FirstFrameMode, SamplingFacts, VideoNumbers
from modelpool.pool.core.task_inputs import NEGATIVE, POSITIVE, REGION, enumerated
from modelpool.pool.specs.spec import TaskId

#: conditioning numbers of requests, and the kinds of models that accept them
_NUMBERS: dict[str, frozenset[VideoNumbers]] = {
    "motion": frozenset({VideoNumbers.MOTION}),
    "image_noise": frozenset(VideoNumbers),
    "elevation": frozenset({VideoNumbers.VIEWS}),
}
_MEANINGS = {
    "motion": "accepts no amount of motion",
    "image_noise": "adds no noise to the first frame",
    "elevation": "accepts no camera elevation",
}


@dataclass(frozen=True, slots=True)
class VideoConditioning:
    """Conditioning numbers of a video, as in `SampleParams`; all 0 if the model accepts none."""

    image_noise: float = 0.0
    motion: int = 0
    elevation: float = 0.0


def check_video_numbers(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a conditioning number that models of `facts` do not accept."""
    known = None if facts.video is None else facts.video.numbers
    for name, kinds in _NUMBERS.items():
        value = getattr(request, name)
        if value is not None and known not in kinds:
            raise unsupported_field(name, request.model, _MEANINGS[name], value)


def video_conditioning(order: SampleOrder, facts: SamplingFacts) -> VideoConditioning:
    """Return the conditioning numbers of a run of `order`: the order's, else the model's defaults."""
    if facts.video is None or facts.video.numbers is None:
        return VideoConditioning()
    defaults, numbers = facts.defaults, facts.video.numbers
    assert defaults is not None, "a model with conditioning numbers has defaults"
    return VideoConditioning(
        image_noise=defaults.image_noise if order.image_noise is None else order.image_noise,
        motion=0 if numbers not in _NUMBERS["motion"] else defaults.motion if order.motion is None else order.motion,
        elevation=order.elevation or 0.0 if numbers in _NUMBERS["elevation"] else 0.0,
    )


def texts_read(order: SampleOrder, facts: SamplingFacts, cfg: float) -> dict[str, EncodeOrder]:
    """Return the texts that a run with this CFG scale reads, by name; none for a model that reads only images."""
    if not facts.reads_text:
        return {}
    negative = {} if order.negative is None or cfg == 1 else {NEGATIVE: order.negative}
    regions = zip(enumerated(REGION, order.regions), (region.text for region in order.regions), strict=True)
    return {POSITIVE: order.positive, **negative, **dict(regions)}


def unread_text_warnings(order: SampleOrder, model: str, facts: SamplingFacts, cfg: float) -> Iterator[str]:
    """Yield warnings about texts that are set but not read."""
    if order.positive.text and not facts.reads_text:
        yield f"prompt: ignored, model {model!r} reads no prompt"
    if order.negative is not None and order.negative.text and (cfg == 1 or not facts.reads_text):
        yield f"negative: ignored, model {model!r} reads no negative prompt with these settings"


def image_context_lengths(facts: SamplingFacts, cfg: float) -> tuple[int, ...] | None:
    """Return the context lengths of a model that reads only images: one embedding, and zeros of the same length with
    CFG. None for models that read texts."""
    return None if facts.reads_text else (1,) * (1 if cfg == 1 else 2)


def vision_images(order: SampleOrder, facts: SamplingFacts) -> tuple[TaskId, ...]:
    """Return the input images that the model's vision encoder reads, each once; none without a vision encoder. That
    they are set was checked with the first frame."""
    if facts.vision_use is None:
        return ()
    start = order.start
    image = start.image if isinstance(start, EncodeImageOrder) else None
    assert isinstance(image, InputRef), f"the image must come from the driver, found {start}"
    return tuple(dict.fromkeys((image.task_id, *(() if order.last is None else (order.last.task_id,)))))


def vision_inputs(order: SampleOrder, facts: SamplingFacts) -> Callable[[EncodeOrder | None], tuple[TaskId, ...]]:
    """Return the images that the vision encoder reads for a text, or for the diffusion model if that is None; none for
    a negative prompt."""
    images = vision_images(order, facts)
    return lambda text: () if text is not None and text.is_negative else images


def first_frame_order(
    order: SampleOrder, begins: FirstFrameMode | None, frames: int, noise: float
) -> EncodeImageOrder | None:
    """Return the encoding of the first frame of a video of `frames`, for models that read it as latent channels; None
    if it is encoded as any other image."""
    start = order.start
    if not isinstance(start, EncodeImageOrder):
        return None
    match begins:
        case FirstFrameMode.CONCATENATED:
            return replace(start, frames=frames, last=order.last)
        case FirstFrameMode.REPEATED:
            return replace(start, noise=noise, seed=order.seed if noise else 0)
        case _:
            return None
