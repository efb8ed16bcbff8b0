"""Stable Diffusion XL: the base model, its refiner, models with fewer blocks, models retrained with other noise, and
models for inpainting and for editing by instruction. Torch-free to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.unet_facts import UNET_AND_VAE, UNET_FOLDERS, UNET_PREFIX, VAE_PREFIX, refiner, sdxl

SDXL = fam.LocatedFamily(
    name="sdxl",
    title="Stable Diffusion XL",
    prefixes={
        fam.Role.TEXT_ENCODER: "conditioner.embedders.0.transformer.",
        fam.Role.TEXT_ENCODER_2: "conditioner.embedders.1.model.",
        fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
        fam.Role.VAE: VAE_PREFIX,
    },
    architectures={
        fam.Role.TEXT_ENCODER: fam.Architecture.CLIP_TEXT,
        fam.Role.TEXT_ENCODER_2: fam.Architecture.OPEN_CLIP_TEXT,
        **UNET_AND_VAE,
    },
    # `layer_idx: 11`, `layer: penultimate`, `legacy: False` of sd_xl_base.yaml, Stability-AI/generative-models
    texts={
        fam.Role.TEXT_ENCODER: fam.TextFacts(layers_left_out=1, final_norm=False),
        fam.Role.TEXT_ENCODER_2: fam.TextFacts(1, final_norm=False, pad_id=fam.OPEN_CLIP_PAD_ID, gives_pooled=True),
    },
    native_pixels=1024,
    # `scale_factor` of the same file
    scaling_factor=0.13025,
    sampling=fam.SamplingFacts(size_conditions=fam.MicroConditioning.SIZES, seen_as=fam.SeenAs.POOLED),
)
SDXL_REFINER = fam.LocatedFamily(
    name="sdxl_refiner",
    title="the Stable Diffusion XL refiner",
    prefixes={
        fam.Role.TEXT_ENCODER: "conditioner.embedders.0.model.",
        fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
        fam.Role.VAE: VAE_PREFIX,
    },
    architectures={fam.Role.TEXT_ENCODER: fam.Architecture.OPEN_CLIP_TEXT, **UNET_AND_VAE},
    texts={fam.Role.TEXT_ENCODER: fam.TextFacts(1, final_norm=False, pad_id=fam.OPEN_CLIP_PAD_ID, gives_pooled=True)},
    native_pixels=1024,
    scaling_factor=0.13025,
    sampling=fam.SamplingFacts(size_conditions=fam.MicroConditioning.AESTHETICS),
)


def _relative(name: str, title: str) -> fam.LocatedFamily:
    return replace(SDXL, name=name, title=title, relative="sdxl")


# SDXL with blocks removed, distilled from SDXL. Text encoders, VAE and noise are SDXL's.
#: Fewer transformer blocks, with different counts in the down and up path; no attention in the middle block. Source:
#: segmind/SSD-1B; Gupta et al. 2024, "Progressive Knowledge Distillation of Stable Diffusion XL"
SSD_1B = _relative("ssd_1b", "SSD-1B")
#: Fewer still. Source: segmind/Segmind-Vega, and the same paper
VEGA = _relative("vega", "Segmind Vega")
#: One residual block per level, 5 or 6 transformer blocks at the last; the small one has no middle block. Source:
#: etri-vilab/koala-700m and koala-1b; Lee et al. 2023, "KOALA"
KOALA_700M = _relative("koala_700m", "KOALA 700M")
KOALA_1B = _relative("koala_1b", "KOALA 1B")
#: SDXL retrained with the noise, the prediction and the preconditioning of Karras et al. 2022 ("EDM"), on latents
#: normalised per channel. Files have mean and deviation as tensors; these are the published ones. Source: scheduler
#: and vae of playgroundai/playground-v2.5-1024px-aesthetic; Li et al. 2024, "Playground v2.5"
PLAYGROUND_25 = replace(
    _relative("playground_25", "Playground 2.5"),
    scaling_factor=fam.LATENT_FORMATS["playground_25"].scale,
    latent_means=fam.LATENT_FORMATS["playground_25"].mean,
    latent_deviations=fam.LATENT_FORMATS["playground_25"].std,
    sampling=fam.SamplingFacts(
        fam.Prediction.EDM, fam.MicroConditioning.SIZES, fam.NoiseFacts(fam.NoiseKind.EDM, 0.002, 80.0, 0.5)
    ),
)
#: default noise of velocity models (CosXL), unless a file states its sigma range. Source: scheduler of
#: stabilityai/cosxl
VELOCITY_EDM_NOISE = fam.NoiseFacts(fam.NoiseKind.EDM, 0.002, 120.0)
#: Source: diffusers/stable-diffusion-xl-1.0-inpainting-0.1
SDXL_INPAINT = replace(
    _relative("sdxl_inpaint", "Stable Diffusion XL inpainting"),
    sampling=replace(SDXL.sampling, image_concat=fam.ImageConcat.INPAINT),
)
#: Source: diffusers/sdxl-instructpix2pix-768, and the pipeline of diffusers
SDXL_INSTRUCT = replace(
    _relative("sdxl_ip2p", "Stable Diffusion XL InstructPix2Pix"),
    native_pixels=768,
    sampling=replace(
        SDXL.sampling,
        image_concat=fam.ImageConcat.UNSCALED,
        defaults=fam.SamplingDefaults(100, 5.0, "euler", "normal", fam.Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)
#: CosXL fine-tuned to edit images: the image latent is scaled like the sampled latent. Source: stabilityai/cosxl,
#: and `is_cosxl_edit` of diffusers' StableDiffusionXLInstructPix2PixPipeline; steps from the example of diffusers
COSXL_EDIT = replace(
    _relative("cosxl_edit", "CosXL edit"),
    sampling=fam.SamplingFacts(
        fam.Prediction.VELOCITY,
        fam.MicroConditioning.SIZES,
        VELOCITY_EDM_NOISE,
        image_concat=fam.ImageConcat.LATENT,
        defaults=fam.SamplingDefaults(20, 5.0, "euler", "exponential", fam.Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)

_PIPELINE = fam.PipelineFacts(
    "StableDiffusionXLPipeline",
    {fam.Role.TEXT_ENCODER: "text_encoder", fam.Role.TEXT_ENCODER_2: "text_encoder_2", **UNET_FOLDERS},
    {"feature_extractor": fam.NOTHING, "image_encoder": fam.NOTHING, "force_zeros_for_empty_prompt": True},
)
_EDITING = replace(
    _PIPELINE,
    name="StableDiffusionXLInstructPix2PixPipeline",
    entries={"force_zeros_for_empty_prompt": True, "is_cosxl_edit": False},
)
# the refiner's one text encoder is the second one of SDXL
_REFINING = fam.PipelineFacts(
    "StableDiffusionXLImg2ImgPipeline",
    {fam.Role.TEXT_ENCODER: "text_encoder_2", **UNET_FOLDERS},
    {
        "text_encoder": fam.NOTHING,
        "tokenizer": fam.NOTHING,
        "feature_extractor": fam.NOTHING,
        "image_encoder": fam.NOTHING,
        "force_zeros_for_empty_prompt": False,
        "requires_aesthetics_score": True,
    },
)


def _join(read: Sequence[fam.ReadText]) -> fam.Joined:
    """The states of both encoders along the width, and the pooled vector of the second."""
    import torch

    small, large = read
    return {"context": torch.cat((small.context_LD, large.context_LD), -1), "pooled": large.pooled_V}


_BASE = fam.UNetDefinition(
    family=SDXL,
    detect=fam.Detection(LDM_UNET, sdxl(), "SDXL"),
    module="UNet2DConditionModel",
    latent="sdxl",
    text=fam.TextInputs(
        (fam.Reading("clip_l", 768, layers_left_out=1, final_norm=False), fam.SDXL_CLIP_G),
        set_name="sdxl",
        join=fam.TextJoin(_join),
    ),
    lora=fam.UNET,
    pipeline=_PIPELINE,
    edm_noise=VELOCITY_EDM_NOISE,
    looks_like=SDXL_REFINER.name,
    folder_mark=fam.FolderMark(SDXL_REFINER.name, folder="text_encoder"),
    untrained_noise={fam.NoiseKind.LINEAR: "scaled_linear, which SDXL was trained with"},
)
#: what the relatives do not share
_OWN: Mapping[str, Any] = {"edm_noise": None, "looks_like": "", "folder_mark": None, "untrained_noise": {}}


def _variant(
    family: fam.LocatedFamily,
    comfyui: str,
    when: fam.Condition,
    pipeline: fam.PipelineFacts | None = None,
    extra_keys: tuple[str, ...] = (),
) -> fam.UNetDefinition:
    return replace(
        _BASE, family=family, detect=fam.Detection(LDM_UNET, when, comfyui, extra_keys), pipeline=pipeline, **_OWN
    )


FAMILIES = (
    replace(
        _variant(PLAYGROUND_25, "SDXL", sdxl(), extra_keys=("edm_mean", "edm_std")),
        latent="playground_25",
        folder_mark=fam.FolderMark(SDXL.name, edm=True),
    ),
    replace(
        _variant(
            COSXL_EDIT,
            "SDXL_instructpix2pix",
            sdxl(in_channels=8),
            replace(_EDITING, entries={**_EDITING.entries, "is_cosxl_edit": True}),
            extra_keys=("edm_vpred.sigma_max",),
        ),
        folder_mark=fam.FolderMark(SDXL_INSTRUCT.name, entry="is_cosxl_edit"),
        edm_noise=VELOCITY_EDM_NOISE,
    ),
    _variant(SDXL_INSTRUCT, "SDXL_instructpix2pix", sdxl(in_channels=8), _EDITING),
    _variant(SSD_1B, "SSD1B", sdxl(transformer_depth=(0, 0, 2, 2, 4, 4))),
    _variant(VEGA, "Segmind_Vega", sdxl(transformer_depth=(0, 0, 1, 1, 2, 2))),
    _variant(KOALA_700M, "KOALA_700M", sdxl(transformer_depth=(0, 2, 5))),
    _variant(KOALA_1B, "KOALA_1B", sdxl(transformer_depth=(0, 2, 6))),
    replace(
        _variant(SDXL_REFINER, "SDXLRefiner", refiner, _REFINING),
        text=fam.TextInputs((fam.SDXL_CLIP_G,), set_name="sdxl_refiner"),
        looks_like=SDXL.name,
        folder_mark=fam.FolderMark(SDXL.name, lacks="text_encoder"),
    ),
    _variant(SDXL_INPAINT, "SDXL", sdxl(in_channels=9), replace(_PIPELINE, name="StableDiffusionXLInpaintPipeline")),
    _BASE,
)
