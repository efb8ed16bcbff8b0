"""Facts about how a diffusion model samples: prediction type, noise, guidance, conditioning and defaults. Torch-free.

The modules of `pool.families.definitions` have the values of each family; `pool.inference` uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from modelpool.pool.values.core.sequence_plan import SequencePlan
from modelpool.pool.values.core.shift_by_size import ExponentByRoot as ExponentByRoot
from modelpool.pool.values.core.shift_by_size import ShiftByRoot as ShiftByRoot
from modelpool.pool.values.core.shift_by_size import ShiftBySize as ShiftBySize
from modelpool.pool.values.core.shift_by_size import ShiftBySizeAndSteps as ShiftBySizeAndSteps

if TYPE_CHECKING:
    from modelpool.pool.values.core.family_facts import LatentFacts


class Prediction(Enum):
    """Prediction type of a diffusion model (`pool.inference.sampling.predictions`)."""

    NOISE = "noise"
    VELOCITY = "velocity"
    #: the clean latent minus the skip part of the noisy one (EDM preconditioning): velocity with the opposite sign
    EDM = "EDM"
    #: noise minus clean latent: the direction of the straight line between them (rectified flow)
    FLOW = "flow"
    #: the clean latent itself
    CLEAN = "clean latent"


class NoiseKind(Enum):
    """Noise levels that a diffusion model was trained with (`pool.inference.sampling.schedules`)."""

    #: the 1000 levels of Stable Diffusion 1, 2 and XL
    SCALED_LINEAR = "scaled linear"
    #: the same, rescaled so that the last level is pure noise: zero terminal SNR
    ZERO_TERMINAL = "zero terminal SNR"
    #: as the first, but the betas rise linearly instead of their square roots
    LINEAR = "linear"
    #: continuous between two bounds; the model input is their logarithm
    EDM = "EDM"
    #: as EDM, but the model input is the arc tangent of the noise level, in right angles
    ANGLE = "angle"
    #: noise fraction from 0 to 1, the rest is the image; the model input is that fraction
    FLOW = "flow"
    #: the image fraction follows a cosine from 0 to a right angle; the model input is the position, 0 to 1
    COSINE = "cosine"


class MicroConditioning(Enum):
    """Micro-conditioning of a UNet: pooled text and numbers about the image (SDXL)."""

    NONE = "none"
    #: original size, crop offset, target size; each as height and width
    SIZES = "sizes"
    #: size, crop offset and aesthetic score
    AESTHETICS = "aesthetics"


@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """The noise that a diffusion model was trained with.

    sigma_min, sigma_max  bounds of the levels if they are not from a table; for a flow with ratios as levels, bounds
                          of the noise relative to the image. Of zero terminal SNR, `sigma_max` is the number in place
                          of the infinite last level; 0 is the usual one
    sigma_data            standard deviation of clean latents that the model's input and output are scaled for
    beta_start, beta_end  of a table: variance added by the first and the last level
    shift                 of a flow: above 1, more steps at high noise; 1 is uniform. Of zero terminal SNR: factor of
                          the variances of the noise, before the rescaling
    shift_by_size         of a flow: the shift depends on the image size; `shift` is then not read
    last_share            of a flow: noise fraction before the last step; 0 keeps the schedule's
    """

    kind: NoiseKind = NoiseKind.SCALED_LINEAR
    sigma_min: float = 0.0
    sigma_max: float = 0.0
    sigma_data: float = 1.0
    beta_start: float = 0.00085
    beta_end: float = 0.012
    shift: float = 1.0
    shift_by_size: ExponentByRoot | ShiftByRoot | ShiftBySize | ShiftBySizeAndSteps | None = None
    last_share: float = 0.0

    @property
    def takes_shift(self) -> bool:
        """Whether its levels follow from a shift, which a run may set."""
        return self.kind is NoiseKind.COSINE or (self.kind is NoiseKind.FLOW and not self.sigma_max)

    def shifted_by(self, shift: float) -> NoiseFacts:
        """Return the noise with this shift instead of its own; 0 keeps its own."""
        return replace(self, shift=shift, shift_by_size=None) if shift else self


#: Stable Diffusion's
PLAIN_NOISE = NoiseFacts()


class Guidance(Enum):
    """Guidance method of a model."""

    #: classifier-free guidance (CFG) against a negative prompt
    CLASSIFIER_FREE = "classifier-free"
    #: CFG, in late steps without the part of the difference that is parallel to the prompt's prediction (APG)
    PROJECTED_LATE = "classifier-free, then projected"
    #: the same in every step, along the length of each channel
    PROJECTED = "classifier-free, projected"
    #: the guidance scale is an input of the model
    DISTILLED = "distilled"
    #: CFG with a per-frame scale that rises from the first frame to the last; the unconditional side has no image
    RISING_WITH_FRAMES = "rising with frames"
    #: the same, rising to the middle frame and falling again
    RISING_AND_FALLING = "rising and falling with frames"
    #: CFG against no text, and against neither text nor image, with a scale for each
    TEXT_AND_IMAGE = "text and image"
    #: no guidance
    NONE = "none"


class CfgRescale(Enum):
    """CFG rescale: the groups of a guided prediction that are rescaled to the norm of the prompt's prediction."""

    NOTHING = "nothing"
    #: patches of 2 x 2 cells, all channels
    PATCHES = "patches"
    #: the same, but only patches with a larger norm
    PATCHES_DOWN = "patches, never enlarged"
    #: each row of cells, per channel
    ROWS = "rows"
    #: each cell, all channels
    CELLS = "cells"


