"""One picture by itself, as most tests of sampling want it: a run of several with one member."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pool.sampling.guidance import PredictNoise
from pool.sampling.run import denoise_pictures
from pool.work import RunHooks, SampleWork


def denoise_picture(
    predict_noise: PredictNoise,
    work: SampleWork,
    latent_shape_CHW: tuple[int, int, int],
    cond_LD: Tensor,
    uncond_LD: Tensor | None,
    device: torch.device,
    hooks: RunHooks,
    **more: Any,
) -> Tensor:
    """The latent [C, H, W] of `work`, with its own seed; `more` as for `denoise_pictures`."""
    cond_BLD, uncond_BLD = cond_LD[None], None if uncond_LD is None else uncond_LD[None]
    return denoise_pictures(
        predict_noise, work, (work.seed,), latent_shape_CHW, cond_BLD, uncond_BLD, device, hooks, **more
    )[0]
