"""Stable Diffusion 2, its models for inpainting, for depth maps and for variations of an image, the upscaler that was
trained with it, and Lotus, which estimates depths or normals. Torch-free to import.

Legend: B batch, C channels, H W cells of a latent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.unet_facts import (
    MAX_NORM_GROUPS,
    PLAIN_PIPELINE,
    SD1_HEADS,
    UNET_AND_VAE,
    UNET_PREFIX,
    VAE_PREFIX,
    count,
    sd2,
    unclip,
    widths,
)
from modelpool.pool.values.core.errors import UnknownArchitecture

if TYPE_CHECKING:
    from torch import Tensor, nn

#: layers of the published CLIP-H; files for transformers leave out the last one
_CLIP_H_DEPTH = 24
#: width and height of the training images of files that predict velocity. Source: v2-inference-v.yaml,
#: Stability-AI/stablediffusion
VELOCITY_PIXELS = 768
#: 512-pixel models; the 768-pixel ones predict velocity. No shape determines them apart
# (`pool.models.loading.small_tensors`)
SD2 = fam.LocatedFamily(
    name="sd2",
    title="Stable Diffusion 2",
    prefixes={
        fam.Role.TEXT_ENCODER: "cond_stage_model.model.",
        fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
        fam.Role.VAE: VAE_PREFIX,
    },
    architectures={fam.Role.TEXT_ENCODER: fam.Architecture.OPEN_CLIP_TEXT, **UNET_AND_VAE},
    # `layer: penultimate` and the norm after it, of v2-inference.yaml, Stability-AI/stablediffusion
    texts={fam.Role.TEXT_ENCODER: fam.TextFacts(layers_left_out=1, pad_id=fam.OPEN_CLIP_PAD_ID)},
    native_pixels=512,
    scaling_factor=0.18215,
)
#: Source: stabilityai/stable-diffusion-2-inpainting
SD2_INPAINT = replace(
    SD2,
    name="sd2_inpaint",
    title="Stable Diffusion 2 inpainting",
    relative="sd2",
    sampling=replace(SD2.sampling, image_concat=fam.ImageConcat.INPAINT),
)
#: Follows a depth map, which it does not estimate. Source: stabilityai/stable-diffusion-2-depth
SD2_DEPTH = replace(
    SD2,
    name="sd2_depth",
    title="Stable Diffusion 2 depth",
    relative="sd2",
    sampling=replace(SD2.sampling, image_concat=fam.ImageConcat.DEPTH),
)


#: Estimates depths or normals of an image in one step, without noise and without a text. Its files have the UNet alone;
#: text encoder and VAE are from Stable Diffusion 2. Source: LotusDPipeline of EnVision-Research/Lotus
LOTUS_D = replace(
    SD2,
    name="lotus_d",
    title="Lotus D (depth and normals)",
    relative="sd2",
    sampling=fam.SamplingFacts(
        fam.Prediction.CLEAN,
        image_concat=fam.ImageConcat.INSTEAD,
        defaults=fam.SamplingDefaults(1, 1.0, "euler", "normal", fam.Guidance.NONE),
    ),
)
#: width of the class labels: two sines and two cosines
_TASK_WIDTH = 4


def _unclip(name: str, title: str) -> fam.LocatedFamily:
    """Return a family that varies an image: its embedding, with a little noise, is the class labels of the UNet. The
    text may be empty. Source: stabilityai/stable-diffusion-2-1-unclip and its yaml files in
    Stability-AI/stablediffusion; steps and guidance scale from the pipeline of diffusers."""
    return replace(
        SD2,
        name=name,
        title=title,
        relative="sd2",
        prefixes={**SD2.prefixes, fam.Role.VISION_ENCODER: "embedder.model.visual."},
        architectures={**SD2.architectures, fam.Role.VISION_ENCODER: fam.Architecture.VISION_MODEL},
        native_pixels=VELOCITY_PIXELS,
        sampling=fam.SamplingFacts(
            fam.Prediction.VELOCITY,
            defaults=fam.SamplingDefaults(20, 10.0, "euler", "normal", fam.Guidance.CLASSIFIER_FREE),
            vision_use=fam.VisionEncoderUse.CENTER_PROJECTED,
            image_labels=fam.ImageLabels(),
        ),
    )


#: they differ in the vision encoder: CLIP L of OpenAI, and CLIP H
SD21_UNCLIP_L = _unclip("sd21_unclip_l", "Stable Diffusion 2.1 unCLIP L")
SD21_UNCLIP_H = _unclip("sd21_unclip_h", "Stable Diffusion 2.1 unCLIP H")


#: Upscales an image by 4: reads the image itself, -1 to 1, with noise. Source:
#: stabilityai/stable-diffusion-x4-upscaler and x4-upscaling.yaml of Stability-AI/stablediffusion; steps, guidance scale
#: and noise level from the pipeline of diffusers
SD_X4 = replace(
    SD2,
    name="sd_x4",
    title="the Stable Diffusion x4 upscaler",
    relative="sd2",
    native_pixels=2048,
    scaling_factor=0.08333,
    architectures={**SD2.architectures, fam.Role.DIFFUSION_MODEL: fam.Architecture.DIFFUSION_TRANSFORMER},
    sampling=fam.SamplingFacts(
        fam.Prediction.VELOCITY,
        noise=fam.NoiseFacts(beta_start=0.0001, beta_end=0.02),
        model="sd_x4",
        reads=frozenset({"context", "image", "noise_level"}),
        defaults=fam.SamplingDefaults(75, 9.0, "euler", "normal", fam.Guidance.CLASSIFIER_FREE, noise_level=20),
        image_concat=fam.ImageConcat.PIXELS,
        enlarges=4,
    ),
)


def upscaler_config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.UNet2DConditionModel`.

    Raises UnknownArchitecture for a UNet with different down and up paths: it was pruned.
    """
    channels = widths(shapes, "conv1")
    levels = range(len(channels))
    depths = [count(shapes, f"down_blocks.{level}.attentions.0.transformer_blocks.") for level in levels]
    up_depths = [count(shapes, f"up_blocks.{level}.attentions.0.transformer_blocks.") for level in reversed(levels)]
    middle = count(shapes, "mid_block.attentions.0.transformer_blocks.")
    if up_depths != depths or not middle:
        raise UnknownArchitecture(
            f"UNet: found {depths} transformer blocks in the down path, {middle} in the middle and {up_depths} in the "
            "up path, expected equal paths and some in the middle"
        )
    return {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": count(shapes, "down_blocks.0.resnets."),
        "cross_attention_dim": found["context_dim"],
        # for historical reasons the argument is the number of heads: as many as Stable Diffusion 1 has. Source:
        # x4-upscaling.yaml of Stability-AI/stablediffusion
        "attention_head_dim": SD1_HEADS,
        "use_linear_projection": bool(found["use_linear_in_transformer"]),
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "up_block_types": tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)),
        "transformer_layers_per_block": (*(depth or 1 for depth in depths[:-1]), depths[-1] or middle),
        "only_cross_attention": tuple(_reads_text_alone(shapes, level, channels) for level in levels),
        "norm_num_groups": max(1, min(MAX_NORM_GROUPS, min(channels) // 4)),
        "num_class_embeds": shapes["class_embedding.weight"][0],
    }


def _reads_text_alone(shapes: fam.Shapes, level: int, channels: tuple[int, ...]) -> bool:
    """Return whether the second attention of a level reads the text, by the width of its keys.

    Ambiguous if the text is as wide as the level; no published model has such a level.
    """
    keys = shapes.get(f"down_blocks.{level}.attentions.0.transformer_blocks.0.attn1.to_k.weight")
    return keys is not None and keys[1] != channels[level]


def upscaler_forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity. "image" is concatenated along channels; "noise_level" is the noise on it. Both it and the
    latent are already scaled for the model."""
    import torch

    return fam.sample_of(
        module(
            torch.cat((x_BCHW, kwargs["image"]), dim=1),
            level_B,
            encoder_hidden_states=kwargs["context"],
            class_labels=kwargs["noise_level"],
            return_dict=False,
        )
    )


def _definition(
    family: fam.LocatedFamily,
    when: fam.Condition,
    comfyui: str,
    pipeline: fam.PipelineFacts | None,
    build: fam.ModelBuild | None = None,
) -> fam.UNetDefinition:
    return fam.UNetDefinition(
        family=family,
        detect=fam.Detection(LDM_UNET, when, comfyui),
        module="UNet2DConditionModel",
        latent="sd1" if build is None else family.name,
        text=fam.TextInputs(
            (fam.Reading("clip_h", 1024, clip_pad_id=fam.OPEN_CLIP_PAD, layers_left_out=1, depth=_CLIP_H_DEPTH),),
            set_name="sd2",
        ),
        lora=fam.UNET,
        pipeline=pipeline,
        build=build,
        velocity_pixels=VELOCITY_PIXELS if family is SD2 else 0,
    )


_UNCLIP_PIPELINE = fam.PipelineFacts(
    "StableUnCLIPImg2ImgPipeline",
    {**PLAIN_PIPELINE.folders, fam.Role.VISION_ENCODER: "image_encoder"},
    noisy="image_noising_scheduler",
    processor="feature_extractor",
    libraries={"image_normalizer": "stable_diffusion"},
)


def _varying(family: fam.LocatedFamily, comfyui: str, width: int) -> fam.UNetDefinition:
    """Return a family with an embedding of `width` and the noise level, which is as wide, as class labels."""
    defined = _definition(family, unclip(adm_in_channels=2 * width), comfyui, _UNCLIP_PIPELINE)
    return replace(defined, labels_width=width)


FAMILIES = (
    _definition(
        SD_X4,
        sd2(in_channels=7),
        "SD_X4Upscaler",
        fam.PipelineFacts(
            "StableDiffusionUpscalePipeline",
            PLAIN_PIPELINE.folders,
            {
                "safety_checker": fam.NOTHING,
                "feature_extractor": fam.NOTHING,
                "watermarker": fam.NOTHING,
                "max_noise_level": 350,
            },
            noisy="low_res_scheduler",
        ),
        fam.ModelBuild("UNet2DConditionModel", upscaler_config, "sd1", upscaler_forward, SD_X4.dtypes),
    ),
    _definition(
        SD2_INPAINT, sd2(in_channels=9), "SD20", replace(PLAIN_PIPELINE, name="StableDiffusionInpaintPipeline")
    ),
    _definition(
        SD2_DEPTH,
        sd2(in_channels=5),
        "SD20",
        fam.PipelineFacts(
            "StableDiffusionDepth2ImgPipeline",
            PLAIN_PIPELINE.folders,
            missing={
                "depth_estimator": "depth maps are given, expected that of stabilityai/stable-diffusion-2-depth",
                "feature_extractor": "depth maps are given, expected that of stabilityai/stable-diffusion-2-depth",
            },
        ),
    ),
    replace(_varying(SD21_UNCLIP_L, "SD21UnclipL", 768), vision_encoder="clip_vision_l"),
    _varying(SD21_UNCLIP_H, "SD21UnclipH", 1024),
    # diffusers has no pipeline for it: folders cannot be saved
    _definition(LOTUS_D, unclip(adm_in_channels=_TASK_WIDTH), "LotusD", None),
    _definition(SD2, sd2(), "SD20", PLAIN_PIPELINE),
)
