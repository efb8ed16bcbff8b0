"""What flows between the nodes of a ComfyUI workflow here: descriptions of work, from which requests follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA and its strengths, on the diffusion model and on the text encoders."""

    name: str
    strength: float
    text_strength: float


@dataclass(frozen=True, slots=True)
class ModelValue:
    """A diffusion model of the pool, with LoRAs."""

    name: str
    loras: tuple[LoraUse, ...] = ()


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Text encoders: those of the model `name`, or of separate files ("": those of whichever model uses them).

    last_layer  that is read, from the end: -1 is the last; None as the model was trained
    """

    name: str
    loras: tuple[LoraUse, ...] = ()
    last_layer: int | None = None


@dataclass(frozen=True, slots=True)
class VaeValue:
    """The VAE of the model `name`, or of a separate file ("")."""

    name: str


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An uploaded image."""

    name: str


@dataclass(frozen=True, slots=True)
class MaskFile:
    """A channel of an uploaded image as a mask: "A" is inverted, since what is transparent is regenerated."""

    name: str
    channel: str
    inverted: bool = False
    grown: int = 0


@dataclass(frozen=True, slots=True)
class ControlNetValue:
    """A ControlNet of the pool."""

    name: str
    mode: str = ""


@dataclass(frozen=True, slots=True)
class ControlUse:
    """A ControlNet as it is applied."""

    net: ControlNetValue
    image: ImageFile
    strength: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TextValue:
    """An encoded text. `is_zero` stands for conditioning that was set to zero."""

    text: str
    clip: ClipValue
    guidance: float | None = None
    controls: tuple[ControlUse, ...] = ()
    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class BlankLatent:
    """Empty latents of the size of `width` x `height` pixels."""

    width: int
    height: int
    count: int


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The latents of an image, and where they are regenerated."""

    image: ImageFile
    mask: MaskFile | None = None


@dataclass(frozen=True, slots=True)
class SampledLatent:
    """The result of a sampler.

    steps      length of its schedule, of which the last `run_steps` are run
    node_id    of the sampler, for progress
    """

    model: ModelValue
    positive: TextValue
    negative: TextValue
    seed: int
    steps: int
    run_steps: int
    cfg: float
    sampler: str
    schedule: str
    start: LatentValue
    node_id: str


@dataclass(frozen=True, slots=True)
class ScaledLatent:
    """Sampled latents, scaled up by a factor."""

    latent: SampledLatent
    scale: float


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The images of sampled latents."""

    latent: SampledLatent


LatentValue: TypeAlias = BlankLatent | EncodedImage | SampledLatent | ScaledLatent
