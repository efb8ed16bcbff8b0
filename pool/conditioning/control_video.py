"""What a model is told of a video to follow, made of the video's pixels: the stage behind `EncodeImageWork.follows`.

Knows the inputs of that work and in which form they are told (`pool.families.control_video_form`); not which models
read it.

Shape legend: B batch, C channels, T frames or cells of time, H W height and width of pixels or of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.stage_params import (
    EncodeImageWork,
    ImagePixels,
    Latent,
    PixelArray,
    Result,
    RunHooks,
    VideoFrames,
    VideoMask,
)
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.image_ops import HALF, covering
from modelpool.pool.pixels.latent_pixels import encoded
from modelpool.pool.specs.spec import Division


def encode_followed(
    work: EncodeImageWork,
    read: Sequence[Result],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
) -> Latent:
    """What is told of the video among `read`, for a video of `work.frames`: of its first so many frames, with grey that
    is made anew after a shorter one, or in place of none; before it, of the images to work from, the last one first.

    Steps as of `vae_encode`, for each part after the other. Raises CorruptFile for a result with NaN or infinity, and
    Stopped at a tile or layer.
    """
    images = [one for one in read if isinstance(one, ImagePixels)]
    kept_1CTHW, anew_1CTHW, mask_THW = _split(work, read)
    is_grey = not any(isinstance(one, VideoFrames) for one in read)
    parts = [_on_white(one, work.width, work.height) for one in reversed(images)]
    parts += [kept_1CTHW] if is_grey else [kept_1CTHW, anew_1CTHW]
    latents = [
        encoded(part, vae, latent, own, None, division)[0]
        for part, own in zip(parts, _counted(hooks, len(parts)), strict=True)
    ]
    if is_grey:
        latents.append(latents[-1])
    *before, kept_CTHW, anew_CTHW = latents
    video_CTHW = torch.cat([kept_CTHW, anew_CTHW, _mask_cells(mask_THW, latent.downscale, kept_CTHW.shape[1])])
    told = [torch.cat([one, one.new_zeros(len(video_CTHW) - len(one), *one.shape[1:])]) for one in before]
    told_CTHW = torch.cat([*told, video_CTHW], dim=1)
    if not torch.isfinite(told_CTHW).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(told_CTHW.contiguous().numpy())


def _split(work: EncodeImageWork, read: Sequence[Result]) -> tuple[Tensor, Tensor, Tensor]:
    """What of the video is kept and what is made anew, [1, C, T, H, W] from -1 to 1 with grey elsewhere, and where it
    is made anew, [T, H, W] of 0 and 1. Frames without one of the video's are made anew."""
    size = work.width, work.height
    video_1CTHW = torch.zeros((1, 3, work.frames, work.height, work.width))
    mask_THW = torch.ones((work.frames, work.height, work.width))
    for video in (one for one in read if isinstance(one, VideoFrames)):
        frames_THWC = _covering(video.frames_THWC[: work.frames], *size)
        given = len(frames_THWC)
        video_1CTHW[0, :, :given] = torch.from_numpy(frames_THWC).permute(3, 0, 1, 2).float() / 127.5 - 1.0
        for mask in (one for one in read if isinstance(one, VideoMask)):
            # one frame stands for all
            mask_THW[:given] = torch.from_numpy(_covering(mask.values_THW[:given], *size) >= HALF).float()
    return video_1CTHW * (1 - mask_THW), video_1CTHW * mask_THW, mask_THW


def _covering(frames: PixelArray, width: int, height: int) -> PixelArray:
    return np.stack([covering(frame, width, height) for frame in frames])


def _on_white(image: ImagePixels, width: int, height: int) -> Tensor:
    """An image as the one frame of a video of this size: whole, as large as it goes, in the middle of white;
    [1, C, 1, H, W] from -1 to 1. Source: `preprocess_conditions` of diffusers' WanVACEPipeline, sizes and the way of
    scaling included; it brings sides to multiples of 8 before."""
    pixels_1CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    scale = min(height / pixels_1CHW.shape[2], width / pixels_1CHW.shape[3])
    high, wide = (max(1, int(side * scale)) for side in pixels_1CHW.shape[2:])
    fitted_1CHW = functional.interpolate(pixels_1CHW, size=(high, wide), mode="bilinear", align_corners=False)
    top, left = (height - high) // 2, (width - wide) // 2
    canvas_1CTHW = torch.ones((1, 3, 1, height, width))
    canvas_1CTHW[:, :, 0, top : top + high, left : left + wide] = fitted_1CHW
    return canvas_1CTHW


def _mask_cells(mask_THW: Tensor, downscale: int, cells: int) -> Tensor:
    """The mask with a channel for each pixel of a cell, row by row, in so many cells of time: each has the frame in the
    middle of its share of them. Source: `prepare_masks` of diffusers' WanVACEPipeline."""
    frames, height, width = mask_THW.shape
    high, wide = height // downscale, width // downscale
    by_pixel = mask_THW.reshape(frames, high, downscale, wide, downscale).permute(2, 4, 0, 1, 3).flatten(0, 1)
    cells_CTHW: Tensor = functional.interpolate(by_pixel[None], size=(cells, high, wide), mode="nearest-exact")[0]
    return cells_CTHW


def _counted(hooks: RunHooks, parts: int) -> Iterator[RunHooks]:
    """`hooks` for each of several parts, all of which have as many steps."""

    def counting(part: int) -> RunHooks:
        return replace(hooks, on_step=lambda done, steps: hooks.on_step(part * steps + done, parts * steps))

    return map(counting, range(parts))
