"""Parameters of the stages: what one task computes, the hooks of a run, and the ids of tasks.

Values only; torch-free (numpy arrays carry results between processes). `StageParams` hold files and numbers, never
tensors, so that their digest identifies the result: equal tasks run once.

Shape legend: L tokens, D text width, V width of a pooled text, C channels, H W latent or pixel height and width, S
samples of audio.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, get_args

from modelpool.pool.values.core.encoded_videos import ControlVideo as ControlVideo
from modelpool.pool.values.core.encoded_videos import EncodedVideo, video_identity
from modelpool.pool.values.core.encoded_videos import FirstFrames as FirstFrames
from modelpool.pool.values.core.encoded_videos import VideoBeginning as VideoBeginning
from modelpool.pool.values.core.prompt_tokens import PromptTokens
from modelpool.pool.values.core.refs import ControlMaskMode as ControlMaskMode
from modelpool.pool.values.core.refs import ControlRef as ControlRef
from modelpool.pool.values.core.refs import EmbeddingRef as EmbeddingRef
from modelpool.pool.values.core.refs import FoundImagePrompt as FoundImagePrompt
from modelpool.pool.values.core.refs import GligenRef as GligenRef
from modelpool.pool.values.core.refs import ImagePromptRef as ImagePromptRef
from modelpool.pool.values.core.refs import LoraRef as LoraRef
from modelpool.pool.values.core.refs import ModelRef as ModelRef
from modelpool.pool.values.core.refs import UpscalerRef as UpscalerRef
from modelpool.pool.values.core.results import AudioSamples as AudioSamples
from modelpool.pool.values.core.results import DecodedTiles as DecodedTiles
from modelpool.pool.values.core.results import Encoded as Encoded
from modelpool.pool.values.core.results import FloatArray as FloatArray
from modelpool.pool.values.core.results import ImageEmbeds as ImageEmbeds
from modelpool.pool.values.core.results import ImagePixels as ImagePixels
from modelpool.pool.values.core.results import Latent as Latent
from modelpool.pool.values.core.results import Mask as Mask
from modelpool.pool.values.core.results import Output as Output
from modelpool.pool.values.core.results import PixelArray as PixelArray
from modelpool.pool.values.core.results import Result as Result
from modelpool.pool.values.core.results import RunState as RunState
from modelpool.pool.values.core.results import SamplerState as SamplerState
from modelpool.pool.values.core.results import VideoFrames as VideoFrames
from modelpool.pool.values.core.results import VideoMask as VideoMask
from modelpool.pool.values.core.run_options import NO_OPTIONS as NO_OPTIONS
from modelpool.pool.values.core.run_options import RunOptions as RunOptions
from modelpool.pool.values.core.sample_conditions import CAMERA_MOTIONS as CAMERA_MOTIONS
from modelpool.pool.values.core.sample_conditions import CameraCondition as CameraCondition
from modelpool.pool.values.core.sample_conditions import ControlVideoCondition as ControlVideoCondition
from modelpool.pool.values.core.sample_conditions import FaceCondition as FaceCondition
from modelpool.pool.values.core.sample_conditions import GuideCondition as GuideCondition
from modelpool.pool.values.core.sample_conditions import ImageCondition as ImageCondition
from modelpool.pool.values.core.sample_conditions import KeptSoundCondition as KeptSoundCondition
from modelpool.pool.values.core.sample_conditions import MaskCondition as MaskCondition
from modelpool.pool.values.core.sample_conditions import MaskedImageCondition as MaskedImageCondition
from modelpool.pool.values.core.sample_conditions import PriorCondition as PriorCondition
from modelpool.pool.values.core.sample_conditions import ReferenceCondition as ReferenceCondition
from modelpool.pool.values.core.sample_conditions import RegionParams as RegionParams
from modelpool.pool.values.core.sample_conditions import SampleCondition as SampleCondition
from modelpool.pool.values.core.sample_conditions import SeenImages as SeenImages
from modelpool.pool.values.core.sample_conditions import StartCondition as StartCondition
from modelpool.pool.values.core.sample_conditions import TracksCondition as TracksCondition
from modelpool.pool.values.core.sample_conditions import ViewCondition as ViewCondition
from modelpool.pool.values.core.sample_conditions import VoiceCondition as VoiceCondition
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.written_tokens import WrittenTokens
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import ComponentKey, Role, RunCost, Stage, TaskId, TaskSpec
from modelpool.pool.values.specs.wire_value import WireValue, evolve

#: a setting of an operation
SettingValue: TypeAlias = bool | int | float | str | tuple[float, ...]
#: ending of the names of samplers that read the prediction without guidance (CFG++)
UNGUIDED_SAMPLERS = "_cfg_pp"


@dataclass(frozen=True, slots=True)
class EncodeParams(WireValue):
    """Encode one text with its prompt weights. Result: `Encoded`. Reads "image.N", the `ImageEmbeds` of each reference
    image that the text encoder reads.

    layers_skipped  last CLIP layers to skip, in addition to those that the family skips
    is_negative     it is a negative prompt: some families use another template
    embeddings      textual inversions that the text names
    seen            width and height in which each reference image was encoded
    numbered        the text refers to the images by number
    writes          the tokens of an image that the last text encoder of some families writes for the text; None: none,
                    and it does not run
    lyrics          it is the text of lyrics, which the text encoder reads in another way
    pooled          the result has the pooled text of a CLIP without projection, also where the model reads none
    batch_size      as in `SampleParams`, for texts that are read as the empty text is
    tokens          of the text, for each text encoder in order; empty if it is not tokenized yet. They follow from the
                    text, so they are not part of the identity
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
    writes: WrittenTokens | None = None
    lyrics: bool = False
    pooled: bool = False
    batch_size: int = 0
    tokens: tuple[PromptTokens, ...] = field(default=(), compare=False, repr=False)

    @property
    def measured_apart(self) -> tuple[str, ...]:
        """As `SampleParams.measured_apart`: writing needs more than reading."""
        return () if self.writes is None else ("writes",)


