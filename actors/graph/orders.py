"""What a driver wants made, as a tree: an image is a latent decoded, a latent is a text sampled.

A tree carries everything that its result depends on, so that a stage can be asked for before its input is made, and so
that an input which nobody holds any more is made again. Names are as the driver gave them; `actors.graph.build_graph`
resolves them. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.control_video_fields import GivenVideo, VideoSource
from modelpool.actors.request.image_fields import Hires, ImageSource, InputImage, steps_left_out
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.specs.spec import TaskId


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """Encode one text. `layers_skipped` and `is_negative` are as of `pool.core.stage_params.EncodeWork`."""

    model: str
    loras: tuple[LoraChoice, ...]
    text: str
    layers_skipped: int = 0
    is_negative: bool = False


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """An image, a video or a mask that the driver brings, at the size that it is used in."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class EncodeImageOrder:
    """Turn an image into a latent: the driver's own, or one that is made first. `hidden` is a mask of what the latent
    is not to show, but grey, or `black`; with `frames` it is the first of a video of so many. Sizes are as of
    `SampleOrder`, `noise`, its `seed` and `bright` as of `pool.core.stage_params.EncodeImageWork`; `last` is what
    such a video ends
    with."""

    image: GivenOrder | DecodeOrder
    model: str
    width: int | None
    height: int | None
    hidden: GivenOrder | None = None
    scale: float = 1.0
    frames: int = 0
    noise: float = 0.0
    seed: int = 0
    last: GivenOrder | None = None
    bright: bool = False
    black: bool = False


@dataclass(frozen=True, slots=True)
class ReferenceOrder:
    """An image to work from, and its own width and height."""

    image: GivenOrder
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Hole:
    """What of an image is made anew.

    paste  what is not is exactly as in the image when it is decoded
    """

    image: GivenOrder
    mask: GivenOrder
    paste: bool


@dataclass(frozen=True, slots=True)
class ControlOrder:
    """A ControlNet by name, the image that it speaks of, how strongly, and from which share of the steps to which; of
    one that has several modes, which. `mask` is what of an image is made anew, its own (`says_mask`) or that of all;
    `start_image` is what the request starts from."""

    model: str
    image: GivenOrder
    strength: float
    start: float
    end: float
    mode: str | int | None = None
    mask: GivenOrder | None = None
    says_mask: bool = False
    start_image: GivenOrder | None = None


@dataclass(frozen=True, slots=True)
class RegionOrder:
    """A text for a part of the image: in a box (left, top, width, height in pixels) or a mask."""

    text: EncodeOrder
    box: tuple[int, int, int, int] | None
    mask: GivenOrder | None
    strength: float


@dataclass(frozen=True, slots=True)
class LowNoiseOrder:
    """Of a model that is two: the share of noise below which the second takes over, and how strongly that is guided."""

    boundary: float
    cfg: float


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Denoise one latent. `negative` is None when nothing is guided by it. Sizes left out are the model's own.

    start       the latent that noise is added to
    first_step  steps at the head of the schedule that are left out
    hole        what of `start` is made anew; None is all of it
    scale       the sizes are so many times these, in whole cells of a latent
    frames, frame_rate, seconds  of a video, of an audio clip; None is the model's own
    last        an image that a video ends with
    references  images to work from
    reference_as  how the text encoder is shown them; None where it is shown none
    image_cfg   how strongly the image counts that the model is shown; None is the model's own
    noise_level  how much noise is put on the image that is enlarged; None is the model's own
    image_noise, motion, elevation  of a video, as of `SampleWork`; None is the model's own
    video, video_mask  a video to follow, and what of it is made anew
    low_noise   of a model that is two, how the second is run; None is as the first, from where the model's own says
    """

    positive: EncodeOrder
    negative: EncodeOrder | None
    model: str
    loras: tuple[LoraChoice, ...]
    steps: int
    cfg: float
    sampler: str
    schedule: str | None
    width: int | None
    height: int | None
    seed: int
    start: EncodeImageOrder | SampleOrder | None = None
    first_step: int = 0
    hole: Hole | None = None
    scale: float = 1.0
    controls: tuple[ControlOrder, ...] = ()
    regions: tuple[RegionOrder, ...] = ()
    frames: int | None = None
    frame_rate: float | None = None
    seconds: float | None = None
    references: tuple[ReferenceOrder, ...] = ()
    reference_as: str | None = None
    image_cfg: float | None = None
    noise_level: int | None = None
    image_noise: float | None = None
    motion: int | None = None
    elevation: float | None = None
    last: GivenOrder | None = None
    low_noise: LowNoiseOrder | None = None
    video: GivenOrder | None = None
    video_mask: GivenOrder | None = None


@dataclass(frozen=True, slots=True)
class GivenLatent:
    """A latent that the driver brings itself, under an id of its own making. `cells` are its sizes behind channels:
    height and width, of a video those of time before, of an audio clip its length."""

    task_id: TaskId
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecoderOrder:
    """The second model of an image that two make, "" for the one that is found; None is its own. `negative` is what it
    is guided away from, whether or not the first model is guided; None where it is not guided."""

    model: str = ""
    steps: int | None = None
    cfg: float | None = None
    negative: EncodeOrder | None = None


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Decode one latent: with `model`, or with the `decoder` that makes images of what that makes."""

    latent: SampleOrder | GivenLatent
    model: str
    decoder: DecoderOrder | None = None


