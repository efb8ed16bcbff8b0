"""One image by itself, as most tests of sampling want it: a run of several with one member."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.core.stage_params import RunHooks, SampleParams
from modelpool.pool.guidance.classifier_free import PredictNoise
from modelpool.pool.guidance.sampling_run import denoise_images


def denoise_image(
    predict_noise: PredictNoise,
    work: SampleParams,
    latent_shape_CHW: tuple[int, int, int],
    cond_LD: Tensor,
    uncond_LD: Tensor | None,
    device: torch.device,
    hooks: RunHooks,
    cond_hooks: tuple[object | None, object | None] = (None, None),
    **more: Any,
) -> Tensor:
    """The latent [C, H, W] of `work`, with its own seed; `cond_hooks` are the weight hooks of the two texts, and `more`
    is as for `denoise_images`."""
    cond = Condition(cond_LD[None], cond_hooks[0])
    uncond = None if uncond_LD is None else Condition(uncond_LD[None], cond_hooks[1])
    return denoise_images(predict_noise, work, (work.seed,), latent_shape_CHW, cond, uncond, device, hooks, **more)[0]