@dataclass(frozen=True, slots=True)
class OutputShape(WireValue):
    """The size of an output.

    width, height  in pixels; 0 for audio
    frames      of a video; 0 for an image or audio
    frame_rate  its frames per second
    seconds     of audio; 0 for an image or a video
    leading     extra temporal cells of the latent at the start, for reference images
    """

    width: int
    height: int
    frames: int = 0
    frame_rate: float = 0.0
    seconds: float = 0.0
    leading: int = 0


@dataclass(frozen=True, slots=True)
class SamplingSchedule(WireValue):
    """The steps of a run.

    sampler, noise_schedule  by name
    first_step  steps skipped at the start of the schedule (denoising strength)
    switch      two experts: step at which the low-noise expert continues from the state of the other; 0 for a single
                model
    low_noise   run of the low-noise expert; with `switch` it reads "sampler_state"
    eta         share of the noise that is drawn again in each step; None is the sampler's default
    s_noise     factor of the noise that is drawn in steps
    s_churn     noise added before steps of Euler, Heun, DPM2 and DDIM
    sigmas      listed noise levels, one for each step; () if they follow from `noise_schedule`
    shift       of the noise levels, instead of the model's; 0 for the model's
    settings    of `noise_schedule` by name, where they are not its defaults
    """

    steps: int
    sampler: str
    noise_schedule: str
    first_step: int = 0
    switch: int = 0
    low_noise: bool = False
    eta: float | None = None
    s_noise: float = 1.0
    s_churn: float = 0.0
    sigmas: tuple[float, ...] = ()
    shift: float = 0.0
    settings: tuple[tuple[str, float], ...] = ()

    @property
    def reads_unguided(self) -> bool:
        """Its sampler reads the prediction without guidance (CFG++)."""
        return self.sampler.endswith(UNGUIDED_SAMPLERS)

    @property
    def resumes(self) -> bool:
        """It resumes from the `SamplerState` of the other expert."""
        return self.low_noise and self.switch > 0


@dataclass(frozen=True, slots=True)
class StepPart(WireValue):
    """The part of the steps that one of several sampling runs does, where it is not the rest of the schedule on a
    noised latent.

    last_step    the run ends when so many steps of the schedule are done; 0 for all
    adds_noise   noise is added to the start latent; else it has the noise that the run before has left
    keeps_noise  the result has the noise of the level at which the run ends; else its last step removes all noise
    """

    last_step: int = 0
    adds_noise: bool = True
    keeps_noise: bool = False


@dataclass(frozen=True, slots=True)
class GuidanceParams(WireValue):
    """The guidance of a run.

    cfg        guidance scale; 1 for none, then the negative prompt is not read
    distilled  guidance input of a distilled model; `cfg` is then 1
    image_cfg  guidance scale of the image, 1 for none; 0 for models that are not guided by the image
    of_prompt  the prediction without the image is for the prompt, instead of the negative prompt
    nested     it scales the way from the prediction without the image to the result of the guidance by text, whatever
               that is; else the way to the prediction for the negative prompt
    """

    cfg: float
    distilled: float = 0.0
    image_cfg: float = 0.0
    of_prompt: bool = False
    nested: bool = False

    @property
    def without_image(self) -> bool:
        """The model is also evaluated without the image (guidance by text and image)."""
        return self.cfg != 1 and self.image_cfg not in (0, 1)


_Kind = TypeVar("_Kind", bound=SampleCondition)


