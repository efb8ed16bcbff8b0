"""The latent that a sampling run starts from besides noise, and its inpaint mask.

Reads them by name, and converts a mask of pixels to latent positions; runs nothing.

Shape legend: B batch, C latent channels, H W height and width of a latent (of an image for masks of pixels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.families.parts.audio_tracks import joined
from modelpool.pool.inference.conditioning.inpainting import Inpainting
from modelpool.pool.inference.pixels.image_ops import covering
from modelpool.pool.values.core.stage_params import (
    Latent,
    Mask,
    MaskCondition,
    PixelArray,
    SampleParams,
    StartCondition,
)
from modelpool.pool.values.core.task_inputs import MASK, START, TaskInputs


@dataclass(frozen=True, slots=True, eq=False)
class StartLatent:
    """The start of all images of a run, float32 on the CPU.

    latent_BCHW  the latent that noise is added to; None starts from noise only
    inpainting   the kept latent and its mask; None keeps nothing
    """

    latent_BCHW: Tensor | None = None
    inpainting: Inpainting | None = None


NOISE_ONLY = StartLatent()


def start_of(works: Sequence[SampleParams], inputs: Sequence[TaskInputs], cells: tuple[int, int]) -> StartLatent:
    """Return the start of the run of these works, for latents of `cells` (height, width). A latent of another size is
    scaled, as in the second pass of hires. The latent of an audio track is behind the frames."""
    work = works[0]
    if not work.has(StartCondition):
        assert not work.has(MaskCondition), f"{work} keeps a latent that it does not start from"
        return NOISE_ONLY
    firsts = [read.read(START, Latent) for read in inputs]
    latent = torch.cat([_with_sound(scaled_latent(_tensor(first), cells), first) for first in firsts])
    if not work.has(MaskCondition):
        return StartLatent(latent)
    masks = [covering(read.read(MASK, Mask).values_HW, work.shape.width, work.shape.height) for read in inputs]
    return StartLatent(latent, Inpainting(latent, torch.stack([cell_shares(mask, cells) for mask in masks])[:, None]))


def scaled_latent(latent_BCHW: Tensor, cells: tuple[int, int]) -> Tensor:
    """Scale a latent to another size (height, width), bilinearly; unchanged if it has that size, or is of audio."""
    if latent_BCHW.dim() == 3 or tuple(latent_BCHW.shape[-2:]) == cells:
        return latent_BCHW
    return functional.interpolate(latent_BCHW, size=cells, mode="bilinear", align_corners=False)


def cell_shares(mask_HW: PixelArray, cells: tuple[int, int]) -> Tensor:
    """Return the regenerated fraction of each latent position, [H, W] from 0 to 1: the mean of the mask's pixels."""
    whole = torch.from_numpy(mask_HW.astype(np.float32) / 255)[None, None]
    return functional.adaptive_avg_pool2d(whole, cells)[0, 0]


def _with_sound(samples_BCTHW: Tensor, latent: Latent) -> Tensor:
    if latent.sound_LA is None:
        return samples_BCTHW
    return joined(samples_BCTHW, torch.from_numpy(latent.sound_LA.copy())[None])


def _tensor(latent: Latent) -> Tensor:
    return torch.from_numpy(latent.samples_CHW.copy())[None]
