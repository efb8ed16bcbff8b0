"""Tiny files of the families that make videos of an image which they see through a vision encoder, in the published
layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.values.core.stage_params import VideoFrames
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_transformers import prefixed, seeded
from tests.pool.models.components.diffusion import video_published
from tests.pool.models.components.vae import published
from tests.pool.zoo.case import quiet_libraries

File = dict[str, Tensor]
#: widths of the vision encoder and of what it projects to, pixels that it is shown and that a patch has
SEEN, PROJECTED, SIDE, PATCH = 32, 24, 28, 14


def clip_vision(side: int = SIDE) -> Any:
    """A vision encoder with the heads and the activation of CLIP H, which is shown so many pixels a side."""
    config = transformers.CLIPVisionConfig(
        hidden_size=SEEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=side,
        patch_size=PATCH, projection_dim=PROJECTED, hidden_act="gelu",
    )  # fmt: skip
    return transformers.CLIPVisionModelWithProjection(config)


#: from the names of transformers to those of open_clip
_OPEN_CLIP = (
    (r"^vision_model\.embeddings\.class_embedding", "class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "conv1."),
    (r"^vision_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "ln_pre."),
    (r"^vision_model\.post_layernorm\.", "ln_post."),
    (r"^vision_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"\.layer_norm(\d)\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.self_attn\.q_proj\.", ".attn.in_proj_"),
)


def open_clip_vision(state: Mapping[str, Tensor]) -> File:
    """The state of a vision encoder of transformers under the names of open_clip."""
    file: File = {}
    for key, tensor in state.items():
        if ".k_proj." in key or ".v_proj." in key:
            continue
        if key == "visual_projection.weight":
            file["proj"] = tensor.T
            continue
        value = (
            torch.cat([state[key.replace(".q_proj.", f".{name}_proj.")] for name in "qkv"])
            if "q_proj" in key
            else tensor
        )
        name = key
        for pattern, replacement in _OPEN_CLIP:
            name = re.sub(pattern, replacement, name)
        file[name] = value
    return file


def video_unet(numbers: int) -> Any:
    """A UNet of frames that is told so many numbers of each."""
    return diffusers.UNetSpatioTemporalConditionModel(
        in_channels=8, out_channels=4, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=PROJECTED,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), num_attention_heads=(1, 1),
        projection_class_embeddings_input_dim=256 * numbers,
    )  # fmt: skip


def temporal_vae() -> Any:
    """A VAE of images whose decoder sees all frames, 8 pixels to a cell."""
    widths = (32, 32, 32, 32)
    return diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=widths, layers_per_block=1, down_block_types=("DownEncoderBlock2D",) * 4
    )


def image_vae(groups: int = 8) -> Any:
    """A VAE of images, 8 pixels to a cell, with so many groups in its norms."""
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), latent_channels=4, layers_per_block=1, norm_num_groups=groups,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip


#: in the norms of every encoder beside a decoder of frames
GROUPS = 32
#: what first stages without an encoder have not
_NO_ENCODER = tuple(f"first_stage_model.{part}" for part in ("encoder.", "quant_conv.", "post_quant_conv."))


@dataclass(frozen=True)
class TinyVideo:
    """One family, as recognition calls it; its VAE, and where its file has that."""

    name: str
    numbers: int
    vae: Callable[[], Any]
    vae_file: Callable[[Mapping[str, Tensor]], File]
    vae_prefix: str
    #: a decoder of frames, where whole files have VAEs, in place of the VAE's own
    has_own_decoder: bool = False

    def file(self) -> File:
        """The whole file, with what of the published ones belongs to no component."""
        tensors = prefixed(
            "model.diffusion_model.", video_published.unet(seeded(lambda: video_unet(self.numbers), 1).state_dict())
        )
        tensors |= prefixed(self.vae_prefix, self.vae_file(seeded(self.vae, 2).state_dict()))
        if self.has_own_decoder:
            state = seeded(temporal_vae, 4).state_dict()
            decoder = {key: tensor for key, tensor in state.items() if key.startswith("decoder.")}
            tensors |= prefixed("first_stage_model.", published.temporal({**state, **decoder}))
            tensors = {key: x for key, x in tensors.items() if not key.startswith(_NO_ENCODER)}
        seen = open_clip_vision(seeded(clip_vision, 3).state_dict())
        tensors |= prefixed("conditioner.embedders.0.open_clip.model.visual.", seen)
        tensors["conditioner.embedders.3.encoder.encoder.conv_in.bias"] = torch.arange(4.0)
        return {key: value.contiguous().clone() for key, value in tensors.items()}


VIDEOS = {
    video.name: video
    for video in (
        TinyVideo("svd", 3, temporal_vae, published.temporal, "first_stage_model."),
        TinyVideo("sv3d_u", 1, image_vae, published.ldm, "conditioner.embedders.1.encoder."),
        TinyVideo("sv3d_p", 5, lambda: image_vae(GROUPS), published.ldm, "conditioner.embedders.1.encoder.", True),
    )
}


class TinyVideoModel(TinyModel):
    """A tiny video family, on the CPU if nothing else is said, that makes what requests ask for."""

    def __init__(self, folder: Path, video: TinyVideo, device: str = "cpu") -> None:
        with quiet_libraries():
            save_file(video.file(), folder / "tiny.safetensors")
        self._open(folder, device)


def assert_same_video(one: Made, other: Made) -> None:
    """Both made the same latent, but for the last digits, and the same video within a level."""
    np.testing.assert_allclose(one.latents[0], other.latents[0], atol=1e-4)
    videos = [made.results[made.tasks[-1].task_id] for made in (one, other)]
    pixels = [video.frames_THWC.astype(int) for video in videos if isinstance(video, VideoFrames)]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1