@dataclass(frozen=True, slots=True)
class SampleParams(WireValue):
    """Denoise one latent. Result: `Latent`.

    Reads by name (`pool.values.core.task_inputs`): "positive", "negative" if `reads_negative` and the model reads one,
    "without_images" if the negative text names images and there is a prediction without them, "lyrics" for models that
    read them, "image_embeds" for models with a vision encoder (instead of texts if the model reads none),
    "sampler_state" if it resumes from another expert, and what `conditions` names
    (`pool.values.core.sample_conditions`).

    shape        of the output; the result drops the leading cells of a control video
    options      extensions of guidance and model, and caches (`pool.values.core.run_options`)
    batch_size   images of the forward passes that compute it; missing ones are padded. 0 is any number. The last bits
                 of a result depend on it, and on nothing else of the other images
    gpus         GPUs that share its run; `ANY_GPUS` is as many as the scheduler chooses, 0 is one. Unless it is 0, the
                 model is called for each text by itself on every number of GPUs, and the last bits depend on the number
    part         of the steps, for one of several runs; None: all from the first step on
    """

    model: ModelRef
    #: only those LoRAs that touch the diffusion model
    loras: tuple[LoraRef, ...]
    shape: OutputShape
    schedule: SamplingSchedule
    guidance: GuidanceParams
    seed: int
    conditions: tuple[SampleCondition, ...] = ()
    options: RunOptions = NO_OPTIONS
    batch_size: int = 0
    gpus: int = 0
    part: StepPart | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Start and end step within the schedule."""
        schedule = self.schedule
        if schedule.resumes:
            return schedule.switch, schedule.steps
        last_step = 0 if self.part is None else self.part.last_step
        return schedule.first_step, schedule.switch or last_step or schedule.steps

    @property
    def steps_run(self) -> int:
        """Number of steps that run."""
        begin, end = self.span
        return end - begin

    def all_of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Return the conditions of one kind, in order."""
        return tuple([one for one in self.conditions if isinstance(one, kind)]) if self.conditions else ()

    def has(self, kind: type[SampleCondition]) -> bool:
        """Return whether there is a condition of this kind."""
        return any(isinstance(one, kind) for one in self.conditions)

    @property
    def image(self) -> ImageCondition | None:
        """The image that the model reads, if any."""
        return next(iter(self.all_of(ImageCondition)), None)

    @property
    def image_numbers(self) -> ImageCondition:
        """The numbers of the image that the model reads; the defaults if it reads none."""
        return self.image or ImageCondition()

    @property
    def guides(self) -> tuple[GuideCondition, ...]:
        """The images that guide a video."""
        return self.all_of(GuideCondition)

    @property
    def regions(self) -> tuple[RegionParams, ...]:
        """Regions with prompts of their own."""
        return self.all_of(RegionParams)

    @property
    def controls(self) -> tuple[ControlRef, ...]:
        """The ControlNets."""
        return self.all_of(ControlRef)

    @property
    def image_prompts(self) -> tuple[ImagePromptRef, ...]:
        """The image prompts."""
        return self.all_of(ImagePromptRef)

    @property
    def gligen(self) -> GligenRef | None:
        """The GLIGEN model with its boxes, if any."""
        return next(iter(self.all_of(GligenRef)), None)

    @property
    def references(self) -> tuple[ReferenceCondition, ...]:
        """The reference images."""
        return self.all_of(ReferenceCondition)

    @property
    def prior(self) -> PriorCondition | None:
        """The prior's latent, if this is a second stage."""
        return next(iter(self.all_of(PriorCondition)), None)

    @property
    def reads_mask(self) -> bool:
        """It reads an inpaint `Mask`."""
        return self.has(MaskCondition) or self.has(MaskedImageCondition)

    @property
    def texts(self) -> int:
        """Texts for which the model is evaluated in each step."""
        own = 2 if self.reads_negative else 1
        return own + len(self.regions) + self.guidance.without_image

    @property
    def measured_apart(self) -> tuple[str, ...]:
        """Names of what makes its activations differ from a plain run's, for corrections of estimates: its
        options, and LoRAs for some texts, which are then predicted apart."""
        has_text_loras = any(lora.only for lora in self.loras)
        return (*self.options.names, *(("loras.only",) if has_text_loras else ()))

    @property
    def predictions(self) -> int:
        """Predictions of all steps, each for one text."""
        guided = sum(voice.scale > 0 for voice in self.all_of(VoiceCondition))
        return self.steps_run * (self.texts + self.options.extra_predictions + guided)

    @property
    def reads_negative(self) -> bool:
        """It reads the negative prompt: with guidance, and with a sampler that reads the prediction without guidance
        for its noise."""
        return self.guidance.cfg != 1 or self.schedule.reads_unguided

    @property
    def leading_kept(self) -> int:
        """The leading cells that the result keeps: it is decoded with them."""
        return 0 if self.has(ControlVideoCondition) or self.guides else self.shape.leading


