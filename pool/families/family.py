"""The families of UNet models that run, as values. Torch-free.

A family states where its components are in a file, which architecture each has, and the facts that no tensor tells.
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
    ImageConcat,
    MicroConditioning,
    NoiseFacts,
    NoiseKind,
    Prediction,
    SamplingDefaults,
    SamplingFacts,
)
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role


class Architecture(Enum):
    """The way to build a component (`pool.models.common.module_classes`), and the key naming of its file."""

    CLIP_TEXT = "CLIP text model, in the naming of transformers"
    OPEN_CLIP_TEXT = "CLIP text model with a projection, in the naming of open_clip"
    OPEN_CLIP_TEXT_ALONE = "CLIP text model without a projection, in the naming of open_clip"
    LDM_UNET = "UNet of latent diffusion"
    CLIP_TEXT_PROJECTED = "CLIP text model with a projection, in the naming of transformers"
    DIFFUSERS_UNET = "UNet of latent diffusion, in the naming of diffusers"
    VAE = "autoencoder, built by pool.models.vae"
    DIFFUSION_TRANSFORMER = "diffusion model, built by pool.models.diffusion"
    AUDIO_TRANSFORMER = "diffusion model, with a small model that embeds seconds"
    TEXT_MODEL = "text model, built by pool.models.text"
    VISION_MODEL = "CLIP vision model, built by pool.models.vision"
    TEXT_VISION = "vision part of a text encoder, built by pool.models.vision"


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint.

    name           short and stable, "sd1"
    title          for human readers
    prefixes       key prefix of each component; text encoders in the order in which their states are concatenated
    architectures  how each component is built
    texts          how each text encoder is read
    native_pixels  width and height of the training images, if the file does not state them
    native_sides   width and height, if they differ
    latent_shift, latent_means, latent_deviations  as in `LatentFacts`
    latent_format  name of its latents (`pool.detection.latent_formats`), if the VAE is to be checked
    shifts_latent  whether a shift that the configuration of a VAE states applies
    text_set       how the text encoders read prompts: a key of `MEMBERS` of `pool.detection.text_encoders`; empty if
                   `texts` states it
    dtypes         names of the compute dtypes of the diffusion model, best first
    relative       family that it was pruned or fine-tuned from; LoRAs use the same names for its weights. Empty for
                   none
    configs        for diffusers folders: the arguments of each component's class
    extra_prefixes  key prefixes of further tensors of a component
    latent         the latents of a model without a VAE; None if the VAE defines them
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
    extra_prefixes: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    latent: LatentFacts | None = None
    shifts_latent: bool = True

    @property
    def text_encoders(self) -> tuple[Role, ...]:
        """The components that read a prompt."""
        return tuple(role for role in self.prefixes if role.is_text_encoder)

    def shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the component's part of `shapes`, with the keys of the file."""
        prefix, extra = self.prefixes[role], self.extra_prefixes.get(role, ())
        kept = prefix + _PROJECTION if self.architectures[role] is Architecture.CLIP_TEXT_PROJECTED else None
        # # a diffusion model without prefix gets all keys that no other component has
        others = () if prefix else tuple(other for other in self.prefixes.values() if other)
        found: dict[str, Shape] = {}
        for key, shape in shapes.items():
            is_own = key.startswith(prefix) and not (others and key.startswith(others))
            if (is_own and (key == kept or self._is_weight(role, key, prefix))) or (extra and key.startswith(extra)):
                found[key] = shape
        return found

    def _is_weight(self, role: Role, key: str, prefix: str) -> bool:
        if self.architectures[role] is Architecture.TEXT_MODEL:
            seeing = (*SEEING_PARTS, *_LLAVA_PARTS)
            return not key.endswith(_TEXT_MODEL_LEFTOVERS) and not key.removeprefix(prefix).startswith(seeing)
        return is_weight(role, key, prefix)

    def bare_shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return `shapes_of` with keys without the component's prefix."""
        return {self.bare_key(role, key): shape for key, shape in self.shapes_of(role, shapes).items()}

    def bare_key(self, role: Role, key: str) -> str:
        """Return a component's `key` without its prefix."""
        bare = key.removeprefix(self.prefixes[role])
        # # some files have this level before CLIP's keys, some do not
        return bare.removeprefix("text_model.") if self.architectures[role] in _TRANSFORMERS_TEXTS else bare


#: parts of autoencoder files that only training needs
_VAE_LEFTOVERS = ("loss.", "model_ema.")
#: position tables, a mask and a training temperature: not weights
_PROJECTION = "text_projection.weight"
_TEXT_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", _PROJECTION)
#: the same, and serialized tokenizers
_TEXT_MODEL_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", "spiece_model", "tekken_model", "tokenizer_json")
#: vision part of a text model, as files of different versions name it: a component of its own, or ignored
SEEING_PARTS = ("visual.", "model.visual.")
#: the same for LLaVA
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.")
#: text models in the naming of transformers, with or without the `text_model` level
_TRANSFORMERS_TEXTS = (Architecture.CLIP_TEXT, Architecture.CLIP_TEXT_PROJECTED)


def is_weight(role: Role, key: str, prefix: str) -> bool:
    """Return whether `key` is a weight of the component, not a table or a leftover of its training."""
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
#: 512-pixel models; the 768-pixel ones predict velocity. No shape tells them apart (`pool.loading.small_tensors`)
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
    sampling=SamplingFacts(size_conditions=MicroConditioning.SIZES),
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
    sampling=SamplingFacts(size_conditions=MicroConditioning.AESTHETICS),
)
#: training size of SD2 files that predict velocity. Source: v2-inference-v.yaml, Stability-AI/stablediffusion
SD2_VELOCITY_PIXELS = 768

