"""The latents of one image, or of several at once, from their seeds to the last step.

Puts the other modules of this folder together; knows no model, no file and no text. Each image's random numbers are
its own, drawn one image at a time; nothing else tells one member of a batch from another, so neither the others nor
the order change an image but in the last bits, where kernels round otherwise at another batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import ApplyHooks, Condition
from modelpool.pool.conditioning.inpainting import Inpainting, masked_denoiser
from modelpool.pool.conditioning.micro_conditioning import Extras
from modelpool.pool.conditioning.regions import NO_REGIONS, Regions
from modelpool.pool.core.sampling_facts import Prediction
from modelpool.pool.core.stage_params import RunHooks, SampleWork
from modelpool.pool.core.stopping import stop_if_asked
from modelpool.pool.guidance.classifier_free import PredictNoise, WithoutImage, guided_denoiser
from modelpool.pool.guidance.model_guiders import PLAIN_WAYS, OwnWays, guiding
from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.run_context import call_facts
from modelpool.pool.options.wrappers import WrapperPoint
from modelpool.pool.sampling.noise import ImageNoise
from modelpool.pool.sampling.partial_run import Part
from modelpool.pool.sampling.samplers import DRAWING, FLOW_FUNCTIONS, FUNCTIONS, Denoise, Noise, sample_euler_ancestral
from modelpool.pool.sampling.schedules import SigmaTable, make_sigmas, sd1_sigma_table


def denoise_images(
    predict_noise: PredictNoise,
    work: SampleWork,
    seeds: Sequence[int],
    latent_shape_CHW: tuple[int, ...],
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
    start_BCHW: Tensor | None = None,
    regions: Regions = NO_REGIONS,
    without_image: Extras | None = None,
    ways: OwnWays = PLAIN_WAYS,
    part: Part | None = None,
) -> Tensor:
    """Denoised latents of an image for each of `seeds`, in one run: float32 [B, C, H, W] on the CPU, as models see.

    They differ in their seeds and texts and share the rest of `work`, whose own seed is not read. Noise is added to
    `start_BCHW` (float32, the model's own scale), else to what `inpainting` keeps. The state is kept in float32 on
    `device`, where `predict_noise` is called too: with twice B texts (all unconditional ones first), or with B of them
    when the texts differ in length or in their hooks, or `most_at_once` is 1, or cfg is 1 (`uncond` may then be None).
    `table`: the noise trained with, SD1's when None. Transformer options of `options` are the caller's to apply.
    `apply_hooks` is called with the texts' weight hooks before each batch. `regions`: texts beside `cond` for a part
    each. `without_image`: told in place of its namesakes where the model is asked about `uncond` without an image.
    `ways`: what few models do. `part`: the steps to make, where not all; its memory is of them then. Raises Stopped
    before a step for which `hooks.should_stop()`, UnusableField for `inpainting` of other shapes.
    """
    table, options = table or sd1_sigma_table(), options or ModelOptions()
    wrappers = options.wrappers
    kept, start = _kept(inpainting, start_BCHW, (len(seeds), *latent_shape_CHW), device)

    def prepare() -> Denoise:
        negative = None if uncond is None else uncond.to(device)
        positive, blank = cond.to(device), _without(negative, without_image, work.image_cfg)
        how = work.cfg, options, apply_hooks, most_at_once, prediction, regions.to(device), ways.kept_length, blank
        own = guiding(ways, work, seeds, positive, table.sigma_data)
        return own.kept(guided_denoiser(predict_noise, table, positive, negative, *how, *own.for_guidance))

    def outer_sample(noise: Noise, sigmas: Tensor) -> Tensor:
        denoise: Denoise = wrappers.around(WrapperPoint.PREPARE_SAMPLING, prepare)()
        stop_if_asked(hooks.should_stop)
        drawn_BC = noise()
        x_BCHW = _handed_on(part, work.sampler, noise, _first_latent(drawn_BC, start, sigmas, table, prediction, ways))
        if kept is not None:
            denoise = masked_denoiser(denoise, kept, drawn_BC, sigmas, options, prediction)
        sampler = wrappers.around(WrapperPoint.SAMPLER_SAMPLE, _sampler(work.sampler, prediction, table, part))
        latent_BCHW: Tensor = sampler(denoise, x_BCHW, sigmas, noise, _stoppable(hooks))
        return latent_BCHW

    sigmas = make_sigmas(work.schedule, work.steps, table)[work.first_step :]
    with torch.no_grad(), call_facts(sample_sigmas=sigmas):
        noise = _noise_of(seeds, latent_shape_CHW, device)
        latent_BCHW: Tensor = wrappers.around(WrapperPoint.OUTER_SAMPLE, outer_sample)(noise, sigmas)
        return latent_BCHW.to("cpu")


def _sampler(name: str, prediction: Prediction, table: SigmaTable, part: Part | None) -> Callable[..., Tensor]:
    """The function of a sampler for the steps of `part`, for models that predict so and were trained with the levels of
    `table`."""
    if name == "euler_ancestral" and table.left:
        return partial(sample_euler_ancestral, left=table.left, part=part)
    functions = {**FUNCTIONS, **FLOW_FUNCTIONS} if prediction is Prediction.FLOW else FUNCTIONS
    return partial(functions[name], part=part)


def _handed_on(part: Part | None, sampler: str, noise: Noise, begun_BCHW: Tensor) -> Tensor:
    """What a run goes on from, with `noise` where it was then; `begun_BCHW` where it is a schedule's first."""
    if part is None or part.latent_BCHW is None:
        return begun_BCHW
    for _ in range(part.begin if sampler in DRAWING else 0):
        noise()
    return part.latent_BCHW


def _without(negative: Condition | None, told: Extras | None, strength: float) -> WithoutImage | None:
    """The negative prompt with what a model is `told` that is to see no image."""
    if negative is None or told is None:
        return None
    extras = {name: value.to(negative.context_BLD.device) for name, value in told.items()}
    return WithoutImage(replace(negative, extras={**negative.extras, **extras}), strength)


def _kept(
    inpainting: Inpainting | None, start_BCHW: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> tuple[Inpainting | None, Tensor | None]:
    """What is kept, on `device`, and what noise is added to."""
    kept = None if inpainting is None else inpainting.fitting(shape).to(device)
    return kept, kept.latent_BCHW if start_BCHW is None and kept is not None else start_BCHW


def _first_latent(
    noise_BCHW: Tensor,
    start_BCHW: Tensor | None,
    sigmas: Tensor,
    table: SigmaTable,
    prediction: Prediction,
    ways: OwnWays,
) -> Tensor:
    """What a run begins with: noise at its first level, and what is there beside it."""
    sigma = float(sigmas[0])
    is_flow = prediction is Prediction.FLOW
    x_BCHW = noise_BCHW * (sigma if is_flow else _initial_scale(sigma, table))
    if start_BCHW is None:
        return ways.begun(x_BCHW)
    return x_BCHW + start_BCHW.to(noise_BCHW.device) * (1.0 - sigma if is_flow else 1.0)


def _noise_of(seeds: Sequence[int], shape_CHW: tuple[int, ...], device: torch.device) -> Noise:
    """Draws fresh noise for all images, [B, C, H, W], each from its own seed."""
    images = [ImageNoise(seed) for seed in seeds]

    def draw() -> Tensor:
        drawn = [image.draw((1, *shape_CHW)) for image in images]
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
