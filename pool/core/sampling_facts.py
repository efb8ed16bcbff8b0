"""What a diffusion model predicts, which noise it knows, and how it is usually run, as values. Torch-free.

Which family has which is in `pool.families.family` and `pool.families.transformer_families`; what is done with them, in
`pool.sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from modelpool.pool.core.shift_by_size import ShiftBySize as ShiftBySize
from modelpool.pool.core.shift_by_size import ShiftBySizeAndSteps as ShiftBySizeAndSteps


class Prediction(Enum):
    """What a diffusion model says of a noisy latent (`pool.sampling.predictions`)."""

    NOISE = "noise"
    VELOCITY = "velocity"
    #: the clean latent, less what the noisy one tells of it: velocity with the other sign
    EDM = "EDM"
    #: noise less clean latent: the direction of the straight line between them ("rectified flow")
    FLOW = "flow"


class NoiseKind(Enum):
    """Which levels of noise a diffusion model was trained with (`pool.sampling.schedules`)."""

    #: the thousand of Stable Diffusion 1, 2 and XL
    SCALED_LINEAR = "scaled linear"
    #: those, stretched so that the last one is noise alone: zero terminal signal to noise
    ZERO_TERMINAL = "zero terminal SNR"
    #: as the first, with betas that rise evenly themselves, and not their roots
    LINEAR = "linear"
    #: all between two ends; the model is told their logarithm
    EDM = "EDM"
    #: as EDM, but the model is told the angle whose tangent is the noise, in right angles
    ANGLE = "angle"
    #: shares of noise from 0 to 1, the rest being the image; the model is told the share
    FLOW = "flow"
    #: the image's share falls as a cosine does from 0 to a right angle; the model is told how far that is, 0 to 1
    COSINE = "cosine"


class SizeConditions(Enum):
    """What a diffusion model is told beside the text: a pooled text and numbers about the image."""

    NONE = "none"
    #: height and width before cropping, where the crop begins, height and width wanted
    SIZES = "sizes"
    #: height and width, where the crop begins, and how pleasing the image should be
    AESTHETICS = "aesthetics"


@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """The noise that a diffusion model was trained with.

    sigma_min, sigma_max  ends of its levels, where they are not a table's; of a flow, those of the noise beside the
                          image, where its levels are ratios of such
    sigma_data            deviation of clean latents, as the model's input and answer are scaled for
    beta_start, beta_end  of a table: the noise that its first and its last level add
    shift                 of a flow: how much more of the way is spent where there is much noise; 1 is even
    shift_by_size         of a flow whose shift depends on the size of the image; `shift` is not read then
    last_share            of a flow: the share of noise that the last step but one leaves; 0 leaves it as it comes
    """

    kind: NoiseKind = NoiseKind.SCALED_LINEAR
    sigma_min: float = 0.0
    sigma_max: float = 0.0
    sigma_data: float = 1.0
    beta_start: float = 0.00085
    beta_end: float = 0.012
    shift: float = 1.0
    shift_by_size: ShiftBySize | ShiftBySizeAndSteps | None = None
    last_share: float = 0.0


#: Stable Diffusion's
PLAIN_NOISE = NoiseFacts()


class Guidance(Enum):
    """How a model is made to follow what it is told."""

    #: by its difference from what it makes of a negative prompt
    CLASSIFIER_FREE = "classifier-free"
    #: as classifier-free, in late steps but for what of the difference lies along the prompt's own guess
    PROJECTED_LATE = "classifier-free, then projected"
    #: by a number that it is told
    DISTILLED = "distilled"
    #: as classifier-free, from weak at the first frame to strong at the last; the other side is told of no image
    RISING_WITH_FRAMES = "rising with frames"
    #: the same, from weak at the first frame to strong in the middle and back
    RISING_AND_FALLING = "rising and falling with frames"
    #: as classifier-free, against no text and against neither text nor image, with a strength for each
    TEXT_AND_IMAGE = "text and image"
    #: not at all
    NONE = "none"


class KeptLength(Enum):
    """What of a guided prediction has the length again that the prompt's own has there."""

    NOTHING = "nothing"
    #: two by two cells, with all channels
    PATCHES = "patches"
    #: each row of cells of each channel
    ROWS = "rows"


