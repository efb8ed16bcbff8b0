"""The families of models that this version runs, as values. Torch-free.

A family says where its components are in a file, which architecture each of them has, and what no tensor tells.
`pool.loading.detect_family` finds the family of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from modelpool.pool.core.family_facts import OPEN_CLIP_PAD_ID, PLAIN_TEXT, LatentFacts, TextFacts
from modelpool.pool.core.sampling_facts import (
    PLAIN_SAMPLING,
    Guidance,
    NoiseFacts,
    NoiseKind,
    Prediction,
    SamplingFacts,
    Shown,
    SizeConditions,
    UsualRun,
)
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role


class Architecture(Enum):
    """What a component is built as (`pool.models.common.module_classes`), and how its file spells it."""

    CLIP_TEXT = "CLIP text model, spelled as transformers does"
    OPEN_CLIP_TEXT = "CLIP text model with a projection, spelled as open_clip does"
    OPEN_CLIP_TEXT_ALONE = "CLIP text model without a projection, spelled as open_clip does"
    LDM_UNET = "UNet of the latent diffusion kind"
    CLIP_TEXT_PROJECTED = "CLIP text model with a projection, spelled as transformers does"
    DIFFUSERS_UNET = "UNet of the latent diffusion kind, spelled as diffusers does"
    VAE = "autoencoder of a kind that pool.models.vae builds"
    DIFFUSION_TRANSFORMER = "diffusion model of a kind that pool.models.diffusion builds"
    AUDIO_TRANSFORMER = "the same, with a small model beside it that embeds seconds"
    TEXT_MODEL = "text model of a kind that pool.models.text builds"
    VISION_MODEL = "vision model of CLIP, that pool.models.vision builds"
    TEXT_VISION = "the part of a text encoder that sees images, that pool.models.vision builds"


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
    native_sides   width and height, where they differ
    latent_shift, latent_means, latent_deviations  as `LatentFacts` has them
    latent_format  name of its latents (`pool.detection.latent_formats`), where their VAE is to be checked
    text_set       how prompts are put to the text encoders, a key of `MEMBERS` of
                   `pool.detection.text_encoders`; empty where `texts` say it
    dtypes         names of those that its diffusion model computes well in, best first
    relative       name of the family that it was cut or trained out of; LoRAs name its weights alike. Empty for none
    configs        of a folder of diffusers: the arguments that it gives to the classes of its components
    besides        what the keys of tensors begin with that belong to a component too, but do not have its prefix
    latent         what its latents are, of a model without a VAE; None for others, whose VAE says it
    """

    name: str
    title: str
    prefixes: Mapping[Role, str]
    architectures: Mapping[Role, Architecture]
    texts: Mapping[Role, TextFacts]
    native_pixels: int
    scaling_factor: float
    sampling: SamplingFacts = PLAIN_SAMPLING
    latent_shift: float = 0.0
    latent_means: tuple[float, ...] = ()
    latent_deviations: tuple[float, ...] = ()
    text_set: str = ""
    latent_format: str = ""
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    relative: str = ""
    native_sides: tuple[int, int] | None = None
    configs: Mapping[Role, Mapping[str, Any]] = field(default_factory=dict)
    besides: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    latent: LatentFacts | None = None

    @property
    def text_encoders(self) -> tuple[Role, ...]:
        """The components that read a prompt."""
        return tuple(role for role in self.prefixes if role.is_text_encoder)

    def shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The component's part of `shapes`, keys as they are in the file."""
        prefix, beside = self.prefixes[role], self.besides.get(role, ())
        kept = prefix + _PROJECTION if self.architectures[role] is Architecture.CLIP_TEXT_PROJECTED else None
        # a diffusion model without prefix has all that is no other's
        others = () if prefix else tuple(other for other in self.prefixes.values() if other)
        found: dict[str, Shape] = {}
        for key, shape in shapes.items():
            is_own = key.startswith(prefix) and not (others and key.startswith(others))
            if (is_own and (key == kept or self._is_weight(role, key, prefix))) or (beside and key.startswith(beside)):
                found[key] = shape
        return found

    def _is_weight(self, role: Role, key: str, prefix: str) -> bool:
        if self.architectures[role] is Architecture.TEXT_MODEL:
            seeing = (*SEEING_PARTS, *_LLAVA_PARTS)
            return not key.endswith(_TEXT_MODEL_LEFTOVERS) and not key.removeprefix(prefix).startswith(seeing)
        return is_weight(role, key, prefix)

    def bare_shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """As `shapes_of`, keys without the component's prefix."""
        return {self.bare_key(role, key): shape for key, shape in self.shapes_of(role, shapes).items()}

    def bare_key(self, role: Role, key: str) -> str:
        """A component's `key` without its prefix."""
        bare = key.removeprefix(self.prefixes[role])
        # some files carry CLIP with this level, some without
        return bare.removeprefix("text_model.") if self.architectures[role] in _TRANSFORMERS_TEXTS else bare


