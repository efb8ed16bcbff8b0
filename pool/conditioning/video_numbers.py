"""What models are told of a video in numbers, by the name "numbers" of `pool.models.diffusion.architecture`. Torch-free
but for the tensor that is made."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelpool.pool.core.sampling_facts import VideoNumbers
from modelpool.pool.core.stage_params import SampleWork

NUMBERS = "numbers"


def numbers_of_video(numbers: VideoNumbers, work: SampleWork) -> Tensor:
    """What a model is told of the video of `work`, without a batch: [N], or [T, N] for one that is told of each frame.

    Sources: diffusers, StableVideoDiffusionPipeline; simple_video_sample.py of Stability-AI/generative-models, where a
    view from straight above is at 0, and the last frame of a way around looks from where the image does.
    """
    match numbers:
        case VideoNumbers.MOTION:
            return torch.tensor([work.frame_rate - 1.0, float(work.motion), work.image_noise])
        case VideoNumbers.NOISE:
            return torch.tensor([work.image_noise])
        case VideoNumbers.VIEWS:
            height = math.radians(90.0 - work.elevation)
            ways = [2.0 * math.pi * ((frame + 1) % work.frames) / work.frames for frame in range(work.frames)]
            return torch.tensor([[work.image_noise, height, way] for way in ways])