class FirstFrameMode(Enum):
    """First-frame conditioning (image-to-video): how the model gets the first frame
    (`pool.inference.conditioning.starts`)."""

    #: its latent replaces the first cell of the video latent and is kept
    KEPT = "kept"
    #: the same, but the model input has a little noise, drawn again for each model call
    KEPT_WITH_NOISE = "kept, told with noise"
    #: the latent of a video of it followed by grey frames, with a mask for each frame of a cell; an image is required
    CONCATENATED = "joined"
    #: the unscaled latent of the image with some noise, concatenated to every temporal cell; an image is required
    REPEATED = "repeated"
    #: its latent in an extra leading temporal cell, followed by zeros, concatenated with a mask; a thousandth of it is
    #: added to the initial noise; an image is required
    LEADING_CELL = "led"
    #: its latent in the first temporal cell, followed by zeros, concatenated; an image is required
    FIRST_CELL = "first cell"
    #: its latent in an extra temporal cell after the last, which is not sampled; the model marks it
    APPENDED = "appended"
    #: its latent in the first temporal cell, followed by zeros, concatenated with a mask; zeros without an image
    MARKED_CELL = "marked cell"
    #: the latent of a reference image, with tokens of its own; the video need not begin with it
    REFERENCE = "reference"

    @property
    def is_required(self) -> bool:
        """The model generates no video without an image."""
        return self in (
            FirstFrameMode.CONCATENATED,
            FirstFrameMode.REPEATED,
            FirstFrameMode.LEADING_CELL,
            FirstFrameMode.FIRST_CELL,
        )


class VisionEncoderUse(Enum):
    """Vision encoder output that a model reads, and how the image is prepared (`pool.models.components.vision`)."""

    #: one projected state; the whole image, resized to a square
    PROJECTED = "projected"
    #: the hidden states of the penultimate layer; center crop
    PENULTIMATE = "penultimate"
    #: the projected patch states, inserted between the tokens of a text; center crop
    WORDS = "words"
    #: one projected state; center crop (IP-Adapter, unCLIP)
    CENTER_PROJECTED = "center_projected"
    #: the states of the last layer; the whole image, resized to a square (Redux)
    LAST = "last"
    #: one pooled state; the whole image, resized to a square (IP-Adapter of Flux by InstantX)
    POOLED = "pooled"

    @property
    def is_model_input(self) -> bool:
        """The diffusion model reads it, not a text encoder."""
        return self is not VisionEncoderUse.WORDS


@dataclass(frozen=True, slots=True)
class ImageLabels:
    """The embedding of an image as the class labels of a UNet, with noise (unCLIP): the mean and the deviation of each
    of its numbers over the training images. Empty: 0 and 1."""

    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


class SeenAs(Enum):
    """Use of the embeddings of images by a model that generates images without any, too."""

    #: states next to the states of the text (Stable Cascade)
    STATES = "states"
    #: their sum takes the place of the pooled text ("revision" of Stable Diffusion XL)
    POOLED = "pooled"


class ReferenceMode(Enum):
    """Preparation of reference images for the text encoder, unless the request specifies it."""

    #: by the model's name, else `WHOLE`
    BY_NAME = "by name"
    #: about as large as the output
    WHOLE = "whole"
    #: smaller, numbered in the prompt
    NUMBERED = "numbered"


class LastFrameMode(Enum):
    """Support for a last frame in addition to the first: accepted or required."""

    MAY = "may"
    MUST = "must"


