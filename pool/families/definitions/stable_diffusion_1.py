"""Stable Diffusion 1, and its models for inpainting and for editing by instruction. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.unet_facts import PLAIN_PIPELINE, UNET_AND_VAE, UNET_PREFIX, VAE_PREFIX, sd1

SD1 = fam.LocatedFamily(
    name="sd1",
    title="Stable Diffusion 1",
    prefixes={
        fam.Role.TEXT_ENCODER: "cond_stage_model.transformer.",
        fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
        fam.Role.VAE: VAE_PREFIX,
    },
    architectures={fam.Role.TEXT_ENCODER: fam.Architecture.CLIP_TEXT, **UNET_AND_VAE},
    texts={fam.Role.TEXT_ENCODER: fam.PLAIN_TEXT},
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
    sampling=replace(SD1.sampling, image_concat=fam.ImageConcat.INPAINT),
)
#: Source: timbrooks/instruct-pix2pix, and the pipeline of diffusers
SD1_INSTRUCT = replace(
    SD1,
    name="sd1_ip2p",
    title="Stable Diffusion 1 InstructPix2Pix",
    relative="sd1",
    sampling=replace(
        SD1.sampling,
        image_concat=fam.ImageConcat.UNSCALED,
        defaults=fam.SamplingDefaults(100, 7.5, "euler", "normal", fam.Guidance.TEXT_AND_IMAGE, image_cfg=1.5),
    ),
)


def _definition(
    family: fam.LocatedFamily, when: fam.Condition, comfyui: str, pipeline: fam.PipelineFacts
) -> fam.UNetDefinition:
    return fam.UNetDefinition(
        family=family,
        detect=fam.Detection(LDM_UNET, when, comfyui),
        module="UNet2DConditionModel",
        latent="sd1",
        text=fam.TextInputs((fam.Reading("clip_l", 768),), set_name="sd1"),
        lora=fam.UNET,
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
