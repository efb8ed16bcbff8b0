"""Conditioning numbers of video models (motion, noise, camera), the input "numbers" of the diffusion architectures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelpool.pool.values.core.sampling_facts import VideoNumbers
from modelpool.pool.values.core.stage_params import SampleParams

NUMBERS = "numbers"


def numbers_of_video(numbers: VideoNumbers, work: SampleParams) -> Tensor:
    """Return the conditioning numbers of the video of `work`, without a batch: [N], or [T, N] for numbers per frame.

    Sources: diffusers, StableVideoDiffusionPipeline; simple_video_sample.py of Stability-AI/generative-models, where a
    view from straight above is at 0, and the last frame of an orbit has the image's view.
    """
    image, frames = work.image_numbers, work.shape.frames
    match numbers:
        case VideoNumbers.MOTION:
            return torch.tensor([work.shape.frame_rate - 1.0, float(image.motion), image.image_noise])
        case VideoNumbers.NOISE:
            return torch.tensor([image.image_noise])
        case VideoNumbers.VIEWS:
            height = math.radians(90.0 - image.elevation)
            angles = [2.0 * math.pi * ((frame + 1) % frames) / frames for frame in range(frames)]
            return torch.tensor([[image.image_noise, height, angle] for angle in angles])
