"""The result that a driver requests, as a tree of stages: an image decodes a latent, a latent samples from texts.

A tree holds everything that its result depends on, so a stage can be requested before its input is computed, and an
evicted input can be computed again. Names are unresolved; `actors.graph.build_graph` resolves them. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.control_video_fields import InputVideo, VideoSource
from modelpool.actors.request.image_fields import Hires, ImageSource, InputImage, skipped_steps
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.specs.spec import TaskId


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """Encode one text. `layers_skipped` and `is_negative` as in `pool.core.stage_params.EncodeParams`."""

    model: str
    loras: tuple[LoraChoice, ...]
    text: str
    layers_skipped: int = 0
    is_negative: bool = False


@dataclass(frozen=True, slots=True)
class InputRef:
    """An image, a video or a mask that the driver provides, at the size at which it is used."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class EncodeImageOrder:
    """Encode an image to a latent: an input image or a generated one. `hidden` is a mask of the area that is hidden
    from the latent, filled grey, or black with `black`; with `frames`, the image is the first frame of a video of that
    length, and `last` its last frame. Sizes as in `SampleOrder`; `noise`, its `seed` and `bright` as in
    `pool.core.stage_params.EncodeImageParams`."""

    image: InputRef | DecodeOrder
    model: str
    width: int | None
    height: int | None
    hidden: InputRef | None = None
    scale: float = 1.0
    frames: int = 0
    noise: float = 0.0
    seed: int = 0
    last: InputRef | None = None
    bright: bool = False
    black: bool = False


@dataclass(frozen=True, slots=True)
class ReferenceOrder:
    """A reference image and its width and height."""

    image: InputRef
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class InpaintOrder:
    """InpaintOrder of an image.

    paste  the unmasked area is copied from the image after decoding
    """

    image: InputRef
    mask: InputRef
    paste: bool


@dataclass(frozen=True, slots=True)
class ControlOrder:
    """A ControlNet by name, its control image, strength, part of the schedule, and mode if it has several. `mask` is
    its inpaint mask, or else the request's (`has_own_mask`: it is the ControlNet's); `start_image` is the image that
    the request starts from."""

    model: str
    image: InputRef
    strength: float
    start: float
    end: float
    mode: str | int | None = None
    mask: InputRef | None = None
    has_own_mask: bool = False
    start_image: InputRef | None = None


@dataclass(frozen=True, slots=True)
class RegionOrder:
    """A prompt for a part of the image: in a box (left, top, width, height in pixels) or a mask."""

    text: EncodeOrder
    box: tuple[int, int, int, int] | None
    mask: InputRef | None
    strength: float


@dataclass(frozen=True, slots=True)
class LowNoiseOrder:
    """The low-noise expert: the noise level below which it takes over, and its guidance scale."""

    boundary: float
    cfg: float


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Denoise one latent. `negative` is None without guidance. None stands for the model's default.

    start       the latent that noise is added to
    first_step  steps skipped at the start of the schedule
    inpaint     the part of `start` that is regenerated; None is all of it
    scale       factor of the sizes, rounded to whole latent cells
    frames, frame_rate, seconds  of a video or an audio clip
    last        last frame of a video
    references  reference images
    reference_as  how a text encoder with vision reads them; None if it reads none
    image_cfg   guidance scale of the image of a model guided by text and image
    noise_level  noise added to an image that is upscaled
    image_noise, motion, elevation  of a video, as in `SampleParams`
    video, video_mask  control video, and what of it is regenerated
    low_noise   options of the low-noise expert; None is the cfg of the first, and the model's boundary
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
    inpaint: InpaintOrder | None = None
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
    last: InputRef | None = None
    low_noise: LowNoiseOrder | None = None
    video: InputRef | None = None
    video_mask: InputRef | None = None


