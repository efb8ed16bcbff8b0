"""Stable Video Diffusion and SV3D: UNets that generate a video from an image and read no text. Torch-free to import.

Legend: B batch, C channels, T frames, H W cells of a latent.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.unet_facts import (
    NUMBER_WIDTH,
    UNET_FOLDERS,
    UNET_HEAD_WIDTH,
    UNET_PREFIX,
    VAE_PREFIX,
    count,
    video,
    widths,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_MODULE, _VIEWED_MODULE = "UNetSpatioTemporalConditionModel", "ViewedUNet"

_OUTER = (
    ("time_embed.0.", "time_embedding.linear_1."),
    ("time_embed.2.", "time_embedding.linear_2."),
    ("label_emb.0.0.", "add_embedding.linear_1."),
    ("label_emb.0.2.", "add_embedding.linear_2."),
    ("input_blocks.0.0.", "conv_in."),
    ("out.0.", "conv_norm_out."),
    ("out.2.", "conv_out."),
)
_RESIDUAL = (
    ("in_layers.0.", "norm1."),
    ("in_layers.2.", "conv1."),
    ("emb_layers.1.", "time_emb_proj."),
    ("out_layers.0.", "norm2."),
    ("out_layers.3.", "conv2."),
    ("skip_connection.", "conv_shortcut."),
)
_ATTENTION = (
    ("time_stack.", "temporal_transformer_blocks."),
    ("time_pos_embed.0.", "time_pos_embed.linear_1."),
    ("time_pos_embed.2.", "time_pos_embed.linear_2."),
)


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the names in files of Stable Video Diffusion and SV3D to names in diffusers' video UNet.

    Latent diffusion's names, with a temporal residual block and temporal transformer blocks next to each spatial one.
    Tensors are renamed, and the order of blocks is read off the keys. Source: the key lists of the published files
    (tests/golden/detection_keys.json.gz) and of the module.
    """
    places = _places(tensors)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        outer = next((ours + key.removeprefix(theirs) for theirs, ours in _OUTER if key.startswith(theirs)), None)
        if outer is not None:
            converted[outer] = tensor
            continue
        found = re.fullmatch(r"((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\.(.+)", key)
        if found is not None and found[1] in places:
            converted[_of_block(places[found[1]], found[2])] = tensor
    return converted


def _of_block(place: str, name: str) -> str:
    if ".resnets." in place:
        if name.startswith("time_mixer."):
            return f"{place}.{name}"
        half = "temporal_res_block" if name.startswith("time_stack.") else "spatial_res_block"
        return f"{place}.{half}.{_renamed(name.removeprefix('time_stack.'), _RESIDUAL)}"
    if ".attentions." in place:
        return f"{place}.{_renamed(name, _ATTENTION)}"
    return f"{place}.{name.removeprefix('op.').removeprefix('conv.')}" if "samplers." in place else f"{place}.{name}"


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    return next((ours + name.removeprefix(theirs) for theirs, ours in rules if name.startswith(theirs)), name)


