"""One picture's latent, from its seed to the last step.

Puts the other modules of this folder together; knows no model, no file and no text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pool.sampling.guidance import PredictNoise, guided_denoiser
from pool.sampling.noise import PictureNoise
from pool.sampling.samplers import FUNCTIONS
from pool.sampling.schedules import SigmaTable, make_sigmas, sd1_sigma_table
from pool.work import RunHooks, SampleWork, Stopped


def denoise_picture(
    predict_noise: PredictNoise,
    work: SampleWork,
    latent_shape_CHW: tuple[int, int, int],
    cond_LD: Tensor,
    uncond_LD: Tensor | None,
    device: torch.device,
    hooks: RunHooks,
    table: SigmaTable | None = None,
) -> Tensor:
    """The denoised latent of `work`, float32 [C, H, W] on the CPU, in the model's own scale.

    Reads the steps, cfg, sampler, schedule and seed of `work`. The state is kept in float32 on `device`, where
    `predict_noise` is called too, with B = 2 (the unconditional text first), or B = 1 when the texts differ in length
    or cfg is 1 (`uncond_LD` may then be None). `table` is the noise the model was trained with: SD1's when None.
    Raises Stopped before the first step for which `hooks.should_stop()` is true.
    """
    table = table or sd1_sigma_table()
    sigmas = make_sigmas(work.schedule, work.steps, table)
    picture = PictureNoise(work.seed)

    def fresh_noise() -> Tensor:
        return picture.draw((1, *latent_shape_CHW)).to(device)

    def on_step(done: int, steps: int) -> None:
        hooks.on_step(done, steps)
        if done < steps:
            _stop_if_asked(hooks)

    with torch.no_grad():
        uncond_BLD = None if uncond_LD is None else uncond_LD[None].to(device)
        denoise = guided_denoiser(predict_noise, table, cond_LD[None].to(device), uncond_BLD, work.cfg)
        _stop_if_asked(hooks)
        x_BCHW = fresh_noise() * _initial_scale(float(sigmas[0]), table)
        return FUNCTIONS[work.sampler](denoise, x_BCHW, sigmas, fresh_noise, on_step)[0].to("cpu")


def _initial_scale(sigma: float, table: SigmaTable) -> float:
    """What the initial noise is multiplied with: `sigma`, or, at the top of the table, the deviation that training saw
    there, signal of unit scale included. Source: ComfyUI, `noise_scaling` with `max_denoise`."""
    return math.sqrt(1.0 + sigma**2) if sigma >= table.sigma_max * (1.0 - 1e-5) else sigma


def _stop_if_asked(hooks: RunHooks) -> None:
    if hooks.should_stop():
        raise Stopped
