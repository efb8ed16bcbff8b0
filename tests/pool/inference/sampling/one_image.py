"""One image by itself, as most tests of sampling want it: a run of several with one member; and a guided step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import ApplyHooks, Condition
from modelpool.pool.inference.conditioning.micro_conditioning import ModelKwargs
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.regions import NO_REGIONS, Regions
from modelpool.pool.inference.guidance.guided_steps import ModelCall, PredictNoise, guided_denoiser
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance, Guider
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling.samplers import Denoise
from modelpool.pool.inference.sampling.schedules import SigmaTable, sd1_sigma_table
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import RunHooks, SampleParams
from modelpool.pool.weights.options.model_options import ModelOptions


def denoise_image(
    predict_noise: PredictNoise,
    work: SampleParams,
    latent_shape_CHW: tuple[int, int, int],
    cond_LD: Tensor,
    uncond_LD: Tensor | None,
    device: torch.device,
    hooks: RunHooks,
    cond_hooks: tuple[object | None, object | None] = (None, None),
    options: ModelOptions | None = None,
    apply_hooks: ApplyHooks | None = None,
    **more: Any,
) -> Tensor:
    """The latent [C, H, W] of `work`, with its own seed, by plain guidance and with SD1's noise levels; `cond_hooks`
    are the weight hooks of the two texts, and `more` is as for `denoise_images`."""
    prompts = Prompts(
        Condition(cond_LD[None], cond_hooks[0]),
        None if uncond_LD is None else Condition(uncond_LD[None], cond_hooks[1]),
    )
    call = ModelCall(predict_noise, sd1_sigma_table(), options=options or ModelOptions(), apply_hooks=apply_hooks)
    images = ImagesToDenoise(work, (work.seed,), latent_shape_CHW)
    return denoise_images(images, prompts, call, ClassifierFreeGuidance(work.guidance.cfg), device, hooks, **more)[0]


def guided(
    predict_noise: PredictNoise,
    table: SigmaTable,
    cond: Tensor | Condition,
    uncond: Tensor | Condition | None,
    cfg: float,
    options: ModelOptions | None = None,
    apply_hooks: ApplyHooks | None = None,
    max_batch: int = 0,
    prediction: Prediction = Prediction.NOISE,
    regions: Regions = NO_REGIONS,
    without_image: ModelKwargs | None = None,
    guider: Guider | None = None,
) -> Denoise:
    """The `denoise` of two texts, by classifier-free guidance unless there is a `guider`."""
    texts = [Condition(text) if isinstance(text, Tensor) else text for text in (cond, uncond)]
    assert texts[0] is not None
    call = ModelCall(predict_noise, table, prediction, options or ModelOptions(), apply_hooks, max_batch)
    prompts = Prompts(texts[0], texts[1], regions, without_image)
    return guided_denoiser(call, prompts, guider or ClassifierFreeGuidance(cfg))
