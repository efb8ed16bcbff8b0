"""What one task asks of one GPU, and what it gives back.

Values only; torch-free (numpy arrays carry results between processes). A `Work` names files and numbers, never tensors,
so that its digest names its result: equal work is run once.

Shape legend: L tokens, D text width, V width of a pooled text, C channels, H W latent or pixel height and width, S
samples of audio.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelpool.pool.core.refs import ControlRef as ControlRef
from modelpool.pool.core.refs import EmbeddingRef as EmbeddingRef
from modelpool.pool.core.refs import HoleTold as HoleTold
from modelpool.pool.core.refs import LoraRef as LoraRef
from modelpool.pool.core.refs import ModelRef as ModelRef
from modelpool.pool.core.results import AudioSamples as AudioSamples
from modelpool.pool.core.results import Encoded as Encoded
from modelpool.pool.core.results import FloatArray as FloatArray
from modelpool.pool.core.results import Halfway as Halfway
from modelpool.pool.core.results import ImagePixels as ImagePixels
from modelpool.pool.core.results import Latent as Latent
from modelpool.pool.core.results import Made as Made
from modelpool.pool.core.results import Mask as Mask
from modelpool.pool.core.results import PixelArray as PixelArray
from modelpool.pool.core.results import Result as Result
from modelpool.pool.core.results import Seen as Seen
from modelpool.pool.core.results import VideoFrames as VideoFrames
from modelpool.pool.core.results import VideoMask as VideoMask
from modelpool.pool.specs.spec import ComponentKey, Role, RunCost, Stage, TaskId, TaskSpec


@dataclass(frozen=True, slots=True)
class RegionWork:
    """A part of an image that has a text of its own, and how strongly that counts beside the prompt. `box` is its
    left, top, width and height in shares of the image; None where a `Mask` says it."""

    strength: float
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode one text, prompt weights and all. Result: `Encoded`. Reads the `Seen` of each image that the text
    encoder is shown among the words.

    layers_skipped  of the last layers of CLIP, beyond those that the model's family leaves out
    is_negative     what an image is not to show: some families word that otherwise
    embeddings      those that the text names
    seen            width and height in which each image was seen
    numbered        the text calls the images by their numbers
    """

    model: ModelRef
    #: only those LoRAs that touch the text encoder, so that the others share the result
    loras: tuple[LoraRef, ...]
    text: str
    layers_skipped: int = 0
    is_negative: bool = False
    embeddings: tuple[EmbeddingRef, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Denoise one image's latent. Result: `Latent`. Reads `Encoded` of the prompt, then of the negative prompt unless
    `cfg` is 1, then what its last fields say, in their order; and the `Seen` of its image by a model that has a
    vision encoder, which has it in place of texts where it reads none.

    frames       of a video; 0 is an image or an audio clip, by a model that makes no videos
    frame_rate   frames a second of it
    seconds      of an audio clip, whose width and height are 0; 0 is an image or a video
    imaged     reads the `Latent` of an image, which the model is told: the one that a video begins with, or that it
                 works from; a model that enlarges images reads the `ImagePixels`
    guidance     the number by which a distilled model is told how strongly to follow the text; `cfg` is 1 then
    first_step   steps at the head of the schedule that are left out: what it starts from is there already
    starts       reads a `Latent` that noise is added to, of any size; without it the run starts from noise alone
    masked       reads a `Mask`: outside of it the result is the latent that the run started from
    told_hidden  reads a `Mask` and the `Latent` of the image with a hole there, which the model is told
    reference    reads the `Latent` of an image of this width and height, to work from
    more_references  reads those of more of them, after the first
    prior        reads the `Latent` of this height and width that the model before it made
    ends         the video whose latent it is told of ends with an image too
    image_cfg  how strongly the image counts that the model is told, 1 as much as it does by itself; 0 for models
                 that are not guided so
    noise_level  of 1000: how much noise is put on the image that is enlarged
    image_noise  deviation of the noise that is on the image that it is told of, pixels of which go from -1 to 1
    motion       how much moves in a video, of 255
    elevation    from how far above the middle a video looks at a thing, in degrees
    regions      reads an `Encoded` for each (after the negative prompt), and a `Mask` for each that has no box
    controls     reads a `ImagePixels` for each, in any size, that the ControlNet speaks of, or the `Latent` of that
    behind
                 all others; where it is told a hole (`HoleTold`) a `Mask` behind all others, and the `Latent` of a
                 image beside its own behind that
    switch       of a pair of models: steps of the schedule that are done when the one for low noise takes over, from
                 the `Halfway` that comes of the other's run; 0 where one model makes all
    low_noise    it is the run of the one for low noise; with `switch` it reads that `Halfway`, after all else
    follows      reads the `Latent` of a video to follow, which `EncodeImageWork.follows` made
    leading      cells of time before the video's own, of images to work from; the result has none of those that are
                 told of as a video to follow is
    """

    model: ModelRef
    #: only those LoRAs that touch the diffusion model
    loras: tuple[LoraRef, ...]
    width: int
    height: int
    steps: int
    cfg: float
    sampler: str
    schedule: str
    seed: int
    frames: int = 0
    frame_rate: float = 0.0
    guidance: float = 0.0
    first_step: int = 0
    starts: bool = False
    masked: bool = False
    told_hidden: bool = False
    regions: tuple[RegionWork, ...] = ()
    controls: tuple[ControlRef, ...] = ()
    seconds: float = 0.0
    imaged: bool = False
    reference: tuple[int, int] | None = None
    more_references: tuple[tuple[int, int], ...] = ()
    prior: tuple[int, int] | None = None
    ends: bool = False
    image_cfg: float = 0.0
    noise_level: int = 0
    image_noise: float = 0.0
    motion: int = 0
    elevation: float = 0.0
    switch: int = 0
    low_noise: bool = False
    follows: bool = False
    leading: int = 0

    @property
    def has_hole(self) -> bool:
        """It reads a `Mask` of what is made anew."""
        return self.masked or self.told_hidden

    @property
    def texts(self) -> int:
        """How many texts the model is asked about in each step."""
        return (1 if self.cfg == 1 else 2) + len(self.regions) + self.asks_without_image

    @property
    def asks_without_image(self) -> bool:
        """The model is asked about the negative prompt without an image too, to be guided away from that."""
        return self.cfg != 1 and self.image_cfg not in (0, 1)

    @property
    def leading_made(self) -> int:
        """Of `leading`, those that the result has: it is decoded with them."""
        return 0 if self.follows else self.leading

    @property
    def steps_run(self) -> int:
        """Steps that are really made."""
        begin, end = self.span
        return end - begin

    @property
    def span(self) -> tuple[int, int]:
        """Steps of the schedule that are done before it, and after."""
        return (self.switch, self.steps) if self.resumes else (self.first_step, self.switch or self.steps)

    @property
    def resumes(self) -> bool:
        """It goes on from the `Halfway` that another model's run left."""
        return self.low_noise and self.switch > 0


@dataclass(frozen=True, slots=True)
class EncodeImageWork:
    """Turn pixels into a latent. Result: `Latent`. Reads `ImagePixels`, which is scaled to this size and cropped where
    it has another, and with `hides` a `Mask` of what the latent is not to show, but grey, or `black`. With `frames` it
    is the first of so many, and grey follows; with `ends` the last is the second `ImagePixels`, or the first again
    where no other comes. With `noise` there is so much on its pixels, which go from -1 to 1, by numbers of `seed`. `bright`
    gives the VAE pixels from 0.5 to 128 instead, as the ControlNet for edges of Stable Diffusion 3.5 was trained.
    `follows` makes what a model is told of a video of `frames` to follow (`pool.conditioning.control_video`): reads its
    `VideoFrames` and
    `VideoMask`, where there are, and a `ImagePixels` for each that the model works from.
    """

    model: ModelRef
    width: int
    height: int
    hides: bool = False
    frames: int = 0
    noise: float = 0.0
    seed: int = 0
    ends: bool = False
    bright: bool = False
    follows: bool = False
    black: bool = False


@dataclass(frozen=True, slots=True)
class SeeImageWork:
    """Look at so many `pictures` with a vision encoder. Result: `Seen`, one's states after the other's. Reads a
    `ImagePixels` for each, in any size; where fewer come, the last counts again, and where none comes a black one. For
    an encoder that sees images in their own proportions it is one, which is brought to this width and height."""

    model: ModelRef
    images: int = 1
    width: int = 0
    height: int = 0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Turn a latent into pixels or samples. Result: `ImagePixels`, with `frames` a `VideoFrames`, with `seconds` a
    `AudioSamples` of so many. Reads `Latent`, which has the size of what is made (an audio clip's may be longer, a
    video's has `leading` cells of time more, before it), and with `pastes` the `ImagePixels` and the `Mask` that say
    what the result shows outside of the mask."""

    model: ModelRef
    width: int
    height: int
    pastes: bool = False
    frames: int = 0
    frame_rate: float = 0.0
    seconds: float = 0.0
    leading: int = 0


Work: TypeAlias = EncodeWork | EncodeImageWork | SeeImageWork | SampleWork | DecodeWork


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """Tasks that are expected after the run that is under way, and whose weights may be brought beside it, one task's
    after the other's. Known by identity.

    needed_next  components that are expected to be needed after the run, soonest first
    kept         those that do not leave for it
    """

    tasks: tuple[tuple[TaskSpec, Work], ...]
    needed_next: tuple[ComponentKey, ...] = ()
    kept: tuple[ComponentKey, ...] = ()


@dataclass(frozen=True, slots=True)
class RunHooks:
    """How a run talks back while it goes on.

    on_step      called after each step with (steps done, steps in all)
    should_stop  asked at each step and tile, and every few milliseconds at layers; True ends the run with `Stopped`.
                 Called in the run's thread, so it must be quick
    coming       asked as often: whose weights may be brought while this run goes on; the same value as long as nothing
                 else is
    """

    on_step: Callable[[int, int], None]
    should_stop: Callable[[], bool]
    coming: Callable[[], Coming | None] = lambda: None


class Stopped(Exception):
    """A run ended at a step, tile or layer because it was asked to."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of several tasks that are run together: what a run of it alone would be given."""

    task: TaskSpec
    work: Work
    inputs: tuple[Result, ...]
    hooks: RunHooks


#: what a member comes to: a result with its share of the cost, or why there is none
Outcome: TypeAlias = tuple[Result, RunCost] | Exception


def role_of(work: Work) -> Role:
    """The component that `work` runs; of several text encoders the first."""
    match work:
        case EncodeWork():
            return Role.TEXT_ENCODER
        case SampleWork():
            return Role.DIFFUSION_MODEL_2 if work.low_noise else Role.DIFFUSION_MODEL
        case SeeImageWork():
            return Role.VISION_ENCODER
        case EncodeImageWork() | DecodeWork():
            return Role.VAE


_TEXT_ENCODERS = tuple(role for role in Role if role.is_text_encoder)


def roles_of(work: Work, count: int) -> tuple[Role, ...]:
    """The components that `work` runs, so many of them: text encoders in the order in which their texts follow each
    other, ControlNets after the diffusion model."""
    if isinstance(work, EncodeWork):
        return _TEXT_ENCODERS[:count]
    return (role_of(work), *[Role.CONTROLNET] * (count - 1))


def control_key(control: ControlRef) -> ComponentKey:
    """A ControlNet's name as a component, however it is used."""
    said = "".join(f"+{name}={value}" for name, value in control.said)
    return ComponentKey(f"{control.name}/controlnet@{control.sha256[:10]}{said}")


def component_key(name: str, role: Role, sha256: str) -> ComponentKey:
    """What a component with the content `sha256` is called, by the model `name` that had it first."""
    return ComponentKey(f"{name}/{role.value}@{sha256[:10]}")


def lora_key(lora: LoraRef) -> ComponentKey:
    """A LoRA's name as a component, whatever its strength."""
    return ComponentKey(f"{lora.name}/lora@{lora.sha256[:10]}")


def stage_of(work: Work) -> Stage:
    """The stage that `work` belongs to."""
    match work:
        case EncodeWork() | EncodeImageWork() | SeeImageWork():
            return Stage.ENCODE
        case SampleWork():
            return Stage.SAMPLE
        case DecodeWork():
            return Stage.DECODE


def together_key(work: Work, context_tokens: Sequence[int] = ()) -> str:
    """What works on the same weights must have in common to go through a module at once: all but texts and seeds. The
    model is among it: two that have equal components may read texts, noise and latents otherwise.

    `context_tokens` are the lengths of the texts that sampling reads. The same as a
    `pool.specs.spec.TaskSpec.together`.
    """
    match work:
        case EncodeWork():
            # texts that see images are as long as these are large
            return "" if work.seen else f"encode {_model_key(work)} {work.layers_skipped}"
        case SampleWork():
            lengths = ",".join(str(length) for length in context_tokens)
            how = f"{work.steps} {work.cfg!r} {work.guidance!r} {work.sampler} {work.schedule}"
            reads = f"{work.first_step} {work.starts:d}{work.masked:d}{work.told_hidden:d}{work.imaged:d}"
            reads += f" {work.reference} {work.more_references} {work.prior} {work.image_cfg!r} {work.noise_level}"
            reads += f" {work.image_noise!r} {work.motion} {work.elevation!r} {work.ends:d}"
            reads += f" {work.switch}{'low' if work.low_noise else ''} {work.follows:d}{work.leading}"
            reads += "".join(f" {region}" for region in work.regions)
            for c in work.controls:
                reads += f" {c.sha256} {c.strength!r} {c.start!r} {c.end!r} {c.mode}{c.said or ''}{c.hole or ''}"
            return f"sample {_model_key(work)} {_size_key(work)} {how} {lengths} {reads}"
        case EncodeImageWork() | SeeImageWork():
            return ""  # one image fills a device
        case DecodeWork():
            return f"decode {_model_key(work)} {_size_key(work)} {work.pastes:d}{work.leading}"


def _model_key(work: Work) -> str:
    return work.model.sha256[:16]


def _size_key(work: SampleWork | DecodeWork) -> str:
    return f"{work.width}x{work.height} {work.frames} {work.frame_rate!r} {work.seconds!r}"


def task_id(work: Work, needs: tuple[TaskId, ...]) -> TaskId:
    """A digest of all that the result depends on: the work (files by content, not by path or name) and its inputs."""
    content = {field.name: _without_places(getattr(work, field.name)) for field in dataclasses.fields(work)}
    text = json.dumps([type(work).__name__, content, needs], sort_keys=True, separators=(",", ":"))
    return TaskId(f"{stage_of(work).value}-{hashlib.sha256(text.encode()).hexdigest()[:20]}")


def _without_places(value: Any) -> Any:
    """A field of some work with the paths and names of files left out: a renamed copy of a file is the same file.

    Written out for the three kinds of file: this is done for every task that is asked for, and `dataclasses.asdict` of
    all of it takes three times as long."""
    if isinstance(value, ModelRef):
        return {"sha256": value.sha256}
    if isinstance(value, LoraRef):
        return {"sha256": value.sha256, "strength": value.strength}
    if isinstance(value, EmbeddingRef):
        return {"name": value.name, "sha256": value.sha256}
    if isinstance(value, ControlRef):
        more: dict[str, Any] = {} if value.mode is None else {"mode": value.mode}
        more |= {"said": value.said} if value.said else {}
        more |= {"hole": value.hole} if value.hole else {}
        return {"sha256": value.sha256, "strength": value.strength, "start": value.start, "end": value.end, **more}
    if isinstance(value, RegionWork):
        return [value.strength, value.box]
    if isinstance(value, tuple):
        return [_without_places(v) for v in value]
    return value
