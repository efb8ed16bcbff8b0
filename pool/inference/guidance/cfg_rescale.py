"""CFG rescale: scales the guided prediction to the norm of the conditional one, as some models were published.

Sources: the pipelines of diffusers for Qwen-Image and LongCat-Image (patches), JoyImage (cells) and Lumina 2 (rows);
Lin et al. 2024 ("Common Diffusion Noise Schedules and Sample Steps are Flawed"), equations 15 and 16, for standard
deviations.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack, joined
from modelpool.pool.values.core.sampling_facts import CfgRescale


def rescale(guided_BCHW: Tensor, cond_BCHW: Tensor, rescale_mode: CfgRescale) -> Tensor:
    """Return `guided_BCHW`, with each part of it scaled to the norm of that part of `cond_BCHW`."""
    match rescale_mode:
        case CfgRescale.NOTHING:
            return guided_BCHW
        case CfgRescale.ROWS:
            dims: tuple[int, ...] = (-1,)
            cond, guided = cond_BCHW, guided_BCHW
        case CfgRescale.CELLS:
            dims = (1,)
            cond, guided = cond_BCHW, guided_BCHW
        case CfgRescale.PATCHES | CfgRescale.PATCHES_DOWN:
            dims = (1, 3, 5)
            cond, guided = _patches(cond_BCHW), _patches(guided_BCHW)
    lengths = torch.linalg.vector_norm(cond, dim=dims, keepdim=True)
    guided_lengths = torch.linalg.vector_norm(guided, dim=dims, keepdim=True)
    if rescale_mode is CfgRescale.PATCHES_DOWN:
        ratios = (lengths / (guided_lengths + 1e-8)).clamp(max=1.0)
    elif rescale_mode is CfgRescale.CELLS:
        ratios = lengths / guided_lengths.clamp_min(1e-6)
    else:
        ratios = lengths / guided_lengths
    rescaled_BCHW: Tensor = (guided * ratios).reshape(guided_BCHW.shape)
    return rescaled_BCHW


def rescale_to_deviation(guided_BCHW: Tensor, cond_BCHW: Tensor, factor: float) -> Tensor:
    """Return `guided_BCHW`, scaled by `factor` of the way to the standard deviation of `cond_BCHW`, for each image; a
    constant prediction, such as CFG-Zero*'s in the first steps, stays as it is."""
    sides = tuple(range(1, cond_BCHW.dim()))
    deviations = guided_BCHW.std(sides, keepdim=True)
    ratio = torch.where(deviations > 0, cond_BCHW.std(sides, keepdim=True) / deviations, 1.0)
    return guided_BCHW * (ratio * factor + (1.0 - factor))


def rescale_by_part(guided_BCTHW: Tensor, cond_BCTHW: Tensor, track: SoundTrack, factor: float) -> Tensor:
    """Return `rescale_to_deviation` of the frames and of the audio of videos, each by itself."""
    pairs = zip(track.parted(guided_BCTHW), track.parted(cond_BCTHW), strict=True)
    video, sound = (rescale_to_deviation(guided, cond, factor) for guided, cond in pairs)
    return joined(video, sound, track.rest(guided_BCTHW))


def _patches(x_BCHW: Tensor) -> Tensor:
    """Return [B, C, rows, 2, columns, 2]: patches of two by two latent pixels."""
    b, c, h, w = x_BCHW.shape
    return x_BCHW.reshape(b, c, h // 2, 2, w // 2, 2)