# SDXL with blocks removed, distilled from SDXL. Text encoders, VAE and noise are SDXL's.
#: Fewer transformer blocks, with different counts in the down and up path; no attention in the middle block. Source:
#: segmind/SSD-1B; Gupta et al. 2024, "Progressive Knowledge Distillation of Stable Diffusion XL"
SSD_1B = replace(SDXL, name="ssd_1b", title="SSD-1B", relative="sdxl")
#: Fewer still. Source: segmind/Segmind-Vega, and the same paper
VEGA = replace(SDXL, name="vega", title="Segmind Vega", relative="sdxl")
#: One residual block per level, 5 or 6 transformer blocks at the last; the small one has no middle block. Source:
#: etri-vilab/koala-700m and koala-1b; Lee et al. 2023, "KOALA"
KOALA_700M = replace(SDXL, name="koala_700m", title="KOALA 700M", relative="sdxl")
KOALA_1B = replace(SDXL, name="koala_1b", title="KOALA 1B", relative="sdxl")
#: SDXL retrained with the noise, the prediction and the preconditioning of Karras et al. 2022 ("EDM"), on latents
#: normalised per channel. Files have mean and deviation as tensors; these are the published ones. Source: scheduler
#: and vae of playgroundai/playground-v2.5-1024px-aesthetic; Li et al. 2024, "Playground v2.5"
PLAYGROUND_25 = replace(
    SDXL,
    name="playground_25",
    title="Playground 2.5",
    relative="sdxl",
    scaling_factor=0.5,
    latent_means=(-1.6574, 1.886, -1.383, 2.5155),
    latent_deviations=(8.4927, 5.9022, 6.5498, 5.2299),
    sampling=SamplingFacts(Prediction.EDM, MicroConditioning.SIZES, NoiseFacts(NoiseKind.EDM, 0.002, 80.0, 0.5)),
)
#: Default noise of velocity models whose files may state their sigma range (CosXL). Source: scheduler of
#: stabilityai/cosxl
VELOCITY_EDM_NOISE = NoiseFacts(NoiseKind.EDM, 0.002, 120.0)

# Inpainting models. Source: runwayml/stable-diffusion-inpainting, stabilityai/stable-diffusion-2-inpainting,
# diffusers/stable-diffusion-xl-1.0-inpainting-0.1
_FILLS = {
    name: replace(family.sampling, image_concat=ImageConcat.INPAINT) for name, family in (("sd1", SD1), ("sdxl", SDXL))
}
SD1_INPAINT = replace(
    SD1, name="sd1_inpaint", title="Stable Diffusion 1 inpainting", relative="sd1", sampling=_FILLS["sd1"]
)
SD2_INPAINT = replace(
    SD2, name="sd2_inpaint", title="Stable Diffusion 2 inpainting", relative="sd2", sampling=_FILLS["sd1"]
)
SDXL_INPAINT = replace(
    SDXL, name="sdxl_inpaint", title="Stable Diffusion XL inpainting", relative="sdxl", sampling=_FILLS["sdxl"]
)

# Models that edit an image by instruction. Source: timbrooks/instruct-pix2pix, diffusers/sdxl-instructpix2pix-768,
# and the pipelines of diffusers
_INSTRUCTED = SamplingDefaults(100, 7.5, "euler", "normal", Guidance.TEXT_AND_IMAGE, image_cfg=1.5)
SD1_INSTRUCT = replace(
    SD1,
    name="sd1_ip2p",
    title="Stable Diffusion 1 InstructPix2Pix",
    relative="sd1",
    sampling=replace(SD1.sampling, image_concat=ImageConcat.UNSCALED, defaults=_INSTRUCTED),
)
SDXL_INSTRUCT = replace(
    SDXL,
    name="sdxl_ip2p",
    title="Stable Diffusion XL InstructPix2Pix",
    relative="sdxl",
    native_pixels=768,
    sampling=replace(SDXL.sampling, image_concat=ImageConcat.UNSCALED, defaults=replace(_INSTRUCTED, cfg=5.0)),
)
#: CosXL fine-tuned to edit images: the image latent is scaled like the sampled latent. Source: stabilityai/cosxl,
#: and `is_cosxl_edit` of diffusers' StableDiffusionXLInstructPix2PixPipeline; steps from the example of diffusers
COSXL_EDIT = replace(
    SDXL,
    name="cosxl_edit",
    title="CosXL edit",
    relative="sdxl",
    sampling=SamplingFacts(
        Prediction.VELOCITY,
        MicroConditioning.SIZES,
        VELOCITY_EDM_NOISE,
        image_concat=ImageConcat.LATENT,
        defaults=SamplingDefaults(20, 5.0, "euler", "exponential", Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)
#: Upscales an image by 4. Source: stabilityai/stable-diffusion-x4-upscaler and x4-upscaling.yaml of
#: Stability-AI/stablediffusion; steps, guidance scale and noise level from the pipeline of diffusers
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
        defaults=SamplingDefaults(75, 9.0, "euler", "normal", Guidance.CLASSIFIER_FREE, noise_level=20),
        image_concat=ImageConcat.PIXELS,
        enlarges=4,
    ),
)

#: every UNet family that reads text
FAMILIES = (
    SD1, SD2, SDXL, SDXL_REFINER, SSD_1B, VEGA, KOALA_700M, KOALA_1B, PLAYGROUND_25, SD1_INPAINT, SD2_INPAINT,
    SDXL_INPAINT, SD1_INSTRUCT, SDXL_INSTRUCT, COSXL_EDIT, SD_X4,
)  # fmt: skip
