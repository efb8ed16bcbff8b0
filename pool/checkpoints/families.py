"""The families of models that this version runs, as values. Torch-free.

A family says where its components are in a file, which architecture each of them has, and what no tensor tells.
`pool.checkpoints.detect` finds the family of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from pool.checkpoints.safetensors_file import Shape
from pool.spec import Role

#: what CLIP fills a text up with: the end token as OpenAI trained it, 0 as open_clip does
CLIP_END_ID, OPEN_CLIP_PAD_ID = 49407, 0


class Architecture(Enum):
    """What a component is built as (`pool.checkpoints.modules`), and how its file spells it."""

    CLIP_TEXT = "CLIP text model, spelled as transformers does"
    OPEN_CLIP_TEXT = "CLIP text model with a projection, spelled as open_clip does"
    LDM_UNET = "UNet of the latent diffusion kind"
    LDM_VAE = "autoencoder of the latent diffusion kind"


class Prediction(Enum):
    """What a diffusion model says of a noisy latent (`pool.sampling.predictions`)."""

    NOISE = "noise"
    VELOCITY = "velocity"
    #: the clean latent, less what the noisy one tells of it: velocity with the other sign
    EDM = "EDM"


class NoiseKind(Enum):
    """Which levels of noise a diffusion model was trained with (`pool.sampling.schedules`)."""

    #: the thousand of Stable Diffusion 1, 2 and XL
    SCALED_LINEAR = "scaled linear"
    #: those, stretched so that the last one is noise alone: zero terminal signal to noise
    ZERO_TERMINAL = "zero terminal SNR"
    #: all between two ends; the model is told their logarithm
    EDM = "EDM"


class SizeConditions(Enum):
    """What a diffusion model is told beside the text: a pooled text and numbers about the picture."""

    NONE = "none"
    #: height and width before cropping, where the crop begins, height and width wanted
    SIZES = "sizes"
    #: height and width, where the crop begins, and how pleasing the picture should be
    AESTHETICS = "aesthetics"


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """What the numbers of a latent mean.

    channels        channels of a latent
    downscale       pixels along one side of one latent cell
    scaling_factor  the diffusion model's latents are this many times the VAE's, less `shift`
    shift           what is taken off the VAE's latents before they are scaled
    means, deviations  of each channel of the VAE's latents, which the diffusion model has at 0 and 1 before they are
                    scaled; empty where it has them as they are
    """

    channels: int
    downscale: int
    scaling_factor: float
    shift: float = 0.0
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFacts:
    """How a text encoder is read.

    layers_left_out  of the last layers: 0 reads the last one
    final_norm       what is read goes through the final norm
    pad_id           the token that a text is filled up with
    gives_pooled     the diffusion model is told its pooled text too
    """

    layers_left_out: int = 0
    final_norm: bool = True
    pad_id: int = CLIP_END_ID
    gives_pooled: bool = False


@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """The noise that a diffusion model was trained with.

    sigma_min, sigma_max  ends of its levels, where they are not a table's
    sigma_data            deviation of clean latents, as the model's input and answer are scaled for
    """

    kind: NoiseKind = NoiseKind.SCALED_LINEAR
    sigma_min: float = 0.0
    sigma_max: float = 0.0
    sigma_data: float = 1.0


#: Stable Diffusion's
PLAIN_NOISE = NoiseFacts()


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """What a diffusion model predicts, what it is told beside a text, and which noise it knows."""

    prediction: Prediction = Prediction.NOISE
    size_conditions: SizeConditions = SizeConditions.NONE
    noise: NoiseFacts = PLAIN_NOISE


#: a text encoder and a diffusion model without anything out of the way: SD1's
PLAIN_TEXT, PLAIN_SAMPLING = TextFacts(), SamplingFacts()


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint.

    name           short and stable, "sd1"
    title          for human readers
    prefixes       what the keys of each component begin with; text encoders in the order in which their texts follow
                   each other
    architectures  what each component is
    texts          how each text encoder is read
    native_pixels  width and height that the model was trained for, where the file does not say
    latent_means, latent_deviations  as `LatentFacts` has them
    relative       name of the family that it was cut or trained out of; LoRAs name its weights alike. Empty for none
    """

    name: str
    title: str
    prefixes: Mapping[Role, str]
    architectures: Mapping[Role, Architecture]
    texts: Mapping[Role, TextFacts]
    native_pixels: int
    scaling_factor: float
    sampling: SamplingFacts = PLAIN_SAMPLING
    latent_means: tuple[float, ...] = ()
    latent_deviations: tuple[float, ...] = ()
    relative: str = ""

    @property
    def text_encoders(self) -> tuple[Role, ...]:
        """The components that read a prompt."""
        return tuple(role for role in self.prefixes if role.is_text_encoder)

    def shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The component's part of `shapes`, keys as they are in the file."""
        prefix = self.prefixes[role]
        return {key: shape for key, shape in shapes.items() if key.startswith(prefix) and is_weight(role, key, prefix)}

    def bare_shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """As `shapes_of`, keys without the component's prefix."""
        return {self.bare_key(role, key): shape for key, shape in self.shapes_of(role, shapes).items()}

    def bare_key(self, role: Role, key: str) -> str:
        """A component's `key` without its prefix."""
        bare = key.removeprefix(self.prefixes[role])
        # some files carry CLIP with this level, some without
        return bare.removeprefix("text_model.") if self.architectures[role] is Architecture.CLIP_TEXT else bare