Order: TypeAlias = EncodeOrder | EncodeImageOrder | SampleOrder | DecodeOrder


def order_for(request: GenerateRequest, rounds_up: bool = False) -> DecodeOrder:
    """The tree of `request`, whose seed must be set and whose images must be given. LoRAs,
    ControlNets and regions of strength 0 change nothing and are left out. `rounds_up` says how its model counts the
    part of the steps that a strength means (`SamplingFacts.rounds_steps_up`)."""
    assert request.seed is not None, "the client draws missing seeds"
    image, mask = _given(request.image), _given(request.mask, is_mask=True)
    loras = tuple(lora for lora in request.loras if lora.strength != 0)
    skipped = request.clip_skip
    negative = EncodeOrder(request.model, loras, request.negative, skipped, is_negative=True)
    low_noise = _low_noise(request)
    sample = SampleOrder(
        positive=EncodeOrder(request.model, loras, request.prompt, skipped),
        negative=negative if request.cfg != 1 or (low_noise is not None and low_noise.cfg != 1) else None,
        model=request.model,
        loras=loras,
        steps=request.steps,
        cfg=request.cfg,
        sampler=request.sampler,
        schedule=request.schedule,
        width=request.width,
        height=request.height,
        seed=request.seed,
        start=None if image is None else EncodeImageOrder(image, request.model, request.width, request.height),
        first_step=request.first_step(rounds_up),
        hole=None if image is None or mask is None else Hole(image, mask, request.paste),
        frames=request.frames,
        frame_rate=request.frame_rate,
        seconds=request.seconds,
        references=tuple(_reference(each) for each in request.references),
        reference_as=request.reference_as,
        image_cfg=request.image_cfg,
        noise_level=request.noise_level,
        image_noise=request.image_noise,
        motion=request.motion,
        elevation=request.elevation,
        last=_given(request.last_image),
        video=_given_video(request.video),
        video_mask=_given_video(request.video_mask, is_mask=True),
        low_noise=low_noise,
        regions=tuple(
            RegionOrder(
                EncodeOrder(request.model, loras, region.prompt, request.clip_skip),
                region.box,
                _given(region.mask, is_mask=True),
                region.strength,
            )
            for region in request.regions
            if region.strength != 0
        ),
        controls=tuple(_control(control, image, mask) for control in request.controls if control.strength != 0),
    )
    latent = sample if request.hires is None else _second_pass(sample, request.hires, rounds_up)
    return DecodeOrder(latent, request.model, _decoder(request, negative))


def _low_noise(request: GenerateRequest) -> LowNoiseOrder | None:
    """What `request` says of a second diffusion model, all of which `actors.graph.expert_cut` has filled in."""
    said = request.low_noise
    if said is None or said.boundary is None or said.cfg is None:
        return None
    return LowNoiseOrder(said.boundary, said.cfg)


def _decoder(request: GenerateRequest, negative: EncodeOrder) -> DecoderOrder | None:
    """What `request` says of the second of two models, which is guided by itself: the first may not be."""
    said = request.decoder
    if said is None:
        return None
    return DecoderOrder(said.model, said.steps, said.cfg, negative if said.cfg not in (None, 1) else None)


def _second_pass(sample: SampleOrder, hires: Hires, rounds_up: bool) -> SampleOrder:
    """What `sample` makes, scaled up and made again in part."""
    steps, model = hires.steps or sample.steps, sample.model
    start: EncodeImageOrder | SampleOrder = sample
    if hires.via == "picture":
        start = EncodeImageOrder(DecodeOrder(sample, model), model, sample.width, sample.height, scale=hires.scale)
    left_out = steps_left_out("hires.strength", hires.strength, steps, rounds_up)
    return replace(sample, steps=steps, start=start, first_step=left_out, scale=hires.scale)


def given_id(given: InputImage, is_mask: bool = False) -> TaskId:
    """What an image or a mask of a driver's own is called among results."""
    return TaskId(f"given-{'mask' if is_mask else 'image'}-{given.sha256[:20]}")


def given_video_id(given: GivenVideo, is_mask: bool = False) -> TaskId:
    """What a video or the mask of one of a driver's own is called among results."""
    return TaskId(f"given-video{'-mask' if is_mask else ''}-{given.sha256[:20]}")


def _given_video(source: VideoSource | None, is_mask: bool = False) -> GivenOrder | None:
    if source is None:
        return None
    assert isinstance(source, GivenVideo), f"the client brings videos to the pool, found {source!r}"
    return GivenOrder(given_video_id(source, is_mask))


def _control(control: Control, image: GivenOrder | None, mask: GivenOrder | None) -> ControlOrder:
    """`control` of a request with this image and this mask, which count where it has none of its own."""
    control_image, own_mask = _given(control.image) or image, _given(control.mask, is_mask=True)
    assert control_image is not None, "a ControlNet has an image"
    how = control.strength, control.start, control.end, control.mode
    return ControlOrder(control.model, control_image, *how, own_mask or mask, own_mask is not None, image)


def _reference(source: ImageSource) -> ReferenceOrder:
    assert isinstance(source, InputImage), f"the client brings images to the pool, found {source!r}"
    return ReferenceOrder(GivenOrder(given_id(source)), (source.width, source.height))


def _given(source: ImageSource | None, is_mask: bool = False) -> GivenOrder | None:
    if source is None:
        return None
    assert isinstance(source, InputImage), f"the client brings images to the pool, found {source!r}"
    return GivenOrder(given_id(source, is_mask))