@dataclass(frozen=True, slots=True)
class InputLatent:
    """A latent that the driver provides under its own task id. `cells` is its shape after the channels: height and
    width; for a video frames, height and width; for an audio clip its length."""

    task_id: TaskId
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecoderOrder:
    """The decoder of a two-stage model; model "" stands for the one that is found, None for its defaults. `negative` is
    its negative prompt, independent of the prior's; None without guidance."""

    model: str = ""
    steps: int | None = None
    cfg: float | None = None
    negative: EncodeOrder | None = None


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Decode one latent: with `model`, or with the `decoder` of a two-stage model."""

    latent: SampleOrder | InputLatent
    model: str
    decoder: DecoderOrder | None = None


Order: TypeAlias = EncodeOrder | EncodeImageOrder | SampleOrder | DecodeOrder


def order_for(request: GenerateRequest, rounds_up: bool = False) -> DecodeOrder:
    """Return the tree of `request`, whose seed must be set and whose images must be in the pool. LoRAs, ControlNets and
    regions of strength 0 have no effect and are left out. `rounds_up` is how the model rounds a fraction of a step
    (`SamplingFacts.rounds_steps_up`)."""
    assert request.seed is not None, "the client draws missing seeds"
    image, mask = _input_image(request.image), _input_image(request.mask, is_mask=True)
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
        inpaint=None if image is None or mask is None else InpaintOrder(image, mask, request.paste),
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
        last=_input_image(request.last_image),
        video=_input_video(request.video),
        video_mask=_input_video(request.video_mask, is_mask=True),
        low_noise=low_noise,
        regions=tuple(
            RegionOrder(
                EncodeOrder(request.model, loras, region.prompt, request.clip_skip),
                region.box,
                _input_image(region.mask, is_mask=True),
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
    """Return the options of the low-noise expert, completed by `actors.graph.expert_graph`."""
    options = request.low_noise
    if options is None or options.boundary is None or options.cfg is None:
        return None
    return LowNoiseOrder(options.boundary, options.cfg)


def _decoder(request: GenerateRequest, negative: EncodeOrder) -> DecoderOrder | None:
    """Return the options of the decoder, whose guidance is independent of the prior's."""
    options = request.decoder
    if options is None:
        return None
    has_cfg = options.cfg not in (None, 1)
    return DecoderOrder(options.model, options.steps, options.cfg, negative if has_cfg else None)


def _second_pass(sample: SampleOrder, hires: Hires, rounds_up: bool) -> SampleOrder:
    """Return the second pass over the result of `sample`: scaled up and partly regenerated."""
    steps, model = hires.steps or sample.steps, sample.model
    start: EncodeImageOrder | SampleOrder = sample
    if hires.via == "picture":
        start = EncodeImageOrder(DecodeOrder(sample, model), model, sample.width, sample.height, scale=hires.scale)
    left_out = skipped_steps("hires.strength", hires.strength, steps, rounds_up)
    return replace(sample, steps=steps, start=start, first_step=left_out, scale=hires.scale)


def input_image_id(source: InputImage, is_mask: bool = False) -> TaskId:
    """Return the task id of an input image or mask."""
    return TaskId(f"given-{'mask' if is_mask else 'image'}-{source.sha256[:20]}")


def input_video_id(source: InputVideo, is_mask: bool = False) -> TaskId:
    """Return the task id of an input video or its mask."""
    return TaskId(f"given-video{'-mask' if is_mask else ''}-{source.sha256[:20]}")


def _input_video(source: VideoSource | None, is_mask: bool = False) -> InputRef | None:
    if source is None:
        return None
    assert isinstance(source, InputVideo), f"the client brings videos to the pool, found {source!r}"
    return InputRef(input_video_id(source, is_mask))


def _control(control: Control, image: InputRef | None, mask: InputRef | None) -> ControlOrder:
    """Return the order of `control`, with the image and the mask of the request as its defaults."""
    control_image, own_mask = _input_image(control.image) or image, _input_image(control.mask, is_mask=True)
    assert control_image is not None, "a ControlNet has an image"
    how = control.strength, control.start, control.end, control.mode
    return ControlOrder(control.model, control_image, *how, own_mask or mask, own_mask is not None, image)


def _reference(source: ImageSource) -> ReferenceOrder:
    assert isinstance(source, InputImage), f"the client brings images to the pool, found {source!r}"
    return ReferenceOrder(InputRef(input_image_id(source)), (source.width, source.height))


def _input_image(source: ImageSource | None, is_mask: bool = False) -> InputRef | None:
    if source is None:
        return None
    assert isinstance(source, InputImage), f"the client brings images to the pool, found {source!r}"
    return InputRef(input_image_id(source, is_mask))
