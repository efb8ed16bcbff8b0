"""Encodes a control video, and its mask for VACE, to a model input: the stage of `ControlVideo`.

Knows the inputs of that work and the form of the model input (`pool.families.control_video_models`); not which models
read it.

Shape legend: B batch, C channels, T frames or latent frames, H W height and width of pixels or of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.families.parts.video_calls import MASK_CHANNELS
from modelpool.pool.inference.pixels.image_ops import HALF, covering, there_and_back
from modelpool.pool.inference.pixels.latent_pixels import encoded
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    ControlVideo,
    ImagePixels,
    Latent,
    PixelArray,
    RunHooks,
    VideoFrames,
    VideoMask,
)
from modelpool.pool.values.core.task_inputs import REFERENCE, VIDEO, VIDEO_MASK, TaskInputs
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def encode_control_video(
    video: ControlVideo,
    size: tuple[int, int],
    read: TaskInputs,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    follows: bool = False,
) -> Latent:
    """Return the model input of the control video in `read`, for a `video` of this width and height. A shorter video is
    padded with grey that is regenerated; without a video, all frames are. Reference images precede it, the last one
    first. One that the model `follows` as a whole, without a mask, goes back and forth if it is shorter, or
    `video.stops`: zeros follow its last complete cell.

    Reports the steps of `vae_encode`, for one part after the other. Raises CorruptFile for a result with NaN or
    infinity, and Stopped at a tile or layer.
    """
    if follows:
        return _finite(_followed(video, size, read, vae, latent, hooks, division), vae)
    images = read.read_all(REFERENCE, ImagePixels)
    if video.animates:
        return _animated(video.frames, size, read, images[0], vae, latent, hooks, division)
    kept_1CTHW, anew_1CTHW, mask_THW = _split(video.frames, size, read)
    is_grey = VIDEO not in read
    parts = [_on_white(one, *size) for one in reversed(images)]
    parts += [kept_1CTHW] if is_grey else [kept_1CTHW, anew_1CTHW]
    latents = [
        encoded(part, vae, latent, part_hooks, None, division)[0]
        for part, part_hooks in zip(parts, _counted(hooks, len(parts)), strict=True)
    ]
    if is_grey:
        latents.append(latents[-1])
    *before, kept_CTHW, anew_CTHW = latents
    video_CTHW = torch.cat([kept_CTHW, anew_CTHW, _mask_cells(mask_THW, latent.downscale, kept_CTHW.shape[1])])
    references = [torch.cat([one, one.new_zeros(len(video_CTHW) - len(one), *one.shape[1:])]) for one in before]
    return _finite(torch.cat([*references, video_CTHW], dim=1), vae)


def encode_video(
    frames: int,
    size: tuple[int, int],
    read: TaskInputs,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
) -> Latent:
    """Return the latent of the first `frames` of the video in `read`, scaled to `size`. As `encode_control_video`."""
    return _finite(encoded(_back_and_forth(frames, size, read), vae, latent, hooks, None, division)[0], vae)


def _followed(
    video: ControlVideo,
    size: tuple[int, int],
    read: TaskInputs,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
) -> Tensor:
    """Return the latent of a video that is followed as a whole. As `encode_control_video`."""
    frames, cell = video.frames, latent.frames_per_cell
    if video.stops:
        known = len(read.read(VIDEO, VideoFrames).frames_THWC)
        frames = min(frames, 1 + (known - 1) // cell * cell)
    found_CTHW: Tensor = encoded(_back_and_forth(frames, size, read), vae, latent, hooks, None, division)[0]
    return functional.pad(found_CTHW, (0, 0, 0, 0, 0, (video.frames - frames) // cell))


def _animated(
    frames: int,
    size: tuple[int, int],
    read: TaskInputs,
    character: ImagePixels,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
) -> Latent:
    """Return the model input of poses and of a character, which is complete on black in the leading cell. As
    `encode_control_video`. Source: `prepare_reference_image_latents`, `prepare_prev_segment_cond_latents` and
    `prepare_pose_latents` of diffusers' WanAnimatePipeline, for one segment without a background."""
    poses_1CTHW = _back_and_forth(frames, size, read)
    parts = [_on_white(character, *size, ground=-1.0), torch.zeros_like(poses_1CTHW), poses_1CTHW]
    shown_CTHW, empty_CTHW, poses_CTHW = (
        encoded(part, vae, latent, part_hooks, None, division)[0]
        for part, part_hooks in zip(parts, _counted(hooks, len(parts)), strict=True)
    )
    kept_CTHW = torch.cat([shown_CTHW, empty_CTHW], dim=1)
    mask_CTHW = kept_CTHW.new_zeros(MASK_CHANNELS, *kept_CTHW.shape[1:])
    mask_CTHW[:, :1] = 1.0
    posed_CTHW = torch.cat([torch.zeros_like(shown_CTHW), poses_CTHW], dim=1)
    return _finite(torch.cat([mask_CTHW, kept_CTHW, posed_CTHW]), vae)


