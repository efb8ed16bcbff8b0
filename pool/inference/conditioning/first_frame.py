"""First-frame conditioning (image-to-video): model inputs, by the names of
`pool.models.components.diffusion.architecture`.

Knows the forms in which models were trained to read a first frame; not where its latent comes from.

Shape legend: B batch, C latent channels, T latent frames, H W height and width of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.devices.pinned_memory import empty_to_send, sent
from modelpool.pool.inference.conditioning.image_concat import repeats_image
from modelpool.pool.inference.conditioning.micro_conditioning import IMAGE, ModelKwargs
from modelpool.pool.inference.conditioning.motion_tracks import tracked_image
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.predictions import input_scale
from modelpool.pool.inference.sampling.samplers import Denoise
from modelpool.pool.values.core import task_inputs
from modelpool.pool.values.core.sampling_facts import FirstFrameMode, VideoFacts
from modelpool.pool.values.core.stage_params import Latent, TracksCondition

IMAGE_MASK = "image_mask"
#: standard deviation of the noise on a first frame that is passed with noise; below all levels of such models' runs.
#: Source: `augment_sigma` of diffusers' CosmosVideoToWorldPipeline
FIRST_FRAME_SIGMA = 0.001
#: share of noise in the initial latent of a video that an image leads
LEADING_NOISE_SHARE = 0.999


def first_frame_part(run: DenoisingRun) -> RunPart | None:
    """Add the first frame of a video to the inputs of its model, and what moves along tracks from there."""
    image, video = run.work.image, run.facts.video
    if image is None or video is None or repeats_image(run.facts):
        return None
    read = [each.read(task_inputs.IMAGE, Latent).samples_CHW.copy() for each in run.inputs]
    first_BC = torch.stack([torch.from_numpy(samples) for samples in read])
    known = 1 + (max(1, image.frames) - 1) // video.frames_per_cell
    found, negative = first_frame_inputs(video, first_BC, run.shape_CHW[1], image.ends, known), dict[str, Tensor]()
    for tracks in run.work.all_of(TracksCondition):
        found[IMAGE], negative[IMAGE] = tracked_image(tracks, found[IMAGE])
    run.prompts = run.prompts.with_inputs(found, negative)
    return None


def first_frame_inputs(
    video: VideoFacts, image_BC: Tensor, cells: int, has_last_frame: bool = False, known: int = 1
) -> dict[str, Tensor]:
    """Return the inputs of a model of `video` for a video of `cells` latent frames, of which the first `known` are of
    images. `image_BC` is the latent of the image, [B, C, H, W], if the image is kept, appended or leads the video. If
    it is concatenated, it is the latent of a video of the image and grey, [B, C, T, H, W]. If cells are marked, it is
    the latent of several images, [B, C, known, H, W]. `has_last_frame`: the last frame of that video is an image
    too."""
    match video.begins:
        case FirstFrameMode.KEPT | FirstFrameMode.KEPT_WITH_NOISE:
            whole = image_BC.unsqueeze(2).expand(-1, -1, cells, -1, -1)
            return {IMAGE: whole.contiguous(), IMAGE_MASK: _first_cell(whole, 1)}
        case FirstFrameMode.CONCATENATED:
            assert image_BC.shape[2] == cells, f"a first frame of {image_BC.shape[2]} latent frames, expected {cells}"
            # one mask channel for each frame of a latent frame; the first one is the first frame, repeated
            mask = _first_cell(image_BC, video.frames_per_cell, known)
            if has_last_frame:
                mask[:, -1, -1] = 1.0
            return {IMAGE: torch.cat([mask, image_BC], dim=1)}
        case FirstFrameMode.FIRST_CELL:
            empty = image_BC.new_zeros(*image_BC.shape[:2], cells - 1, *image_BC.shape[2:])
            return {IMAGE: torch.cat([image_BC.unsqueeze(2), empty], dim=2)}
        case FirstFrameMode.LEADING_CELL:
            empty = image_BC.new_zeros(*image_BC.shape[:2], cells - 1, *image_BC.shape[2:])
            led = torch.cat([image_BC.unsqueeze(2), empty], dim=2)
            return {IMAGE: torch.cat([led, _first_cell(led, 1)], dim=1)}
        case FirstFrameMode.MARKED_CELL:
            first_BCTHW = image_BC.unsqueeze(2) if image_BC.dim() == 4 else image_BC
            shown = functional.pad(first_BCTHW, (0, 0, 0, 0, 0, cells - first_BCTHW.shape[2]))
            return {IMAGE: torch.cat([shown, _first_cell(shown, 1, first_BCTHW.shape[2])], dim=1)}
        case FirstFrameMode.APPENDED:
            return {IMAGE: image_BC.unsqueeze(2)}
        case FirstFrameMode.REFERENCE:
            return {IMAGE: image_BC}
        case FirstFrameMode.REPEATED | None:
            raise AssertionError("this model reads no first frame")


def with_leading_image(x_BCTHW: Tensor, told_BCTHW: Tensor) -> Tensor:
    """Return the initial latent of a video that an image leads: a little of the image in each latent frame. Source:
    `prepare_latents` of diffusers' HunyuanVideoImageToVideoPipeline."""
    share = torch.tensor(LEADING_NOISE_SHARE).to(x_BCTHW.device)
    return x_BCTHW * share + told_BCTHW[:, :-1, :1].to(x_BCTHW.device) * (1 - share)