def _places(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return diffusers' name of each part of a block, by the name in the file: "input_blocks.1.0" and so on."""
    places = {"middle_block.0": "mid_block.resnets.0", "middle_block.2": "mid_block.resnets.1"}
    places["middle_block.1"] = "mid_block.attentions.0"
    level, layer = 0, 0
    for number in range(1, _blocks(tensors, "input_blocks")):
        stem = f"input_blocks.{number}"
        if f"{stem}.0.op.weight" in tensors:
            places[f"{stem}.0"] = f"down_blocks.{level}.downsamplers.0.conv"
            level, layer = level + 1, 0
            continue
        places[f"{stem}.0"] = f"down_blocks.{level}.resnets.{layer}"
        places[f"{stem}.1"] = f"down_blocks.{level}.attentions.{layer}"
        layer += 1
    level, layer = 0, 0
    for number in range(_blocks(tensors, "output_blocks")):
        stem = f"output_blocks.{number}"
        places[f"{stem}.0"] = f"up_blocks.{level}.resnets.{layer}"
        places[f"{stem}.1"] = f"up_blocks.{level}.attentions.{layer}"
        layer += 1
        for part in ("1", "2"):
            if f"{stem}.{part}.conv.weight" in tensors:
                places[f"{stem}.{part}"] = f"up_blocks.{level}.upsamplers.0.conv"
                level, layer = level + 1, 0
    return places


def _blocks(tensors: dict[str, Tensor], beginning: str) -> int:
    return len({key.split(".")[1] for key in tensors if key.startswith(beginning + ".")})


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.UNetSpatioTemporalConditionModel`."""
    sizes: dict[str, Any] = dict(found)
    channels = widths(shapes, "spatial_res_block.conv1")
    depths = [count(shapes, f"down_blocks.{level}.attentions.0.transformer_blocks.") for level in range(len(channels))]
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "block_out_channels": channels,
        "layers_per_block": count(shapes, "down_blocks.0.resnets."),
        "cross_attention_dim": sizes["context_dim"],
        "num_attention_heads": tuple(max(1, width // UNET_HEAD_WIDTH) for width in channels),
        "transformer_layers_per_block": tuple(depth or 1 for depth in depths),
        "addition_time_embed_dim": NUMBER_WIDTH,
        "projection_class_embeddings_input_dim": sizes["adm_in_channels"],
        "down_block_types": tuple(_spatio_temporal("Down", depth) for depth in depths),
        "up_block_types": tuple(_spatio_temporal("Up", depth) for depth in reversed(depths)),
    }


def _spatio_temporal(path: str, depth: int) -> str:
    return f"{'CrossAttn' if depth else ''}{path}BlockSpatioTemporal"


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity; `level_B` is a quarter of the logarithm of sigma.

    Reads image latents ("image"), for one frame or for each, already scaled for the model as the latent is; the image
    state ("image_context"); and "numbers": frame rate less one, amount of motion and noise on the image, or only the
    last; for SV3D p the noise, and height and direction of the view, per frame.
    """
    import torch

    frames = x_BCTHW.shape[2]
    image = kwargs["image"]
    image_BCTHW = image.unsqueeze(2) if image.dim() == x_BCTHW.dim() - 1 else image
    joined = torch.cat((x_BCTHW, image_BCTHW.expand(-1, -1, frames, -1, -1)), dim=1)
    out_BTCHW = fam.sample_of(
        module(
            joined.transpose(1, 2),
            level_B,
            encoder_hidden_states=kwargs["image_context"],
            added_time_ids=kwargs["numbers"],
            return_dict=False,
        )
    )
    return out_BTCHW.transpose(1, 2)


def _family(
    name: str,
    title: str,
    sides: tuple[int, int],
    facts: fam.VideoFacts,
    vae_prefix: str,
    defaults: fam.SamplingDefaults,
) -> fam.LocatedFamily:
    """Return a family that reads an image, as a latent and through a vision encoder."""
    return fam.LocatedFamily(
        name=name,
        title=title,
        prefixes={
            fam.Role.VISION_ENCODER: "conditioner.embedders.0.open_clip.model.visual.",
            fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
            fam.Role.VAE: vae_prefix,
        },
        architectures={
            fam.Role.VISION_ENCODER: fam.Architecture.VISION_MODEL,
            fam.Role.DIFFUSION_MODEL: fam.Architecture.DIFFUSION_TRANSFORMER,
            fam.Role.VAE: fam.Architecture.VAE,
        },
        texts={},
        native_pixels=sides[0],
        native_sides=sides,
        scaling_factor=fam.LATENT_FORMATS["sd1"].scale,
        latent_format="sd1",
        sampling=fam.SamplingFacts(
            fam.Prediction.VELOCITY,
            noise=fam.NoiseFacts(fam.NoiseKind.EDM, sigma_min=0.002, sigma_max=700.0),
            model=name,
            reads=frozenset({"image", "image_context", "numbers"}),
            side_multiple=64,
            video=facts,
            defaults=defaults,
            vision_use=fam.VisionEncoderUse.PROJECTED,
        ),
    )


#: image-to-video. Latents of the image are concatenated as the VAE has them, unscaled; the first model generates 14
#: frames. Source: stabilityai/stable-video-diffusion-img2vid-xt, and diffusers' pipeline
SVD = _family(
    "svd",
    "Stable Video Diffusion",
    (1024, 576),
    fam.VideoFacts(25, 1, 7.0, fam.FirstFrameMode.REPEATED, fam.VideoNumbers.MOTION),
    VAE_PREFIX,
    fam.SamplingDefaults(25, 3.0, "euler", "karras", fam.Guidance.RISING_WITH_FRAMES, image_noise=0.02, motion=127),
)
# Orbits of an object in an image. Their files have a complete image VAE as the image encoder, and the decoder of p
# elsewhere (`pool.models.components.common.spliced_vae`). The numbers of p are 1e-5, the angle from straight up and the
# direction, in radians, for each frame; u has the noise on the image. Source: stabilityai/sv3d; sv3d_u.yaml and
# sv3d_p.yaml of Stability-AI/generative-models
_SV3D_VAE, _SV3D_SIDES = "conditioner.embedders.1.encoder.", (576, 576)
_SV3D_DEFAULTS = fam.SamplingDefaults(50, 2.5, "euler", "karras", fam.Guidance.RISING_AND_FALLING, image_noise=1e-5)
SV3D_U = _family(
    "sv3d_u",
    "SV3D u",
    _SV3D_SIDES,
    fam.VideoFacts(21, 1, 7.0, fam.FirstFrameMode.REPEATED, fam.VideoNumbers.NOISE),
    _SV3D_VAE,
    _SV3D_DEFAULTS,
)
SV3D_P = _family(
    "sv3d_p",
    "SV3D p",
    _SV3D_SIDES,
    fam.VideoFacts(21, 1, 7.0, fam.FirstFrameMode.REPEATED, fam.VideoNumbers.VIEWS),
    _SV3D_VAE,
    _SV3D_DEFAULTS,
)


def _definition(
    family: fam.LocatedFamily,
    when: fam.Condition,
    comfyui: str,
    pipeline: fam.PipelineFacts | None = None,
    module: str = _MODULE,
) -> fam.UNetDefinition:
    return fam.UNetDefinition(
        family=family,
        detect=fam.Detection(LDM_UNET, when, comfyui),
        module=_MODULE,
        latent="sd1",
        text=fam.TextInputs(()),
        lora=fam.GENERIC,
        pipeline=pipeline,
        build=fam.ModelBuild(module, config, convert, forward, family.dtypes),
    )


FAMILIES = (
    _definition(SV3D_U, video(adm_in_channels=256), "SV3D_u"),
    replace(
        _definition(SV3D_P, video(adm_in_channels=1280), "SV3D_p", module=_VIEWED_MODULE), may_have_frame_decoder=True
    ),
    _definition(
        SVD,
        video(),
        "SVD_img2vid",
        fam.PipelineFacts(
            "StableVideoDiffusionPipeline",
            {fam.Role.VISION_ENCODER: "image_encoder", **UNET_FOLDERS},
            processor="feature_extractor",
        ),
    ),
)