#: the parts of an autoencoder's files that are not its training loss
_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
#: tables of positions, a mask and a temperature of training: no weights
_TEXT_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", "text_projection.weight")


def is_weight(role: Role, key: str, prefix: str) -> bool:
    """Whether `key` of a component is a weight of it, and not a table or a leftover of its training."""
    if role is Role.VAE:
        return key.removeprefix(prefix).startswith(_VAE_PARTS)
    return not key.endswith(_TEXT_LEFTOVERS if role.is_text_encoder else ".position_ids")


_UNET_PREFIX, _VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
_UNET_AND_VAE = {Role.DIFFUSION_MODEL: Architecture.LDM_UNET, Role.VAE: Architecture.LDM_VAE}

SD1 = Family(
    name="sd1",
    title="Stable Diffusion 1",
    prefixes={
        Role.TEXT_ENCODER: "cond_stage_model.transformer.",
        Role.DIFFUSION_MODEL: _UNET_PREFIX,
        Role.VAE: _VAE_PREFIX,
    },
    architectures={Role.TEXT_ENCODER: Architecture.CLIP_TEXT, **_UNET_AND_VAE},
    texts={Role.TEXT_ENCODER: PLAIN_TEXT},
    native_pixels=512,
    # std of the VAE's latents on its training pictures, inverted; the constant of the published SD1 configuration
    scaling_factor=0.18215,
)
#: of 512 pixels; those of 768 predict velocity. No shape tells which a file is (`pool.checkpoints.small_tensors`)
SD2 = Family(
    name="sd2",
    title="Stable Diffusion 2",
    prefixes={
        Role.TEXT_ENCODER: "cond_stage_model.model.",
        Role.DIFFUSION_MODEL: _UNET_PREFIX,
        Role.VAE: _VAE_PREFIX,
    },
    architectures={Role.TEXT_ENCODER: Architecture.OPEN_CLIP_TEXT, **_UNET_AND_VAE},
    # `layer: penultimate` and the norm after it, of v2-inference.yaml, Stability-AI/stablediffusion
    texts={Role.TEXT_ENCODER: TextFacts(layers_left_out=1, pad_id=OPEN_CLIP_PAD_ID)},
    native_pixels=512,
    scaling_factor=0.18215,
)
SDXL = Family(
    name="sdxl",
    title="Stable Diffusion XL",
    prefixes={
        Role.TEXT_ENCODER: "conditioner.embedders.0.transformer.",
        Role.TEXT_ENCODER_2: "conditioner.embedders.1.model.",
        Role.DIFFUSION_MODEL: _UNET_PREFIX,
        Role.VAE: _VAE_PREFIX,
    },
    architectures={
        Role.TEXT_ENCODER: Architecture.CLIP_TEXT,
        Role.TEXT_ENCODER_2: Architecture.OPEN_CLIP_TEXT,
        **_UNET_AND_VAE,
    },
    # `layer_idx: 11`, `layer: penultimate`, `legacy: False` of sd_xl_base.yaml, Stability-AI/generative-models
    texts={
        Role.TEXT_ENCODER: TextFacts(layers_left_out=1, final_norm=False),
        Role.TEXT_ENCODER_2: TextFacts(1, final_norm=False, pad_id=OPEN_CLIP_PAD_ID, gives_pooled=True),
    },
    native_pixels=1024,
    # `scale_factor` of the same file
    scaling_factor=0.13025,
    sampling=SamplingFacts(size_conditions=SizeConditions.SIZES),
)
SDXL_REFINER = Family(
    name="sdxl_refiner",
    title="the Stable Diffusion XL refiner",
    prefixes={
        Role.TEXT_ENCODER: "conditioner.embedders.0.model.",
        Role.DIFFUSION_MODEL: _UNET_PREFIX,
        Role.VAE: _VAE_PREFIX,
    },
    architectures={Role.TEXT_ENCODER: Architecture.OPEN_CLIP_TEXT, **_UNET_AND_VAE},
    texts={Role.TEXT_ENCODER: TextFacts(1, final_norm=False, pad_id=OPEN_CLIP_PAD_ID, gives_pooled=True)},
    native_pixels=1024,
    scaling_factor=0.13025,
    sampling=SamplingFacts(size_conditions=SizeConditions.AESTHETICS),
)
#: what SD2 files that predict velocity were trained for. Source: v2-inference-v.yaml, Stability-AI/stablediffusion
SD2_VELOCITY_PIXELS = 768

