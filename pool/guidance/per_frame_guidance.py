"""Per-frame guidance scales of videos, for models published with a scale that varies over the frames. Pure arithmetic.

Shape legend: B batch, C channels, T latent frames, H W height and width of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.core.sampling_facts import Guidance, SamplingDefaults

#: the lowest guidance scale of a video: no guidance
MIN_GUIDANCE = 1.0


def frame_guidance_scales(
    defaults: SamplingDefaults | None, most: float, cells: int, device: torch.device
) -> Tensor | None:
    """Return the guidance scale of each of `cells` latent frames, [1, 1, T, 1, 1] on `device`, at most `most`; None for
    models with the same scale for all.

    Sources: diffusers, StableVideoDiffusionPipeline; TrianglePredictionGuider of Stability-AI/generative-models.
    """
    match None if defaults is None else defaults.guidance:
        case Guidance.RISING_WITH_FRAMES:
            strengths_T = torch.linspace(MIN_GUIDANCE, most, cells)
        case Guidance.RISING_AND_FALLING:
            position_T = torch.linspace(0.0, 1.0, cells)
            strengths_T = MIN_GUIDANCE + (most - MIN_GUIDANCE) * 2.0 * (position_T - (position_T + 0.5).floor()).abs()
        case _:
            return None
    return strengths_T[None, None, :, None, None].to(device)