class VideoNumbers(Enum):
    """Numbers about a video that a model reads."""

    #: frames per second minus one, motion strength, and the noise on the image
    MOTION = "motion"
    #: the noise on the image
    NOISE = "noise"
    #: that, and the camera position of each frame on an orbit around the object
    VIEWS = "views"


class ImageConcat(Enum):
    """Image input of a model, concatenated to the noisy latent or in its place
    (`pool.inference.conditioning.starts`)."""

    #: an inpaint mask and the masked image latent
    INPAINT = "hole"
    #: the same, with one mask channel for each pixel of a cell
    INPAINT_BY_PIXEL = "hole by pixel"
    #: the image latent
    LATENT = "latent"
    #: the image latent with a quarter of noise
    NOISED_LATENT = "latent with noise"
    #: the unscaled image latent; zeros for predictions without the image
    UNSCALED = "unscaled latent"
    #: the image's pixels with noise, one for each cell of the latent: upscaling
    PIXELS = "pixels"
    #: a depth map, one number for each cell of the latent
    DEPTH = "depth"
    #: the image latent in place of the noisy one, for models that estimate depths or normals in one step
    INSTEAD = "instead"

    @property
    def is_pixels(self) -> bool:
        """It is read from the pixels of the image, without the VAE."""
        return self in (ImageConcat.PIXELS, ImageConcat.DEPTH)

    @property
    def is_inpaint(self) -> bool:
        """The model regenerates the part of the image under a mask."""
        return self in (ImageConcat.INPAINT, ImageConcat.INPAINT_BY_PIXEL)


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Facts about a diffusion model that generates audio.

    seconds             default length
    samples_per_second  for each channel
    cells               of every latent, however short the requested audio is; 0: as many as the audio has
    most_seconds        maximum length; 0: `seconds`
    cell_samples        samples of a cell, for latents that are as long as the audio; 0: as many as the VAE has
    peak                amplitude to which a clip is scaled; 0: clips keep their own
    """

    seconds: float
    samples_per_second: int
    cells: int
    most_seconds: float = 0.0
    cell_samples: int = 0
    peak: float = 0.0

    @property
    def longest(self) -> float:
        """Maximum length in seconds."""
        return self.most_seconds or self.seconds

    def cells_of(self, seconds: float, downscale: int) -> int:
        """Return the cells of the latent of an audio clip of `seconds`; the VAE has `downscale` samples in each."""
        samples = seconds * self.samples_per_second
        # the length of a latent is not rounded up to one cell more
        return self.cells or max(1, math.ceil(round(samples / (self.cell_samples or downscale), 6)))

    def whole_seconds(self, seconds: float, downscale: int) -> float:
        """Return the length of the audio that a latent of audio of `seconds` has: its whole cells; all, if latents have
        one length."""
        if self.cells:
            return seconds
        samples = self.cell_samples or downscale
        cells = math.floor(round(seconds * self.samples_per_second / samples, 6))
        return cells * samples / self.samples_per_second

    def seconds_of(self, cells: int, downscale: int) -> float:
        """Return the length of the audio of a latent of `cells`, of `downscale` samples each by the VAE; 0 if there is
        no such latent."""
        if self.cells:
            return self.seconds if cells == self.cells else 0.0
        return cells * (self.cell_samples or downscale) / self.samples_per_second


@dataclass(frozen=True, slots=True)
class SoundFacts:
    """Facts about the audio track that a model generates with its videos.

    cells_per_second  positions of its latent
    width             numbers of each position
    cfg               guidance scale of the audio, if the video is guided; 0: the video's
    rescale           share of guided predictions, of both, that has the standard deviation of those for the prompt
    rounds_up         whether a part of a position at the end is one
    scale             of its latent, if its decoder has no statistics; a folder may state another one
    """

    cells_per_second: float
    width: int
    cfg: float = 0.0
    rescale: float = 0.0
    rounds_up: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Facts about a diffusion model that generates videos.

    frames    that it was trained for
    multiple  the number of frames is a multiple of this, plus one
    rate      frames per second
    begins    first-frame conditioning; None if there is none
    numbers   numbers that it reads
    ends      last-frame conditioning; None if there is none
    cell      frames of a latent frame after the first, if videos have a multiple of more; 0: `multiple`
    unseen    latent frames before the video that are sampled with it and not decoded
    layers    its frames are transparent layers of one image, not of a video
    sound     the audio track that is sampled with them; None if there is none
    guided    whether images guide it at frames of it, each with its strength
    """

    frames: int
    multiple: int
    rate: float
    begins: FirstFrameMode | None = None
    numbers: VideoNumbers | None = None
    ends: LastFrameMode | None = None
    cell: int = 0
    unseen: int = 0
    layers: bool = False
    sound: SoundFacts | None = None
    guided: bool = False

    @property
    def frames_per_cell(self) -> int:
        """Frames of a latent frame after the first."""
        return self.cell or self.multiple

    @property
    def images_encoded(self) -> int:
        """Number of images for the vision encoder, if there is one."""
        return 2 if self.ends is LastFrameMode.MUST else 1

    @property
    def leading(self) -> int:
        """Extra temporal cells at the start that are sampled. They are dropped after decoding, `unseen` cells before
        it."""
        return 1 if self.begins is FirstFrameMode.LEADING_CELL else self.unseen


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults of a model.

    cfg          guidance scale, for its kind of `guidance`
    image_cfg    guidance scale of the image, for models guided by text and image
    negative     negative prompt, if a request sets none
    noise_level  noise added to an image that is upscaled
    image_noise  standard deviation of the noise on the first frame, with pixels in [-1, 1]
    motion       motion strength, 0 to 255
    sigmas       noise levels of a model that is distilled to them, without the last 0; empty: the schedule's
    last_cfg     largest guidance scale of the last steps (`pool.inference.guidance.guiders`); 0: as in the others
    """

    steps: int
    cfg: float
    sampler: str
    schedule: str
    guidance: Guidance
    image_cfg: float = 0.0
    noise_level: int = 0
    image_noise: float = 0.0
    motion: int = 0
    sigmas: tuple[float, ...] = ()
    negative: str = ""
    last_cfg: float = 0.0


@dataclass(frozen=True, slots=True)
class LowNoiseExpert:
    """The low-noise expert of a model with two experts.

    boundary  noise fraction below which it takes over (diffusers: boundary_ratio)
    cfg       its default guidance scale
    """

    boundary: float
    cfg: float


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """Sampling properties of a diffusion model: prediction type, noise, inputs and defaults.

    model           its row in `pool.models.components.diffusion.rows`, which specifies the forward call; empty for
                    UNets that are called with latent, timestep, text and `size_conditions`
    reads           names of the required and optional inputs of that call
                    (`pool.models.components.diffusion.architecture`)
    side_multiple   width and height are multiples of it, in pixels; 0 is one cell of the latent
    patch_side      pixels along a side of a patch of the latent, if it is less than that; 0: `side_multiple`
    cfg_rescale     CFG rescale of guided predictions
    video           set for models that generate videos
    audio           set for models that generate audio
    words_negative  the text encoders use another template for a negative prompt
    writes_tokens   its last text encoder writes tokens of the image, which it reads with a prompt
    defaults        defaults of requests; None if requests have their own
    image_concat    required image input; None for text-only models
    enlarges        output size as a multiple of that image's size
    decoders        families with models that decode its output to an image latent (second stage); empty if it generates
                    one
    vision_use      use of a vision encoder, which then requires an image; None without
    image_labels    the vision encoder's state is the class labels of a UNet; None for other models
    seen_as         use of the embeddings of images that a request may have; None: none
    low_noise       the low-noise expert of a model with two experts; None for one model
    reference_mode  how its text encoder reads reference images; None if it reads none
    why_no_vision   why images are not read although the file has a vision part; empty for others
    several_references  whether it reads more than one reference image other than through its text encoder
    needs_reference  whether it runs with a reference image only
    reference_covers  whether its reference image, which is a single one, has the size of the output
    reference_side  most pixels along a side of its reference images, which keep their size otherwise; 0: they have
                    about as many pixels as the output
    reference_pixels  most pixels of its reference images, which keep their size otherwise; 0: any number up to
                    `reference_side`
    blank_reference  guidance by its reference image has a scale of its own; zeros are the prediction without it
    learned_negative  it is guided against a state that it has learned, and reads no negative prompt
    sequence        how several GPUs divide its tokens; None: they cannot
    not_divided     why they cannot, for users: a clause
    routes_tokens   the values of tokens choose their experts, each of which computes the tokens of all images of a
                    forward pass in one product: it rounds by how many there are, so images have other bits beside
                    others, also in passes of one size
    scales_inputs   of a file, on GPUs: kernels of its layers scale the inputs by the largest of all images of a
                    forward pass
    """

    prediction: Prediction = Prediction.NOISE
    size_conditions: MicroConditioning = MicroConditioning.NONE
    noise: NoiseFacts = PLAIN_NOISE
    model: str = ""
    reads: frozenset[str] = frozenset()
    side_multiple: int = 0
    patch_side: int = 0
    cfg_rescale: CfgRescale = CfgRescale.NOTHING
    video: VideoFacts | None = None
    words_negative: bool = False
    writes_tokens: bool = False
    audio: AudioFacts | None = None
    defaults: SamplingDefaults | None = None
    image_concat: ImageConcat | None = None
    enlarges: int = 1
    decoders: tuple[str, ...] = ()
    vision_use: VisionEncoderUse | None = None
    image_labels: ImageLabels | None = None
    low_noise: LowNoiseExpert | None = None
    reference_mode: ReferenceMode | None = None
    why_no_vision: str = ""
    several_references: bool = False
    needs_reference: bool = False
    reference_covers: bool = False
    reference_side: int = 0
    reference_pixels: int = 0
    blank_reference: bool = False
    learned_negative: bool = False
    sequence: SequencePlan | None = None
    not_divided: str = ""
    routes_tokens: bool = False
    scales_inputs: bool = False
    seen_as: SeenAs | None = None

    @property
    def reads_lyrics(self) -> bool:
        """It generates music, and reads lyrics and facts about the music."""
        return "lyrics" in self.reads

    @property
    def guides_by_references(self) -> bool:
        """Its reference images have a guidance scale of their own, next to the one of the text."""
        by_image = self.defaults is not None and self.defaults.guidance is Guidance.TEXT_AND_IMAGE
        return (by_image or self.blank_reference) and "reference" in self.reads

    @property
    def names_images(self) -> bool:
        """Its texts name the reference images, and it reads these in the places of their names."""
        return "image_places" in self.reads

    @property
    def reads_text(self) -> bool:
        """It reads a text; the others read images only."""
        return "image_context" not in self.reads or not self.reads.isdisjoint(("context", "pooled"))

    @property
    def has_unconditional(self) -> bool:
        """A second model predicts in place of a negative prompt, which nothing reads."""
        return "unconditional" in self.reads

    @property
    def aligned_schedule(self) -> str:
        """The schedule that was published for this kind of model (Align Your Steps: SD1, SDXL and Stable Video
        Diffusion, and models with their noise); "" for others."""
        if self.noise.kind is NoiseKind.EDM and self.video is not None:
            return "ays_svd"
        if self.model or self.noise != PLAIN_NOISE:
            return ""
        return "ays_sd1" if self.size_conditions is MicroConditioning.NONE else "ays_sdxl"

    @property
    def inpaints(self) -> bool:
        """It is an inpainting model: it reads the masked image."""
        return self.image_concat is not None and self.image_concat.is_inpaint

    @property
    def rounds_steps_up(self) -> bool:
        """A denoising strength that ends within a step runs that step in full. Source: the image-to-image pipelines of
        diffusers: pipelines of flows round up, others round down."""
        return self.prediction is Prediction.FLOW

    @property
    def makes_layers(self) -> bool:
        """It generates transparent layers of one image."""
        return self.video is not None and self.video.layers

    @property
    def knows_steps(self) -> bool:
        """Whether it was distilled for whole steps of Euler's method and reads their levels."""
        return "step" in self.reads

    @property
    def takes_view(self) -> bool:
        """Whether it shows the object of an image from a requested view."""
        return "view" in self.reads

    @property
    def is_prior_stage(self) -> bool:
        """First of two stages (prior): another model decodes its output to an image latent."""
        return self.decoders != ()

    @property
    def is_decoder_stage(self) -> bool:
        """Second of two stages: reads the output of the prior (`is_prior_stage`)."""
        return "prior" in self.reads

    @property
    def takes_reference(self) -> bool:
        """It accepts a reference image: its patches are appended to the latent's, or precede a video's."""
        return not self.reads.isdisjoint(("reference", "control"))


@dataclass(frozen=True, slots=True)
class TextStates:
    """The states of texts that a model reads.

    encoders  names of the text encoders (`pool.families.detection.text_encoders`), in order
    reading   models with the same name here read the encoders in the same way: template, length, layer
    """

    encoders: tuple[str, ...]
    reading: str


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Defaults of a model: training width and height in pixels, sampling facts, and pixels along a side of one latent
    cell.

    extent  width, height and frames of the only videos that it generates; None for other models
    latent  layout and scale of its latents; None if they are not known
    texts   the states of texts that it reads; None if they are not known
    """

    width: int
    height: int
    sampling: SamplingFacts
    downscale: int = 8
    extent: tuple[int, int, int] | None = None
    latent: LatentFacts | None = None
    texts: TextStates | None = None


#: defaults of a plain diffusion model: SD1
PLAIN_SAMPLING = SamplingFacts()
