"""The latents of one picture, or of several at once, from their seeds to the last step.

Puts the other modules of this folder together; knows no model, no file and no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pool.checkpoints.families import Prediction
from pool.options.model_options import ModelOptions
from pool.options.run_context import call_facts
from pool.options.wrappers import WrapperPoint
from pool.sampling.conditions import ApplyHooks, Condition
from pool.sampling.guidance import PredictNoise, guided_denoiser
from pool.sampling.inpainting import Inpainting, masked_denoiser
from pool.sampling.noise import PictureNoise
from pool.sampling.samplers import FUNCTIONS, Denoise, Noise
from pool.sampling.schedules import SigmaTable, make_sigmas, sd1_sigma_table
from pool.stopping import stop_if_asked
from pool.work import RunHooks, SampleWork


def denoise_pictures(
    predict_noise: PredictNoise,
    work: SampleWork,
    seeds: Sequence[int],
    latent_shape_CHW: tuple[int, int, int],
    cond: Condition,
    uncond: Condition | None,
    device: torch.device,
    hooks: RunHooks,
    table: SigmaTable | None = None,
    options: ModelOptions | None = None,
    inpainting: Inpainting | None = None,
    apply_hooks: ApplyHooks | None = None,
    most_at_once: int = 0,
    prediction: Prediction = Prediction.NOISE,
) -> Tensor:
    """The denoised latents of as many pictures as there are `seeds`, in one run: float32 [B, C, H, W] on the CPU, in
    the model's own scale.

    They differ in their seeds and texts and share the rest of `work` (steps, cfg, sampler, schedule), whose own seed is
    not read. The state is kept in float32 on `device`, where `predict_noise` is called too: with twice B texts (all
    unconditional ones first), or with B of them when the texts differ in length or in their hooks, or `most_at_once` is
    1, or cfg is 1 (`uncond` may then be None). `table` is the noise the model was trained with: SD1's when None;
    `prediction` what it predicts. `options` are those of the run; their transformer options are the caller's to apply
    to the model. `apply_hooks` is called with the texts' weight hooks before each batch.

    Each picture's random numbers are its own, drawn one picture at a time; nothing else tells one member of the batch
    from another, so neither the others nor the order change a picture but in the last bits, where kernels round
    otherwise at another batch size.
    Raises Stopped before a step for which `hooks.should_stop()`, UnusableField for `inpainting` of other shapes.
    """
    table = table or sd1_sigma_table()
    options = options or ModelOptions()
    wrappers = options.wrappers
    shape_BCHW = (len(seeds), *latent_shape_CHW)
    kept = None if inpainting is None else inpainting.fitting(shape_BCHW).to(device)

    def prepare() -> Denoise:
        texts = (cond.to(device), None if uncond is None else uncond.to(device))
        return guided_denoiser(predict_noise, table, *texts, work.cfg, options, apply_hooks, most_at_once, prediction)

    def outer_sample(noise: Noise, sigmas: Tensor) -> Tensor:
        denoise: Denoise = wrappers.around(WrapperPoint.PREPARE_SAMPLING, prepare)()
        stop_if_asked(hooks.should_stop)
        first_BCHW = noise()
        x_BCHW = first_BCHW * _initial_scale(float(sigmas[0]), table)
        if kept is not None:
            x_BCHW = x_BCHW + kept.latent_BCHW
            denoise = masked_denoiser(denoise, kept, first_BCHW, sigmas, options)
        sampler = wrappers.around(WrapperPoint.SAMPLER_SAMPLE, FUNCTIONS[work.sampler])
        latent_BCHW: Tensor = sampler(denoise, x_BCHW, sigmas, noise, _stoppable(hooks))
        return latent_BCHW

    sigmas = make_sigmas(work.schedule, work.steps, table)
    with torch.no_grad(), call_facts(sample_sigmas=sigmas):
        noise = _noise_of(seeds, latent_shape_CHW, device)
        latent_BCHW: Tensor = wrappers.around(WrapperPoint.OUTER_SAMPLE, outer_sample)(noise, sigmas)
        return latent_BCHW.to("cpu")


def _noise_of(seeds: Sequence[int], shape_CHW: tuple[int, int, int], device: torch.device) -> Noise:
    """Draws fresh noise for all pictures, [B, C, H, W], each from its own seed."""
    pictures = [PictureNoise(seed) for seed in seeds]

    def draw() -> Tensor:
        drawn = [picture.draw((1, *shape_CHW)) for picture in pictures]
        return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).to(device)

    return draw


def _stoppable(hooks: RunHooks) -> Callable[[int, int], None]:
    """Tells of each step that is done, and stops before the next one when asked to."""

    def on_step(done: int, steps: int) -> None:
        hooks.on_step(done, steps)
        if done < steps:
            stop_if_asked(hooks.should_stop)

    return on_step


def _initial_scale(sigma: float, table: SigmaTable) -> float:
    """What the initial noise is multiplied with: `sigma`, or, at the top of the table, the deviation that training saw
    there, signal of unit scale included. Source: ComfyUI, `noise_scaling` with `max_denoise`."""
    return math.sqrt(1.0 + sigma**2) if sigma >= table.sigma_max * (1.0 - 1e-5) else sigma
