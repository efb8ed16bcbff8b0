"""Key and shape lists of narrow files with a UNet that was cut out of SDXL's, or has as many levels as a published
one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.pool.models.loading.layouts import (
    SD21_UNET,
    TINY_CLIP,
    TINY_SDXL_UNET,
    TINY_VAE,
    Layout,
    hf_clip,
    ldm_unet,
    ldm_vae,
    open_clip,
)

#: as many levels as SDXL, 32 wide
SMALL_SDXL_UNET = replace(TINY_SDXL_UNET, model_channels=32, multipliers=(1, 2, 2), depths=(0, 1, 1), middle_depth=1)
#: as many levels and blocks as SD2
SMALL_SD2_UNET = replace(SD21_UNET, model_channels=32, multipliers=(1, 2, 2, 2), context_width=32)


def small_sdxl(**fields: Any) -> Layout:
    """A file in the layout of SDXL, with a UNet that has these fields of `LdmUnet`."""
    clip_l = hf_clip(TINY_CLIP, "conditioner.embedders.0.transformer.text_model.")
    unet = ldm_unet(replace(SMALL_SDXL_UNET, **fields))
    return {**unet, **ldm_vae(TINY_VAE), **clip_l, **open_clip(32, 3, 128)}


def tiny_ssd_1b() -> Layout:
    """SSD-1B with the published numbers of blocks."""
    return small_sdxl(res_blocks=2, depths=(0, 2, 4), up_depths=((0, 0, 0), (2, 1, 1), (4, 4, 10)), middle_depth=0)


def tiny_vega() -> Layout:
    """Segmind Vega: as SSD-1B, with fewer transformer blocks; as many up as down."""
    return small_sdxl(res_blocks=2, depths=(0, 1, 2), middle_depth=0)


def tiny_koala_700m() -> Layout:
    """The smaller KOALA: one residual block at each level, and no middle."""
    return small_sdxl(depths=(0, 2, 5), middle_depth=None)


def tiny_koala_1b() -> Layout:
    """The larger KOALA: as the smaller one, with a middle and deeper."""
    return small_sdxl(depths=(0, 2, 6), middle_depth=6)


def small_sd2() -> Layout:
    """SD2 with as many levels and blocks as the published files."""
    text = open_clip(32, 3, 128, prefix="cond_stage_model.model.")
    return {**ldm_unet(SMALL_SD2_UNET), **ldm_vae(TINY_VAE), **text}