@dataclass(frozen=True, slots=True)
class EncodeImageParams:
    """Encode pixels to a latent with the VAE. Result: `Latent`.

    Reads "image", which is scaled and cropped to this size.

    hides    also reads "mask"; masked pixels become grey, or black with `black`
    noise    standard deviation of noise of `seed` on the pixels, which are in [-1, 1]
    bright   the VAE reads pixels from 0.5 to 128 instead, as the edge ControlNet of Stable Diffusion 3.5 was trained
    seconds  encodes this many seconds of "audio" instead, with the samples and channels of the VAE
    video    encodes a video of this kind instead
    sound    encodes "audio" instead, as the audio track of a video, with so many positions: a longer track is cut off,
             silence follows a shorter one
    """

    model: ModelRef
    width: int
    height: int
    hides: bool = False
    noise: float = 0.0
    seed: int = 0
    bright: bool = False
    black: bool = False
    seconds: float = 0.0
    video: EncodedVideo | None = None
    sound: int = 0

    @property
    def frames(self) -> int:
        """The frames of the video; 0 for an image or audio."""
        return 0 if self.video is None else self.video.frames


@dataclass(frozen=True, slots=True)
class VisionEncodeParams:
    """Encode `images` images with a vision encoder. Result: `ImageEmbeds`, the states concatenated.

    Reads "image.N", of any size, for each; if there are fewer, the last one is repeated, and if there is none, black is
    used. An encoder that keeps the aspect ratio takes one image, resized to this width and height.

    use    the output that is read (a value of `pool.values.core.sampling_facts.VisionEncoderUse`); empty: what `model`
           reads
    blank  encodes no image: zeros after the normalisation
    """

    model: ModelRef
    images: int = 1
    width: int = 0
    height: int = 0
    use: str = ""
    blank: bool = False


#: larger images are decoded one by one. Measured on a CPU, eight at a time make 1.94 times as many at 64x64, 1.12 times
#: at 128x128, and 0.76 times at 256x256 (benchmarks/RESULTS.md, batching of tasks)
MAX_PASS_DECODE_PIXELS = 128 * 128
#: parts of a video with an audio track that are decoded alone
FRAMES, SOUND = "frames", "sound"


@dataclass(frozen=True, slots=True)
class DecodeParams(WireValue):
    """Decode a latent. Result: `ImagePixels`, with frames a `VideoFrames`, with seconds an `AudioSamples` of that
    length.

    Reads "latent", of this shape (audio may be longer), and with `pastes` "image", which the result keeps outside of
    "mask".

    batch_size   as in `SampleParams`, for images that `gains_in_passes`
    tile         edge of the tiles of the VAE in pixels; 0: the image is one tile, if memory allows it
    tile_frames  frames of a tile of a video; 0: all
    parts        number of tasks that compute the tiles; 0: this one computes them all
    part         which of them this one is, from 1: its result is `DecodedTiles`. 0 with `parts`: it reads "tiles.N" of
                 each part instead of "latent", and joins them. It needs no weights
    track        what is decoded of a video with an audio track: FRAMES or SOUND alone, "" for both. SOUND makes
                 `AudioSamples`
    """

    model: ModelRef
    shape: OutputShape
    pastes: bool = False
    batch_size: int = 0
    tile: int = 0
    tile_frames: int = 0
    parts: int = 0
    part: int = 0
    track: str = field(default="", repr=False)

    @property
    def gains_in_passes(self) -> bool:
        """Whether decodes of several such images take less time together than one by one: the VAE of an image that is
        not small fills a device. A decode alone needs no padding either when its image has left a pass before the
        others."""
        is_image = not (self.shape.frames or self.shape.seconds or self.is_tiled or self.parts)
        return is_image and self.shape.width * self.shape.height <= MAX_PASS_DECODE_PIXELS

    @property
    def is_tiled(self) -> bool:
        """Whether its tiles are a property of the request, and so of the result."""
        return bool(self.tile or self.tile_frames)

    @property
    def joins(self) -> bool:
        """Whether it joins the tiles that other tasks have computed."""
        return self.parts > 0 and self.part == 0

    @property
    def measured_apart(self) -> tuple[str, ...]:
        """As `SampleParams.measured_apart`: a tile has other tensors than an image of its size in a larger run."""
        return ("tiles",) if self.is_tiled else (self.track,) if self.track else ()


