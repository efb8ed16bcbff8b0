"""Tiny files of Stable Diffusion 2.1 unCLIP, whole, in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import transformers
from torch import Tensor

from tests.pool.families.tiny_videos import PATCH, SEEN, SIDE, open_clip_vision
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout, ldm_unet
from tests.pool.zoo.case import quiet_libraries

#: width of the embedding of an image, by family, and the prefix of the encoder
EMBEDDED, VISION = {"sd21_unclip_l": 768, "sd21_unclip_h": 1024}, "embedder.model.visual."


def layout_of(name: str, embedded: int = 0) -> Layout:
    """A file whose vision encoder gives embeddings of this width; 0: that of the family."""
    labels = 2 * EMBEDDED[name]
    unet = replace(layouts.TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=labels)
    config = transformers.CLIPVisionConfig(
        hidden_size=SEEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=SIDE,
        patch_size=PATCH, projection_dim=embedded or EMBEDDED[name], hidden_act="gelu",
    )  # fmt: skip
    with quiet_libraries():
        vision = open_clip_vision(transformers.CLIPVisionModelWithProjection(config).state_dict())
    seen = {VISION + key: tuple(tensor.shape) for key, tensor in vision.items() if not key.endswith("position_ids")}
    others = {key: shape for key, shape in layouts.tiny_sd2().items() if not key.startswith("model.diffusion_model.")}
    return {**ldm_unet(unet), **others, **seen}


def tiny_unclip_l() -> Layout:
    """A file that reads embeddings of CLIP L."""
    return layout_of("sd21_unclip_l")


def tiny_unclip_h() -> Layout:
    """A file that reads embeddings of CLIP H."""
    return layout_of("sd21_unclip_h")


def statistics(name: str) -> Mapping[str, Tensor]:
    """Of the embeddings of the training images, far from 0 and 1; only files of L have any."""
    if name == "sd21_unclip_h":
        return {}
    generator, shape = torch.Generator().manual_seed(5), (1, EMBEDDED[name])
    mean, deviation = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    return {"noise_augmentor.data_mean": mean, "noise_augmentor.data_std": 20.0 * (deviation + 0.5)}
