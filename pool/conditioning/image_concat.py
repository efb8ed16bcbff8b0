"""What a diffusion model is told of images of a person's own, beside the noisy latent: a hole and what is around it,
the latent or the pixels of an image to work from.

Knows in which order `pool.core.stage_params.SampleWork` reads them and in which form each model was trained to have
them (`pool.core.sampling_facts.Shown`); runs nothing. How videos begin with an image is `pool.sampling`'s.

Shape legend: B batch, C channels, H W height and width of a latent (of an image for masks of pixels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.conditioning.image_embeds import told_of_sight
from modelpool.pool.conditioning.micro_conditioning import IMAGE
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.sampling_facts import Beginning, SamplingFacts, Shown
from modelpool.pool.core.stage_params import ImagePixels, Latent, Mask, PixelArray, Result, SampleWork
from modelpool.pool.families.control_video_form import CONTROL, followed_channels
from modelpool.pool.models.common.infer_config import shown_channels
from modelpool.pool.pixels.image_ops import HALF, covering
from modelpool.pool.pixels.latent_pixels import as_vae_has_it
from modelpool.pool.sampling.noise import ImageNoise, seed_beside
from modelpool.pool.sampling.schedules import sigma_table

#: the names under which a model is told an image whose patches stand beside its own, and how noisy its image is
REFERENCE, NOISE_LEVEL = "reference", "noise_level"
#: the name under which a model is told what the model before it made
PRIOR = "prior"


@dataclass(frozen=True, slots=True, eq=False)
class ToldImages:
    """What the model is told, by name, each [B, ...] on the CPU.

    told     with every text
    negative  with the negative prompt, in place of its namesakes
    without  with the negative prompt, where a guess is to be without the image; None where none is asked for
    """

    told: Mapping[str, Tensor] = field(default_factory=dict)
    negative: Mapping[str, Tensor] = field(default_factory=dict)
    without: Mapping[str, Tensor] | None = None


def told_of_images(
    works: Sequence[SampleWork],
    inputs: Sequence[Sequence[Result]],
    facts: SamplingFacts,
    latent: LatentFacts,
    cells: tuple[int, int],
) -> ToldImages:
    """What a model of `facts` is told of the images that these works read, in a run of latents of `cells` (height,
    width); of how a video begins, what every frame is told."""
    work, told, negative = works[0], dict[str, Tensor](), dict[str, Tensor]()
    latents = [iter([one for one in read if isinstance(one, Latent)]) for read in inputs]
    if work.starts:
        _next(latents)  # the run begins with it
    if work.imaged and facts.shown is Shown.PIXELS:
        told[IMAGE] = torch.stack([_noisy(each, read, facts) for each, read in zip(works, inputs, strict=True)])
        told[NOISE_LEVEL] = torch.full((len(works),), work.noise_level, dtype=torch.long)
    elif work.imaged and facts.video is None:
        told[IMAGE] = _next(latents)
        if facts.shown is Shown.UNSCALED:
            told[IMAGE] = as_vae_has_it(told[IMAGE], latent)
    elif work.imaged and repeats_image(facts):
        told[IMAGE] = as_vae_has_it(_next(latents), latent)
        negative[IMAGE] = torch.zeros_like(told[IMAGE])
    if work.follows:
        told[CONTROL] = _next(latents)
    if work.told_hidden:
        masks = [next(one.values_HW for one in read if isinstance(one, Mask)) for read in inputs]
        masks = [covering(mask, work.width, work.height) for mask in masks]
        told[IMAGE] = _hole(facts.shown, masks, _next(latents), cells, latent.downscale)
    for name in reference_names(work):
        told[name] = _next(latents)
    if work.prior is not None:
        told[PRIOR] = _next(latents)
        # Source: `effnet` of diffusers' StableCascadeDecoderPipeline
        negative[PRIOR] = torch.zeros_like(told[PRIOR])
    without = {**told, IMAGE: torch.zeros_like(told[IMAGE])} if work.asks_without_image else None
    return ToldImages({**told, **told_of_sight(inputs, facts)}, negative, without)


def repeats_image(facts: SamplingFacts) -> bool:
    """Whether every frame of a video is told the image that it begins with."""
    return facts.video is not None and facts.video.begins is Beginning.REPEATED


def empty_told(
    facts: SamplingFacts, work: SampleWork, shape_CHW: tuple[int, ...], batch: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """What a model of `facts` is told of images in a run like `work`, with latents of `shape_CHW`: [batch, ...]
    without values, for dry runs. A model that is shown an image is always told of one."""
    told, cells = dict[str, Tensor](), shape_CHW[1:]
    if facts.shown is not None:
        channels, downscale = shape_CHW[0], work.height // shape_CHW[-2]
        shape = batch, shown_channels(facts.shown, channels, downscale), *cells
        told[IMAGE] = torch.empty(shape, dtype=torch.float32, device=device)
    if facts.shown is Shown.PIXELS:
        told[NOISE_LEVEL] = torch.empty((batch,), dtype=torch.long, device=device)
    if work.follows:
        channels = followed_channels(shape_CHW[0], work.height // shape_CHW[-2])
        told[CONTROL] = torch.empty((batch, channels, *cells), dtype=torch.float32, device=device)
    for name, (width, height) in reference_names(work).items():
        own = height * cells[-2] // work.height, width * cells[-1] // work.width
        told[name] = torch.empty((batch, shape_CHW[0], *own), dtype=torch.float32, device=device)
    return told


def reference_names(work: SampleWork) -> dict[str, tuple[int, int]]:
    """Under which names a model is told the images that it works from, in order, and their sizes."""
    if work.reference is None:
        return {}
    more = {f"{REFERENCE}_{number}": size for number, size in enumerate(work.more_references, start=2)}
    return {REFERENCE: work.reference, **more}


def cell_corners(mask_HW: PixelArray, cells: tuple[int, int]) -> Tensor:
    """The mask that models are told, [H, W] of 0 and 1: whether the first pixel of each cell is made anew, which is how
    those were trained. Source: diffusers, `prepare_mask_latents` of StableDiffusionInpaintPipeline."""
    corners_HW: Tensor = functional.interpolate(_white(mask_HW)[None, None], size=cells)[0, 0]
    return corners_HW


def cell_pixels(mask_HW: PixelArray, cells: tuple[int, int], downscale: int) -> Tensor:
    """The mask with a channel for each pixel of a cell, row by row: [pixels of a cell, H, W] of 0 and 1. Source:
    diffusers, `prepare_mask_latents` of FluxFillPipeline."""
    height, width = cells
    by_cell = _white(mask_HW).reshape(height, downscale, width, downscale)
    pixels_CHW: Tensor = by_cell.permute(1, 3, 0, 2).reshape(downscale**2, height, width)
    return pixels_CHW


def _hole(
    shown: Shown | None, masks: Sequence[PixelArray], hidden_BCHW: Tensor, cells: tuple[int, int], downscale: int
) -> Tensor:
    """A mask and the latent of the image with a hole there, one after the other along the channels."""
    if shown is Shown.HOLE_BY_PIXEL:
        pixels = torch.stack([cell_pixels(mask, cells, downscale) for mask in masks])
        return torch.cat([hidden_BCHW, pixels], dim=1)
    assert shown is Shown.HOLE, f"a model that is shown {shown} is told of a hole"
    return torch.cat([torch.stack([cell_corners(mask, cells) for mask in masks])[:, None], hidden_BCHW], dim=1)


def _noisy(work: SampleWork, read: Sequence[Result], facts: SamplingFacts) -> Tensor:
    """The image that is enlarged, [C, H, W] from -1 to 1, with noise on it: the model's own at the level that was
    asked for, by random numbers of its own, those of the seed's complement."""
    image = next(one for one in read if isinstance(one, ImagePixels))
    pixels_CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    sigma = sigma_table(facts.noise).sigmas[work.noise_level]
    noise_CHW = ImageNoise(seed_beside(work.seed)).draw((1, *pixels_CHW.shape))[0]
    return (pixels_CHW + noise_CHW * sigma) / math.hypot(1.0, sigma)


def _next(latents: Sequence[Iterator[Latent]]) -> Tensor:
    """The next latent of each image of a run."""
    found = [next(own) for own in latents]
    return torch.stack([torch.from_numpy(one.samples_CHW.copy()) for one in found])


def _white(mask_HW: PixelArray) -> Tensor:
    return torch.from_numpy((mask_HW >= HALF).astype(np.float32))