@dataclass(frozen=True, slots=True)
class UpscaleParams(WireValue):
    """Enlarge an image of this width and height with an upscaler, then scale the result to `out_width` by `out_height`.
    Result: `ImagePixels`; `VideoFrames` for a video of `frames`; `Latent` with `vae`.

    Reads "image"; with `vae` "latent".

    tile     edge of the tiles in pixels of the image; 0 is one tile if memory allows it
    overlap  of neighbouring tiles, in pixels of the image; 0 is the default of `pool.inference.upscalers.upscale`
    vae      model of the latents that are enlarged, with sizes in cells; None for an image
    """

    model: UpscalerRef
    width: int
    height: int
    out_width: int
    out_height: int
    frames: int = 0
    tile: int = 0
    overlap: int = 0
    vae: ModelRef | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class OperationParams(WireValue):
    """Change results without a model, on the CPU: one of `pool.inference.operations`. Result: of the kind that the
    operation makes.

    Reads the inputs of the operation by its names for them.

    name      of the operation
    settings  by name, sorted; checked by the operation
    """

    name: str
    settings: tuple[tuple[str, SettingValue], ...] = ()


#: what a component of a checkpoint computes
ModelStageParams: TypeAlias = EncodeParams | EncodeImageParams | VisionEncodeParams | SampleParams | DecodeParams
StageParams: TypeAlias = ModelStageParams | UpscaleParams | OperationParams


@dataclass(frozen=True, slots=True, eq=False)
class PreloadRequest:
    """Tasks expected after the current run, with weights that may be preloaded during it, one task after the other.
    Compared by identity.

    needed_next  components expected to be needed after the run, soonest first
    kept         components that may not be evicted for it
    """

    tasks: tuple[tuple[TaskSpec, StageParams], ...]
    needed_next: tuple[ComponentKey, ...] = ()
    kept: tuple[ComponentKey, ...] = ()


@dataclass(frozen=True, slots=True)
class RunHooks:
    """Callbacks of a run.

    on_step          called after each step with (steps done, total steps)
    should_stop      called at each step and tile, and every few milliseconds at layers; True ends the run with
                     `Stopped`. Called in the thread of the run, so it must be fast
    preload_request  called as often: the tasks to preload during the run; the same value until it changes
    should_pause     called between the steps of a sampling run; True ends it there with a `RunState` for each task as
                     its result. A run that has not begun ends with `Stopped`; other stages ignore it
    checkpoint       called between the steps of a sampling run with a function that returns the `RunState` of each
                     task at that step; the call of this function copies them from the device
    preview          called after each prediction of a sampling run with a function that returns the clean latent that
                     was predicted for each task, of a video its middle frame; the call of this function copies them
                     from the device. None: nobody can want previews of the run
    """

    on_step: Callable[[int, int], None]
    should_stop: Callable[[], bool]
    preload_request: Callable[[], PreloadRequest | None] = lambda: None
    should_pause: Callable[[], bool] = lambda: False
    checkpoint: Callable[[Callable[[], Sequence[RunState]]], None] = lambda states: None
    preview: Callable[[Callable[[], Sequence[FloatArray]]], None] | None = None


