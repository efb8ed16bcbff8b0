"""Tiny files of the families that work from an image which they are shown, whole, in the published layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

from modelpool.pool.models.text.text_tokenizer import KINDS
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_transformers import CLIP_L, T5, WIDTH, TinyFamily, kl_vae
from tests.pool.families.whole_transformer import BYTES
from tests.pool.models.components.diffusion import image_published, video_published
from tests.pool.models.components.vae import cases as vaes
from tests.pool.models.components.vae import published
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout, ldm_unet, prefixed
from tests.pool.models.text.tiny_tokenizers import tiny
from tests.pool.zoo.case import quiet_libraries

Shapes = Mapping[str, Any]


def instructed(name: str) -> Layout:
    """A file of a UNet of 8 channels, "sd1" or "sdxl"."""
    unet = replace({"sd1": layouts.TINY_UNET, "sdxl": layouts.TINY_SDXL_UNET}[name], in_channels=8)
    whole = {"sd1": layouts.tiny_sd1, "sdxl": layouts.tiny_sdxl}[name]()
    return {**whole, **ldm_unet(unet)}


def following_depth() -> Layout:
    """A file of Stable Diffusion 2 for depth maps: a UNet of 5 channels."""
    unet = replace(layouts.TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=None)
    return {**layouts.tiny_sd2(), **ldm_unet(replace(unet, in_channels=5))}


def estimating() -> Layout:
    """A file of Lotus: a UNet of Stable Diffusion 2 with four labels."""
    unet = replace(layouts.TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=4)
    others = {key: shape for key, shape in layouts.tiny_sd2().items() if not key.startswith("model.diffusion_model.")}
    return {**others, **ldm_unet(unet)}


def upscaler() -> Layout:
    """A file of the x4 upscaler: a UNet of 7 channels that is told a level, its first level without attention among
    cells, and a VAE of three levels."""
    with quiet_libraries():
        unet = diffusers.UNet2DConditionModel(
            in_channels=7, out_channels=4, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
            attention_head_dim=8, norm_num_groups=16, use_linear_projection=True, num_class_embeds=1000,
            only_cross_attention=(True, False),
        )  # fmt: skip
        vae = vaes.CASES["kl three levels"].make()
    text = {key: shape for key, shape in layouts.tiny_sd2().items() if key.startswith("cond_stage_model.")}
    return {
        **prefixed("model.diffusion_model.", _shapes(video_published.unet(unet.state_dict()))),
        **prefixed("first_stage_model.", _shapes(published.ldm(vae.state_dict()))),
        **text,
    }


def _shapes(tensors: Shapes) -> Layout:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


#: by the name that recognition has
SHOWN_LAYOUTS: Mapping[str, Callable[[], Layout]] = {
    "sd1_ip2p": lambda: instructed("sd1"),
    "sdxl_ip2p": lambda: instructed("sdxl"),
    "cosxl_edit": lambda: instructed("sdxl"),
    "sd_x4": upscaler,
    "sd2_depth": following_depth,
    "lotus_d": estimating,
}
#: what those files have beside random tensors
SHOWN_TENSORS: Mapping[str, Mapping[str, torch.Tensor]] = {
    "cosxl_edit": {"edm_vpred.sigma_min": torch.tensor(0.01), "edm_vpred.sigma_max": torch.tensor(60.0)},
}


def _flux(in_channels: int) -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=in_channels, out_channels=64, num_layers=1, num_single_layers=1, num_attention_heads=2,
        attention_head_dim=32, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 14, 14),
        guidance_embeds=True,
    )  # fmt: skip


_TEXTS = {"clip_l": CLIP_L, "t5xxl": T5}
SHOWN_FAMILIES = {
    family.name: family
    for family in (
        TinyFamily("flux_fill", lambda: _flux(384), image_published.flux, _TEXTS, lambda: kl_vae(16)),
        TinyFamily("flux_control", lambda: _flux(128), image_published.flux, _TEXTS, lambda: kl_vae(16)),
    )
}


class TinyFamilyModel(TinyModel):
    """A tiny family on the CPU, if nothing else is said, that makes what requests ask for."""

    def __init__(self, folder: Path, family: TinyFamily, device: str = "cpu", loras: tuple[Path, ...] = ()) -> None:
        save_file(family.file(), folder / "tiny.safetensors")
        for member in family.encoders:
            if member in KINDS and KINDS[member] != BYTES:
                place = folder / f"tokenizer_{member}"
                place.mkdir()
                tiny(KINDS[member]).save(str(place / "tokenizer.json"))
        self._open(folder, device, loras)
