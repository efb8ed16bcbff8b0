"""Stable Diffusion 1, and its models for inpainting and for editing by instruction. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts.unet_facts import PLAIN_PIPELINE, UNET_AND_VAE, UNET_PREFIX, VAE_PREFIX, sd1
from modelpool.pool.families.parts.vocabulary import (
    PLAIN_TEXT,
    UNET,
    Architecture,
    Condition,
    Detection,
    Guidance,
    ImageConcat,
    LocatedFamily,
    PipelineFacts,
    Reading,
    Role,
    SamplingDefaults,
    TextInputs,
    UNetDefinition,
)

SD1 = LocatedFamily(
    name="sd1",
    title="Stable Diffusion 1",
    prefixes={
        Role.TEXT_ENCODER: "cond_stage_model.transformer.",
        Role.DIFFUSION_MODEL: UNET_PREFIX,
        Role.VAE: VAE_PREFIX,
    },
    architectures={Role.TEXT_ENCODER: Architecture.CLIP_TEXT, **UNET_AND_VAE},
    texts={Role.TEXT_ENCODER: PLAIN_TEXT},
    native_pixels=512,
    # std of the VAE's latents on its training images, inverted; the constant of the published SD1 configuration
    scaling_factor=0.18215,
)
#: Source: runwayml/stable-diffusion-inpainting
SD1_INPAINT = replace(
    SD1,
    name="sd1_inpaint",
    title="Stable Diffusion 1 inpainting",
    relative="sd1",
    sampling=replace(SD1.sampling, image_concat=ImageConcat.INPAINT),
)
#: Source: timbrooks/instruct-pix2pix, and the pipeline of diffusers
SD1_INSTRUCT = replace(
    SD1,
    name="sd1_ip2p",
    title="Stable Diffusion 1 InstructPix2Pix",
    relative="sd1",
    sampling=replace(
        SD1.sampling,
        image_concat=ImageConcat.UNSCALED,
        defaults=SamplingDefaults(100, 7.5, "euler", "normal", Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)


def _definition(family: LocatedFamily, when: Condition, comfyui: str, pipeline: PipelineFacts) -> UNetDefinition:
    return UNetDefinition(
        family=family,
        detect=Detection(LDM_UNET, when, comfyui),
        module="UNet2DConditionModel",
        latent="sd1",
        text=TextInputs((Reading("clip_l", 768),), set_name="sd1"),
        lora=UNET,
        pipeline=pipeline,
    )


FAMILIES = (
    _definition(
        SD1_INSTRUCT,
        sd1(in_channels=8),
        "SD15_instructpix2pix",
        replace(PLAIN_PIPELINE, name="StableDiffusionInstructPix2PixPipeline"),
    ),
    _definition(
        SD1_INPAINT, sd1(in_channels=9), "SD15", replace(PLAIN_PIPELINE, name="StableDiffusionInpaintPipeline")
    ),
    _definition(SD1, sd1(), "SD15", PLAIN_PIPELINE),
)