def _finite(control_CTHW: Tensor, vae: ModelPatcher) -> Latent:
    if not torch.isfinite(control_CTHW).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected finite numbers")
    return Latent(control_CTHW.contiguous().numpy())


def _back_and_forth(frames: int, size: tuple[int, int], read: TaskInputs) -> Tensor:
    """Return the control video, [1, C, T, H, W] from -1 to 1; after its last frame, back and forth as often as it
    takes."""
    frames_THWC = read.read(VIDEO, VideoFrames).frames_THWC
    frames_THWC = _covering(frames_THWC[there_and_back(len(frames_THWC), frames)], *size)
    return torch.from_numpy(frames_THWC).permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0


def _split(frames: int, size: tuple[int, int], read: TaskInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kept and the regenerated part of the video, [1, C, T, H, W] from -1 to 1 with grey elsewhere, and the
    mask, [T, H, W] of 0 and 1. Frames beyond the video are regenerated."""
    width, height = size
    video_1CTHW = torch.zeros((1, 3, frames, height, width))
    mask_THW = torch.ones((frames, height, width))
    if VIDEO in read:
        frames_THWC = _covering(read.read(VIDEO, VideoFrames).frames_THWC[:frames], *size)
        count = len(frames_THWC)
        video_1CTHW[0, :, :count] = torch.from_numpy(frames_THWC).permute(3, 0, 1, 2).float() / 127.5 - 1.0
        if VIDEO_MASK in read:
            # a mask of one frame applies to all
            values_THW = read.read(VIDEO_MASK, VideoMask).values_THW[:count]
            mask_THW[:count] = torch.from_numpy(_covering(values_THW, *size) >= HALF).float()
    return video_1CTHW * (1 - mask_THW), video_1CTHW * mask_THW, mask_THW


def _covering(frames: PixelArray, width: int, height: int) -> PixelArray:
    return np.stack([covering(frame, width, height) for frame in frames])


def _on_white(image: ImagePixels, width: int, height: int, ground: float = 1.0) -> Tensor:
    """Return an image as a single frame of this size: complete, as large as possible, centred on white, or on `ground`;
    [1, C, 1, H, W] from -1 to 1. Source: `preprocess_conditions` of diffusers' WanVACEPipeline, including sizes and
    interpolation; it first rounds sides to multiples of 8."""
    pixels_1CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    scale = min(height / pixels_1CHW.shape[2], width / pixels_1CHW.shape[3])
    high, wide = (max(1, int(side * scale)) for side in pixels_1CHW.shape[2:])
    fitted_1CHW = functional.interpolate(pixels_1CHW, size=(high, wide), mode="bilinear", align_corners=False)
    top, left = (height - high) // 2, (width - wide) // 2
    canvas_1CTHW = torch.full((1, 3, 1, height, width), ground)
    canvas_1CTHW[:, :, 0, top : top + high, left : left + wide] = fitted_1CHW
    return canvas_1CTHW


def _mask_cells(mask_THW: Tensor, downscale: int, cells: int) -> Tensor:
    """Return the mask with one channel for each pixel of a latent position, row by row, in `cells` latent frames: each
    has the middle one of its frames. Source: `prepare_masks` of diffusers' WanVACEPipeline."""
    frames, height, width = mask_THW.shape
    high, wide = height // downscale, width // downscale
    by_pixel = mask_THW.reshape(frames, high, downscale, wide, downscale).permute(2, 4, 0, 1, 3).flatten(0, 1)
    cells_CTHW: Tensor = functional.interpolate(by_pixel[None], size=(cells, high, wide), mode="nearest-exact")[0]
    return cells_CTHW


def _counted(hooks: RunHooks, parts: int) -> Iterator[RunHooks]:
    """Yield `hooks` for each of several parts with the same number of steps."""

    def counting(part: int) -> RunHooks:
        return replace(hooks, on_step=lambda done, steps: hooks.on_step(part * steps + done, parts * steps))

    return map(counting, range(parts))
