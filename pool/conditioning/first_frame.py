"""What a model is told of the image that its video begins with, by the names of `pool.models.diffusion.architecture`.

Knows the forms in which models were trained to read one; not where the image's latent comes from.

Shape legend: B batch, C latent channels, T cells of time, H W height and width of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelpool.pool.conditioning.micro_conditioning import IMAGE, Extras
from modelpool.pool.core.sampling_facts import Beginning, VideoFacts
from modelpool.pool.sampling.noise import ImageNoise, seed_beside
from modelpool.pool.sampling.predictions import input_scale
from modelpool.pool.sampling.samplers import Denoise

IMAGE_MASK = "image_mask"
#: deviation of the noise on an image that is told with some; below every level that such models are sampled at.
#: Source: `augment_sigma` of diffusers' CosmosVideoToWorldPipeline
SHAKEN_SIGMA = 0.001
#: the share of noise that a video begins with which an image leads
LED_NOISE = 0.999


def told_of_beginning(video: VideoFacts, image_BC: Tensor, cells: int, ends: bool = False) -> dict[str, Tensor]:
    """What a model of `video` is told, for a video of so many cells of time: of an image's own latent, [B, C, H, W],
    where it is kept or leads; of that of a video of it and of grey, [B, C, T, H, W], where that is joined. `ends` says
    that the last frame of that is an image too."""
    match video.begins:
        case Beginning.KEPT | Beginning.SHAKEN:
            whole = image_BC.unsqueeze(2).expand(-1, -1, cells, -1, -1)
            return {IMAGE: whole.contiguous(), IMAGE_MASK: _first_cell(whole, 1)}
        case Beginning.JOINED:
            assert image_BC.shape[2] == cells, f"a video of {image_BC.shape[2]} cells begins one of {cells}"
            # a mask for each frame that a cell stands for; the first cell is the first frame, so many times
            mask = _first_cell(image_BC, video.multiple)
            if ends:
                mask[:, -1, -1] = 1.0
            return {IMAGE: torch.cat([mask, image_BC], dim=1)}
        case Beginning.LED:
            empty = image_BC.new_zeros(*image_BC.shape[:2], cells - 1, *image_BC.shape[2:])
            led = torch.cat([image_BC.unsqueeze(2), empty], dim=2)
            return {IMAGE: torch.cat([led, _first_cell(led, 1)], dim=1)}
        case Beginning.REPEATED | None:
            raise AssertionError("this model is told of no image in its first frame")


def led_latent(x_BCTHW: Tensor, told_BCTHW: Tensor) -> Tensor:
    """What a run begins with, where an image leads the video and a little of it is in every cell. Source:
    `prepare_latents` of diffusers' HunyuanVideoImageToVideoPipeline."""
    share = torch.tensor(LED_NOISE).to(x_BCTHW.device)
    return x_BCTHW * share + told_BCTHW[:, :-1, :1].to(x_BCTHW.device) * (1 - share)


def shakes_image(video: VideoFacts | None) -> bool:
    """Whether models of `video` are told the image that it begins with as `shaken_image` has it."""
    return video is not None and video.begins is Beginning.SHAKEN


def shaken_image(image_BCTHW: Tensor, seeds: Sequence[int], sigma_data: float) -> Callable[[], Extras]:
    """What a model is told of an image's latent with noise at `SHAKEN_SIGMA`, in a deviation of 1 as it is shown all
    others: other noise with each call, of random numbers of its own for each of `seeds`, those of its complement.

    Source: diffusers, CosmosVideoToWorldPipeline, which draws noise for each text of each step.
    """
    noises = [ImageNoise(seed_beside(seed)) for seed in seeds]
    scale = input_scale(SHAKEN_SIGMA, sigma_data)

    def told() -> dict[str, Tensor]:
        drawn_BCTHW = torch.cat([noise.draw((1, *image_BCTHW.shape[1:])) for noise in noises])
        return {IMAGE: (image_BCTHW + drawn_BCTHW.to(image_BCTHW.device) * SHAKEN_SIGMA) * scale}

    return told


def image_kept(denoise: Denoise, image_BCTHW: Tensor, mask_B1THW: Tensor) -> Denoise:
    """`denoise`, whose guess is the image's latent where that is kept."""

    def kept(x_BCTHW: Tensor, sigma: float) -> Tensor:
        return torch.where(mask_B1THW.bool(), image_BCTHW, denoise(x_BCTHW, sigma))

    return kept


def beginning_shape(video: VideoFacts, latent_CTHW: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the latent that a video with such a latent begins with."""
    channels, _, *sides = latent_CTHW
    return latent_CTHW if video.begins is Beginning.JOINED else (channels, *sides)


def _first_cell(like_BCTHW: Tensor, channels: int) -> Tensor:
    """1 in the first cell of time, 0 after it."""
    batch, _, *cells = like_BCTHW.shape
    mask = like_BCTHW.new_zeros(batch, channels, *cells)
    mask[:, :, :1] = 1.0
    return mask