class Stopped(Exception):
    """A run was stopped on request at a step, tile or layer."""


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One task of a batched run, with the arguments that a run of it alone would get.

    resume  the state that it resumes from; None starts from the beginning. Members at different steps run separately
    gang    the workers that share the run; such a task is in no batch with others
    """

    task: TaskSpec
    work: StageParams
    inputs: Mapping[str, Result]
    hooks: RunHooks
    resume: RunState | None = None
    gang: Gang | None = None


#: outcome of a member: the result with its share of the cost, or the error
Outcome: TypeAlias = tuple[Result, RunCost] | Exception


def role_of(work: StageParams) -> Role:
    """Return the component that `work` runs; of several text encoders the first."""
    match work:
        case EncodeParams():
            return Role.TEXT_ENCODER
        case SampleParams():
            return Role.DIFFUSION_MODEL_2 if work.schedule.low_noise else Role.DIFFUSION_MODEL
        case VisionEncodeParams():
            return Role.VISION_ENCODER
        case EncodeImageParams() | DecodeParams():
            return Role.VAE
        case UpscaleParams():
            return Role.UPSCALER
        case OperationParams():
            raise AssertionError(f"operation {work.name!r} runs no component")


_TEXT_ENCODERS = tuple(role for role in Role if role.is_text_encoder)


def encoders_run(work: EncodeParams, encoders: Sequence[Role], facts: SamplingFacts) -> tuple[Role, ...]:
    """Return the text `encoders` of a model of `facts` that `work` runs, in order: the last one, if it writes
    tokens of images, only for that."""
    return tuple(encoders[:-1] if facts.writes_tokens and work.writes is None else encoders)


def roles_of(work: StageParams, count: int) -> tuple[Role, ...]:
    """Return the `count` components that `work` runs: text encoders in the order of their outputs, ControlNets after
    the diffusion model, then image prompt adapters, then a GLIGEN model."""
    if isinstance(work, EncodeParams):
        return _TEXT_ENCODERS[:count]
    if isinstance(work, OperationParams) or (isinstance(work, DecodeParams) and work.joins):
        return ()
    if isinstance(work, UpscaleParams):
        return (Role.UPSCALER, Role.VAE)[:count]
    adapters = len({prompt.content for prompt in work.image_prompts}) if isinstance(work, SampleParams) else 0
    gligen = (Role.GLIGEN,) if isinstance(work, SampleParams) and work.has(GligenRef) else ()
    controls = count - 1 - adapters - len(gligen)
    return (role_of(work), *[Role.CONTROLNET] * controls, *[Role.IMAGE_PROMPT] * adapters, *gligen)


def control_key(control: ControlRef) -> ComponentKey:
    """Component key of a ControlNet, independent of its use."""
    overrides = "".join(f"+{name}={value}" for name, value in control.config_overrides)
    return ComponentKey(f"{control.name}/controlnet@{control.sha256[:10]}{overrides}")


def upscaler_key(upscaler: UpscalerRef) -> ComponentKey:
    """Component key of an upscaler."""
    return component_key(upscaler.name, Role.UPSCALER, upscaler.sha256)


def image_prompt_key(prompt: ImagePromptRef) -> ComponentKey:
    """Component key of an image prompt adapter, independent of its use."""
    return ComponentKey(f"{prompt.name}/{Role.IMAGE_PROMPT.value}@{prompt.sha256[:10]}")


def gligen_key(gligen: GligenRef) -> ComponentKey:
    """Component key of a GLIGEN model, independent of its boxes."""
    return component_key(gligen.name, Role.GLIGEN, gligen.sha256)


def component_key(name: str, role: Role, sha256: str) -> ComponentKey:
    """Component key for the content `sha256`, named after the first model `name` that has it."""
    return ComponentKey(f"{name}/{role.value}@{sha256[:10]}")


def lora_key(lora: LoraRef) -> ComponentKey:
    """Component key of a LoRA, independent of its strength."""
    return ComponentKey(f"{lora.name}/lora@{lora.sha256[:10]}")


def embedding_key(embedding: EmbeddingRef) -> ComponentKey:
    """Component key of a textual inversion."""
    return ComponentKey(f"{embedding.name}/embedding@{embedding.sha256[:10]}")


def stage_of(work: StageParams) -> Stage:
    """Return the stage of `work`."""
    match work:
        case EncodeParams() | EncodeImageParams() | VisionEncodeParams():
            return Stage.ENCODE
        case SampleParams():
            return Stage.SAMPLE
        case DecodeParams() | UpscaleParams():
            return Stage.DECODE
        case OperationParams():
            return Stage.OPERATE


#: fields in which the tasks of one batch may differ. Every other field separates tasks: a field that is forgotten here
#: makes runs smaller, never wrong
_VARYING: Mapping[type[StageParams], frozenset[str]] = MappingProxyType(
    {
        EncodeParams: frozenset({"text", "is_negative", "embeddings"}),
        SampleParams: frozenset({"seed"}),
        DecodeParams: frozenset(),
        UpscaleParams: frozenset(),
    }
)
#: the names of all fields of the identity by class, and of fields that tasks of one batch share. Not among these are
#: the batch size, the part of the steps and `pooled`, which have places of their own in the key, nor the GPUs of a run
#: and the tiles of a decode, which have no key with them
_FIELDS: Mapping[type[StageParams], tuple[str, ...]] = MappingProxyType(
    {kind: tuple(one.name for one in dataclasses.fields(kind) if one.compare) for kind in get_args(StageParams)}
)
_APART: Mapping[type[StageParams], frozenset[str]] = MappingProxyType(
    {
        EncodeParams: frozenset({"pooled", "batch_size"}),
        SampleParams: frozenset({"batch_size", "gpus", "part"}),
        DecodeParams: frozenset({"batch_size", "tile", "tile_frames", "parts", "part", "track"}),
        UpscaleParams: frozenset({"vae"}),
    }
)
_SHARED: Mapping[type[StageParams], tuple[str, ...]] = MappingProxyType(
    {
        kind: tuple(name for name in _FIELDS[kind] if name not in varying | _APART.get(kind, frozenset()))
        for kind, varying in _VARYING.items()
    }
)
#: the names of the fields of the parts of parameters; references to files are written out in `_without_places`
_PARTS: Mapping[type[Any], tuple[str, ...]] = MappingProxyType(
    {
        kind: tuple(one.name for one in dataclasses.fields(kind))
        for kind in (OutputShape, SamplingSchedule, StepPart, GuidanceParams, WrittenTokens, *get_args(SampleCondition))
        if kind not in (ControlRef, ImagePromptRef, GligenRef)
    }
)
#: fields that were added later, with an empty default
_LATER_FIELDS: Mapping[type[StageParams], frozenset[str]] = MappingProxyType(
    {
        EncodeParams: frozenset({"writes", "lyrics", "pooled", "batch_size"}),
        VisionEncodeParams: frozenset({"use", "blank"}),
        EncodeImageParams: frozenset({"seconds", "sound"}),
        SampleParams: frozenset({"batch_size", "gpus", "part"}),
        DecodeParams: frozenset({"batch_size", "tile", "tile_frames", "parts", "part", "track"}),
        UpscaleParams: frozenset({"vae"}),
    }
)
#: the same of parts of parameters
_LATER_OF_PARTS: Mapping[type[Any], frozenset[str]] = MappingProxyType(
    {
        SamplingSchedule: frozenset({"shift", "settings"}),
        ImageCondition: frozenset({"frames"}),
        GuidanceParams: frozenset({"of_prompt", "nested"}),
        GuideCondition: frozenset({"cells", "factor"}),
    }
)
#: the sampler with step lengths that follow from the images
ADAPTIVE_SAMPLER = "dpm_adaptive"
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_json_text = json.encoder.encode_basestring_ascii


def why_alone(work: StageParams) -> str:
    """Return why `work` runs alone always, for users; "" if tasks like it may share a forward pass."""
    match work:
        case EncodeParams() if work.seen:
            return "the length of texts with images depends on the sizes of the images"
        case EncodeParams() if work.writes is not None:
            return "kernels round differently at another batch size, which would change the drawn tokens"
        case SampleParams() if work.schedule.sampler == ADAPTIVE_SAMPLER:
            return f"the steps of sampler {ADAPTIVE_SAMPLER} follow from the error of all images of a run"
        case SampleParams() if work.gpus:
            return "several GPUs may share its run"
        case SampleParams() if work.options.skips_by_content:
            return "the steps that its cache skips follow from all images of a run"
        case VisionEncodeParams() | EncodeImageParams():
            return "one image fills a device"
        case DecodeParams() if work.is_tiled or work.parts or work.part:
            return "one tile fills a device"
        case UpscaleParams() if work.vae is not None:
            return "one latent fills a device"
        case OperationParams():
            return "it runs on the CPU"
    return ""


def batch_key(work: StageParams, context_tokens: Sequence[int] = ()) -> str:
    """Return the key that tasks on the same weights must share to run as one batch: a digest of everything except texts
    and seeds.

    The model is part of it: models with equal components may differ in text encoding, noise and latents.
    `context_tokens` are the lengths of the texts that sampling reads. Same as
    `pool.values.specs.spec.TaskSpec.together`. Empty: never batched.
    """
    shared = _SHARED.get(type(work))
    if shared is None or why_alone(work):
        return ""
    # not JSON: this runs for every requested task, and takes a third of the time
    text = repr(([_without_places(getattr(work, name)) for name in shared], tuple(context_tokens)))
    size = work.batch_size if isinstance(work, (EncodeParams, SampleParams, DecodeParams)) else 0
    if isinstance(work, SampleParams) and work.part is not None:
        text += repr(_without_places(work.part))
    if isinstance(work, DecodeParams):
        text += work.track
    if isinstance(work, EncodeParams):
        text += "pooled" * work.pooled
        if size:  # negative prompts may have another template, of another length
            text += "negative" * work.is_negative
    return f"{stage_of(work).value} {_digest(text)[:16]}{f' {size}' if size else ''}"


def task_id(work: StageParams, needs: Mapping[str, TaskId]) -> TaskId:
    """Return a digest of everything that the result depends on: the parameters (files by content, not by path or name)
    and the inputs by name."""
    return _id_of_text(stage_of(work), _JSON.encode([type(work).__name__, _identity(work), dict(needs)]))


@dataclass(frozen=True, slots=True)
class TaskIdTemplate:
    """The text of the id of a task, for the ids of tasks that differ from it in nothing but their seed and inputs.

    before, after   the text around the seed, up to the inputs; `after` is None if the parameters have no seed
    """

    stage: Stage
    before: str
    after: str | None

    @classmethod
    def of(cls, work: StageParams) -> TaskIdTemplate:
        """Return the template of `work`."""
        identity = _identity(work)
        if has_seed := "seed" in identity:
            identity["seed"] = _NO_SEED
        elif has_seed := "writes" in identity:
            identity["writes"] = [*identity["writes"][:-1], _NO_SEED]  # the seed is its last field
        text = _JSON.encode([type(work).__name__, identity])[:-1]
        # no other place has this text: quotes within values are escaped
        before, _, after = text.partition(_JSON.encode(_NO_SEED)) if has_seed else (text, "", None)
        return cls(stage_of(work), before, after)

    def task_id(self, seed: int, needs: Mapping[str, TaskId]) -> TaskId:
        """Return what `task_id` returns for the parameters with this seed, if they have one, and these inputs."""
        seeded = "" if self.after is None else f"{seed}{self.after}"
        # as _JSON writes it, which takes three times as long
        inputs = ",".join([f"{_json_text(name)}:{_json_text(need)}" for name, need in sorted(needs.items())])
        return _id_of_text(self.stage, f"{self.before}{seeded},{{{inputs}}}]")


def seed_of(work: StageParams) -> int:
    """Return the seed of `work`; 0 if it draws nothing."""
    if isinstance(work, EncodeParams):
        return 0 if work.writes is None else work.writes.seed
    return work.seed if isinstance(work, (SampleParams, EncodeImageParams)) else 0


def draws(work: StageParams) -> bool:
    """Return whether the result of `work` depends on a seed."""
    if isinstance(work, EncodeParams):
        return work.writes is not None
    return isinstance(work, SampleParams) or (isinstance(work, EncodeImageParams) and work.noise > 0)


def with_seed(work: StageParams, seed: int) -> StageParams:
    """Return `work`, which draws something, with this seed."""
    if isinstance(work, EncodeParams):
        assert work.writes is not None, f"{work} draws nothing"
        return evolve(work, writes=evolve(work.writes, seed=seed))
    assert isinstance(work, SampleParams | EncodeImageParams), f"{work} draws nothing"
    return evolve(work, seed=seed)


#: kinds of values that have no parts
_PLAIN_KINDS: frozenset[type] = frozenset({str, int, float, bool})
#: stands for the seed in a template; no parameter has such a value
_NO_SEED = {"seed of": "a template"}
_NONE_LATER: frozenset[str] = frozenset()


def _identity(work: StageParams) -> dict[str, Any]:
    content: dict[str, Any] = {}
    later = _LATER_FIELDS.get(type(work), _NONE_LATER)
    for name in _FIELDS[type(work)]:
        value = getattr(work, name)
        if type(value) not in _PLAIN_KINDS and value is not None:
            value = _without_places(value)
        if value or name not in later:  # ids without later fields are what they were
            content[name] = value
    if isinstance(work, EncodeImageParams):
        content |= video_identity(content.pop("video"))
    return content


def _id_of_text(stage: Stage, text: str) -> TaskId:
    return TaskId(f"{stage.value}-{_digest(text)[:20]}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_places(value: Any) -> Any:
    """A field value without names and paths of files: a renamed copy of a file is the same file.

    Written out for each kind of file, and the most frequent kinds first: it runs for every requested task, and
    `dataclasses.asdict` takes three times as long."""
    if (kind := type(value)) in _PLAIN_KINDS or value is None:
        return value
    if kind is tuple:
        return [_without_places(v) for v in value] if value else []
    if value is NO_OPTIONS:
        return {}
    if isinstance(value, (ModelRef, UpscalerRef)):
        return {"sha256": value.sha256}
    if isinstance(value, LoraRef):
        found: dict[str, Any] = {"sha256": value.sha256, "strength": value.strength}
        found |= {} if value.text_strength is None else {"text_strength": value.text_strength}
        found |= {"start": value.start, "end": value.end} if value.has_span else {}
        found |= {"blocks": value.blocks} if value.blocks else {}
        found |= {"keyframes": value.keyframes, "interpolation": value.interpolation} if value.keyframes else {}
        found |= {"merge": value.merge} if value.merge else {}
        return found | ({"only": value.only} if value.only else {})
    if isinstance(value, EmbeddingRef):
        return {"name": value.name, "sha256": value.sha256}
    if isinstance(value, ControlRef):
        more: dict[str, Any] = {} if value.mode is None else {"mode": value.mode}
        more |= {"config_overrides": value.config_overrides} if value.config_overrides else {}
        more |= {"mask_mode": value.mask_mode} if value.mask_mode else {}
        more |= {"by_noise": True} if value.by_noise else {}
        return {"sha256": value.sha256, "strength": value.strength, "start": value.start, "end": value.end, **more}
    if isinstance(value, ImagePromptRef):
        found = {"sha256": value.sha256, "strength": value.strength, "start": value.start, "end": value.end}
        found |= {"images": value.images, "blocks": value.blocks}
        found |= {"masks": value.masks} if value.masks else {}
        found |= {"by_noise": True} if value.by_noise else {}
        return found | ({"face_version": value.face_version} if value.face_version else {})
    if isinstance(value, GligenRef):
        return {"sha256": value.sha256, "boxes": value.boxes, "end": value.end}
    if (names := _PARTS.get(kind)) is not None:
        if (later := _LATER_OF_PARTS.get(kind)) is not None:  # ids without later fields are what they were
            names = tuple(name for name in names if name not in later or getattr(value, name))
        return [kind.__name__, *[_without_places(getattr(value, name)) for name in names]]
    if isinstance(value, tuple):
        return [_without_places(v) for v in value]
    if isinstance(value, RunOptions):
        return value.settings()
    return value