class Beginning(Enum):
    """How a model is told of the image that its video begins with (`pool.conditioning.starts`)."""

    #: its latent, kept in the first cell of the video's
    KEPT = "kept"
    #: the same, but told with a little noise, drawn anew for each guess
    SHAKEN = "kept, told with noise"
    #: the latent of a video of it and of grey after it, beside a mask for each frame of a cell; it is always told one
    JOINED = "joined"
    #: its latent as the VAE has it, unscaled and of an image with some noise, joined to every cell of time; it is
    #: always told one
    REPEATED = "repeated"
    #: its latent in a cell of time before the video's own, with zeros after it, joined beside a mask; a thousandth of
    #: it is in the noise that is begun with; it is always told one
    LED = "led"

    @property
    def is_always_there(self) -> bool:
        """The model makes no video without an image."""
        return self not in (Beginning.KEPT, Beginning.SHAKEN)


class Sight(Enum):
    """What of an image a model is told by a vision encoder, and how that is shown it (`pool.models.vision`)."""

    #: one state, projected; the whole image, squeezed into a square
    PROJECTED = "projected"
    #: the states of the last layer but one; the middle of the image
    PENULTIMATE = "penultimate"
    #: those of the patches alone, projected, among the words of a text; the middle of the image
    WORDS = "words"

    @property
    def is_told(self) -> bool:
        """The diffusion model is told it, not a text encoder."""
        return self is not Sight.WORDS


class TextSight(Enum):
    """How a text encoder is shown the images that its model is to work from, where nobody says it."""

    #: as the model's name tells, and otherwise whole
    BY_NAME = "by name"
    #: about as large as what is made
    WHOLE = "whole"
    #: smaller, each with its number
    NUMBERED = "numbered"


class Ending(Enum):
    """Whether a video ends with an image too, beside the one that it begins with."""

    MAY = "may"
    MUST = "must"


class VideoNumbers(Enum):
    """What a model is told of a video in numbers."""

    #: frames a second less one, how much moves, and the noise on the image
    MOTION = "motion"
    #: the noise on the image
    NOISE = "noise"
    #: that, and from where each frame looks, on the way around a thing
    VIEWS = "views"


class Shown(Enum):
    """What a model that works from an image of a person's own is shown of it, joined to the noisy latent
    (`pool.conditioning.starts`)."""

    #: a mask, and the latent of the image with a hole there
    HOLE = "hole"
    #: that latent, and the mask with a channel for each pixel of a cell
    HOLE_BY_PIXEL = "hole by pixel"
    #: its latent
    LATENT = "latent"
    #: its latent as the VAE has it, unscaled; zeros where a guess is to be without the image
    UNSCALED = "unscaled latent"
    #: its pixels with noise, one for each cell of the latent: what is made is larger
    PIXELS = "pixels"

    @property
    def is_hole(self) -> bool:
        """It makes a part of the image anew, which a mask shows."""
        return self in (Shown.HOLE, Shown.HOLE_BY_PIXEL)


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Of a diffusion model that makes audio.

    seconds             that it makes at most
    samples_per_second  of each channel
    cells               of every latent, whatever of it is audio that was asked for
    """

    seconds: float
    samples_per_second: int
    cells: int


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Of a diffusion model that makes videos.

    frames    that it was made for
    multiple  it makes a multiple of so many frames, and one more
    rate      frames a second
    begins    how it is told of an image that the video begins with
    numbers   what it is told in numbers
    ends      whether it can be told of an image that the video ends with; None where it cannot
    """

    frames: int
    multiple: int
    rate: float
    begins: Beginning | None = None
    numbers: VideoNumbers | None = None
    ends: Ending | None = None

    @property
    def images_seen(self) -> int:
        """How many images a vision encoder is shown, where there is one."""
        return 2 if self.ends is Ending.MUST else 1

    @property
    def leading(self) -> int:
        """Cells of time that are made and decoded before the video's own, and left out then."""
        return 1 if self.begins is Beginning.LED else 0