def noises_image(video: VideoFacts | None) -> bool:
    """Whether models of `video` read the first frame with noise, as by `noised_image`."""
    return video is not None and video.begins is FirstFrameMode.KEPT_WITH_NOISE


def noised_image(
    image_BCTHW: Tensor, seeds: Sequence[int], sigma_data: float, memory: GuidanceMemory | None = None
) -> Callable[[], ModelKwargs]:
    """Return a function that returns an image's latent with noise of `FIRST_FRAME_SIGMA`, scaled to unit variance like
    other inputs: new noise with each call, from separate random numbers for each of `seeds` (from its complement).
    It continues after the calls that `memory` counts, and counts its own there.

    Source: diffusers, CosmosVideoToWorldPipeline, which draws noise for each text of each step.
    """
    noises = [ImageNoise(image_noise_seed(seed)) for seed in seeds]
    scale = input_scale(FIRST_FRAME_SIGMA, sigma_data)
    memory, shape = memory or GuidanceMemory(), (1, *image_BCTHW.shape[1:])
    for noise in noises:
        for _ in range(memory.inputs_drawn):
            noise.draw(shape)

    def noised() -> dict[str, Tensor]:
        memory.inputs_drawn += 1
        drawn_BCTHW = empty_to_send((len(noises), *shape[1:]), image_BCTHW.device)
        for noise, out in zip(noises, drawn_BCTHW.split(1), strict=True):
            noise.draw_into(out)
        return {IMAGE: (image_BCTHW + sent(drawn_BCTHW, image_BCTHW.device) * FIRST_FRAME_SIGMA) * scale}

    return noised


def keep_image(denoise: Denoise, image_BCTHW: Tensor, mask_B1THW: Tensor) -> Denoise:
    """Return `denoise` with its prediction replaced by the image's latent where that is kept."""

    def kept(x_BCTHW: Tensor, sigma: float) -> Tensor:
        return torch.where(mask_B1THW.bool(), image_BCTHW, denoise(x_BCTHW, sigma))

    return kept


def first_frame_shape(video: VideoFacts, latent_CTHW: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the first-frame latent of a video with this latent shape."""
    channels, _, *sides = latent_CTHW
    return latent_CTHW if video.begins is FirstFrameMode.CONCATENATED else (channels, *sides)


def _first_cell(like_BCTHW: Tensor, channels: int, known: int = 1) -> Tensor:
    """Return a mask with 1 in the first `known` latent frames, 0 after them."""
    batch, _, *cells = like_BCTHW.shape
    mask = like_BCTHW.new_zeros(batch, channels, *cells)
    mask[:, :, :known] = 1.0
    return mask