# SDXL with blocks left out, and trained to do as SDXL does. Their text encoders, VAE and noise are SDXL's.
#: fewer transformer blocks, and other numbers of them on the way up than down; no attention in the middle.
#: Source: segmind/SSD-1B; Gupta et al. 2024, "Progressive Knowledge Distillation of Stable Diffusion XL"
SSD_1B = replace(SDXL, name="ssd_1b", title="SSD-1B", relative="sdxl")
#: fewer still. Source: segmind/Segmind-Vega, and the same paper
VEGA = replace(SDXL, name="vega", title="Segmind Vega", relative="sdxl")
#: one residual block at each level, 5 or 6 transformer blocks at the last; the small one has no middle.
#: Source: etri-vilab/koala-700m and koala-1b; Lee et al. 2023, "KOALA"
KOALA_700M = replace(SDXL, name="koala_700m", title="KOALA 700M", relative="sdxl")
KOALA_1B = replace(SDXL, name="koala_1b", title="KOALA 1B", relative="sdxl")
#: SDXL trained anew with the noise, the prediction and the conditioning of Karras et al. 2022 ("EDM"), on latents with
#: mean and deviation of each channel taken out; a file has both as tensors, and these are the published ones.
#: Source: scheduler and vae of playgroundai/playground-v2.5-1024px-aesthetic; Li et al. 2024, "Playground v2.5"
PLAYGROUND_25 = replace(
    SDXL,
    name="playground_25",
    title="Playground 2.5",
    relative="sdxl",
    scaling_factor=0.5,
    latent_means=(-1.6574, 1.886, -1.383, 2.5155),
    latent_deviations=(8.4927, 5.9022, 6.5498, 5.2299),
    sampling=SamplingFacts(Prediction.EDM, SizeConditions.SIZES, NoiseFacts(NoiseKind.EDM, 0.002, 80.0, 0.5)),
)
#: the noise of models that predict velocity and name their ends of noise (CosXL); these where a file does not say them.
#: Source: scheduler of stabilityai/cosxl
VELOCITY_EDM_NOISE = NoiseFacts(NoiseKind.EDM, 0.002, 120.0)

#: every family that this version runs
FAMILIES = (SD1, SD2, SDXL, SDXL_REFINER, SSD_1B, VEGA, KOALA_700M, KOALA_1B, PLAYGROUND_25)
