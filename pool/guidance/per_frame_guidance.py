"""How strongly each frame of a video follows what guides it, where a model was published with more for some than for
others. Pure arithmetic.

Shape legend: B batch, C channels, T cells of time, H W height and width of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.core.sampling_facts import Guidance, UsualRun

#: where the guidance of a video is weakest: a frame that is as it is by itself
LEAST_STRENGTH = 1.0


def frame_strengths(usual: UsualRun | None, most: float, cells: int, device: torch.device) -> Tensor | None:
    """The strength of each of so many cells of time, [1, 1, T, 1, 1] on `device`, the largest `most`, for a model that
    is run so; None where all have the same.

    Sources: diffusers, StableVideoDiffusionPipeline; TrianglePredictionGuider of Stability-AI/generative-models.
    """
    match None if usual is None else usual.guidance:
        case Guidance.RISING_WITH_FRAMES:
            strengths_T = torch.linspace(LEAST_STRENGTH, most, cells)
        case Guidance.RISING_AND_FALLING:
            way_T = torch.linspace(0.0, 1.0, cells)
            strengths_T = LEAST_STRENGTH + (most - LEAST_STRENGTH) * 2.0 * (way_T - (way_T + 0.5).floor()).abs()
        case _:
            return None
    return strengths_T[None, None, :, None, None].to(device)
