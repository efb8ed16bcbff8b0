"""Per-frame guidance scales of videos, for models published with a scale that varies over the frames.

Shape legend: B batch, C channels, T latent frames, H W height and width of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance
from modelpool.pool.values.core.sampling_facts import Guidance

#: the lowest guidance scale of a video: no guidance
MIN_GUIDANCE = 1.0


#: the kinds of guidance with a scale for each frame
PER_FRAME = frozenset({Guidance.RISING_WITH_FRAMES, Guidance.RISING_AND_FALLING})


class PerFrameGuidance(ClassifierFreeGuidance):
    """Classifier-free guidance with a scale for each latent frame, of which `scale` is the largest."""

    def __init__(self, scale: float, scales_11T11: Tensor) -> None:
        super().__init__(scale)
        self._scales_11T11 = scales_11T11

    @property
    def scales(self) -> Tensor:
        """The guidance scale of each latent frame."""
        return self._scales_11T11


def frame_guidance_scales(guidance: Guidance, most: float, cells: int, device: torch.device) -> Tensor:
    """Return the guidance scale of each of `cells` latent frames, [1, 1, T, 1, 1] on `device`, at most `most`, for one
    of the kinds `PER_FRAME`.

    Sources: diffusers, StableVideoDiffusionPipeline; TrianglePredictionGuider of Stability-AI/generative-models.
    """
    assert guidance in PER_FRAME, f"{guidance} has one scale"
    if guidance is Guidance.RISING_WITH_FRAMES:
        scales_T = torch.linspace(MIN_GUIDANCE, most, cells)
    else:
        position_T = torch.linspace(0.0, 1.0, cells)
        scales_T = MIN_GUIDANCE + (most - MIN_GUIDANCE) * 2.0 * (position_T - (position_T + 0.5).floor()).abs()
    return scales_T[None, None, :, None, None].to(device)