@dataclass(frozen=True, slots=True)
class UsualRun:
    """What a model is run with where nobody says otherwise.

    cfg          how strongly it follows the text, by its kind of `guidance`
    image_cfg  how strongly the image, of a model that is guided by text and image
    noise_level  how much noise is put on an image that is made larger
    image_noise  deviation of the noise on the image that a video begins with, whose pixels go from -1 to 1
    motion       how much moves in a video, of 255
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


@dataclass(frozen=True, slots=True)
class LowNoise:
    """Of a model that is two: one for much noise, and one for little.

    boundary  share of noise below which the second takes over
    cfg       how strongly that one follows the text where nobody says otherwise
    """

    boundary: float
    cfg: float


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """What a diffusion model predicts, what it is told beside a text, and which noise it knows.

    model        its row in `pool.models.diffusion.rows`, which says how it is called; empty for UNets that are called
                 with a latent, a timestep, a text and what `size_conditions` say
    reads        names of what that call has to be told and can be told (`pool.models.diffusion.architecture`)
    side_multiple  both sides of an image are multiples of it, in pixels; 0 is one cell of the latent
    kept_length  what is done to guided predictions
    video         what a model makes that makes videos; None for others
    audio        what a model makes that makes audio; None for others
    words_negative  a negative prompt is put to the text encoders in other words than a prompt
    usual        what a request that does not say is made with; None where requests have defaults of their own
    shown        what it is shown of an image that it works from, and must have; None for models of texts alone
    enlarges     how many times as large as that image what it makes is
    decoders     families whose models make an image's latent of what it makes; empty where that is one itself
    sight        how it sees an image through a vision encoder, and must be given one; None for those without
    low_noise    of a model that is two, when the second takes over; None for one
    text_sight   how its text encoder is shown images among the words; None where it sees none
    unseeing     why it does not, of one whose file has a part for that; empty for others
    """

    prediction: Prediction = Prediction.NOISE
    size_conditions: SizeConditions = SizeConditions.NONE
    noise: NoiseFacts = PLAIN_NOISE
    model: str = ""
    reads: frozenset[str] = frozenset()
    side_multiple: int = 0
    kept_length: KeptLength = KeptLength.NOTHING
    video: VideoFacts | None = None
    words_negative: bool = False
    audio: AudioFacts | None = None
    usual: UsualRun | None = None
    shown: Shown | None = None
    enlarges: int = 1
    decoders: tuple[str, ...] = ()
    sight: Sight | None = None
    low_noise: LowNoise | None = None
    text_sight: TextSight | None = None
    unseeing: str = ""

    @property
    def reads_text(self) -> bool:
        """It is told a text; the others are told of images alone."""
        return "image_context" not in self.reads or not self.reads.isdisjoint(("context", "pooled"))

    @property
    def fills_holes(self) -> bool:
        """It makes a part of an image anew: it is shown the image with a hole."""
        return self.shown is not None and self.shown.is_hole

    @property
    def rounds_steps_up(self) -> bool:
        """Of the steps of a schedule a part that a strength asks for is made, and of a step that it asks for in part
        the whole. Source: the pipelines of diffusers that begin with an image; those of flows count so, others make
        whole steps alone."""
        return self.prediction is Prediction.FLOW

    @property
    def hands_on(self) -> bool:
        """What it makes is no image's latent: another model, which is told it, makes one of it."""
        return self.decoders != ()

    @property
    def reads_prior(self) -> bool:
        """It is told what the model before it made (`hands_on`)."""
        return "prior" in self.reads

    @property
    def takes_reference(self) -> bool:
        """It can be told an image to work from, whose patches stand beside those of the latent, or before a video's."""
        return not self.reads.isdisjoint(("reference", "control"))


@dataclass(frozen=True, slots=True)
class MadeFor:
    """What a model was made for: the width and height that it was trained for, in pixels, how it is sampled, and how
    many pixels along a side one cell of its latents stands for."""

    width: int
    height: int
    sampling: SamplingFacts
    downscale: int = 8


#: a diffusion model without anything out of the way: SD1's
PLAIN_SAMPLING = SamplingFacts()