#: the parts of an autoencoder's files that only its training needs
_VAE_LEFTOVERS = ("loss.", "model_ema.")
#: tables of positions, a mask and a temperature of training: no weights
_PROJECTION = "text_projection.weight"
_TEXT_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", _PROJECTION)
#: the same, and tokenizers as bytes
_TEXT_MODEL_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", "spiece_model", "tekken_model", "tokenizer_json")
#: the part of a text model that sees images, as files of different ages have it: a component by itself, or left out
SEEING_PARTS = ("visual.", "model.visual.")
#: the same of a LLaVA
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.")
#: text models in the spelling of transformers, with a level of names or without
_TRANSFORMERS_TEXTS = (Architecture.CLIP_TEXT, Architecture.CLIP_TEXT_PROJECTED)


def is_weight(role: Role, key: str, prefix: str) -> bool:
    """Whether `key` of a component is a weight of it, and not a table or a leftover of its training."""
    if role is Role.VAE:
        return not key.removeprefix(prefix).startswith(_VAE_LEFTOVERS)
    return not key.endswith(_TEXT_LEFTOVERS if role.is_text_encoder else ".position_ids")


_UNET_PREFIX, _VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
_UNET_AND_VAE = {Role.DIFFUSION_MODEL: Architecture.LDM_UNET, Role.VAE: Architecture.VAE}

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
    # std of the VAE's latents on its training images, inverted; the constant of the published SD1 configuration
    scaling_factor=0.18215,
)
#: of 512 pixels; those of 768 predict velocity. No shape tells which a file is (`pool.loading.small_tensors`)
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

# Models that were trained further to fill holes. Source: runwayml/stable-diffusion-inpainting,
# stabilityai/stable-diffusion-2-inpainting, diffusers/stable-diffusion-xl-1.0-inpainting-0.1
_FILLS = {name: replace(family.sampling, shown=Shown.HOLE) for name, family in (("sd1", SD1), ("sdxl", SDXL))}
SD1_INPAINT = replace(
    SD1, name="sd1_inpaint", title="Stable Diffusion 1 inpainting", relative="sd1", sampling=_FILLS["sd1"]
)
SD2_INPAINT = replace(
    SD2, name="sd2_inpaint", title="Stable Diffusion 2 inpainting", relative="sd2", sampling=_FILLS["sd1"]
)
SDXL_INPAINT = replace(
    SDXL, name="sdxl_inpaint", title="Stable Diffusion XL inpainting", relative="sdxl", sampling=_FILLS["sdxl"]
)

# Models that were trained further to do to an image what a text says. Source: timbrooks/instruct-pix2pix,
# diffusers/sdxl-instructpix2pix-768, and the pipelines of diffusers
_INSTRUCTED = UsualRun(100, 7.5, "euler", "normal", Guidance.TEXT_AND_IMAGE, image_cfg=1.5)
SD1_INSTRUCT = replace(
    SD1,
    name="sd1_ip2p",
    title="Stable Diffusion 1 InstructPix2Pix",
    relative="sd1",
    sampling=replace(SD1.sampling, shown=Shown.UNSCALED, usual=_INSTRUCTED),
)
SDXL_INSTRUCT = replace(
    SDXL,
    name="sdxl_ip2p",
    title="Stable Diffusion XL InstructPix2Pix",
    relative="sdxl",
    native_pixels=768,
    sampling=replace(SDXL.sampling, shown=Shown.UNSCALED, usual=replace(_INSTRUCTED, cfg=5.0)),
)
#: CosXL, trained further to do so: the image's latent is scaled as that of what is made. Source: stabilityai/cosxl,
#: and `is_cosxl_edit` of diffusers' StableDiffusionXLInstructPix2PixPipeline; its steps are those of diffusers' example
COSXL_EDIT = replace(
    SDXL,
    name="cosxl_edit",
    title="CosXL edit",
    relative="sdxl",
    sampling=SamplingFacts(
        Prediction.VELOCITY,
        SizeConditions.SIZES,
        VELOCITY_EDM_NOISE,
        shown=Shown.LATENT,
        usual=UsualRun(20, 5.0, "euler", "exponential", Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)
#: reads an image, and makes it four times as large. Source: stabilityai/stable-diffusion-x4-upscaler and
#: x4-upscaling.yaml of Stability-AI/stablediffusion; steps, strength and level are those of diffusers' pipeline
SD_X4 = replace(
    SD2,
    name="sd_x4",
    title="the Stable Diffusion x4 upscaler",
    relative="sd2",
    native_pixels=2048,
    scaling_factor=0.08333,
    architectures={**SD2.architectures, Role.DIFFUSION_MODEL: Architecture.DIFFUSION_TRANSFORMER},
    sampling=SamplingFacts(
        Prediction.VELOCITY,
        noise=NoiseFacts(beta_start=0.0001, beta_end=0.02),
        model="sd_x4",
        reads=frozenset({"context", "image", "noise_level"}),
        usual=UsualRun(75, 9.0, "euler", "normal", Guidance.CLASSIFIER_FREE, noise_level=20),
        shown=Shown.PIXELS,
        enlarges=4,
    ),
)

#: every family of UNets that read texts
FAMILIES = (
    SD1, SD2, SDXL, SDXL_REFINER, SSD_1B, VEGA, KOALA_700M, KOALA_1B, PLAYGROUND_25, SD1_INPAINT, SD2_INPAINT,
    SDXL_INPAINT, SD1_INSTRUCT, SDXL_INSTRUCT, COSXL_EDIT, SD_X4,
)  # fmt: skip
