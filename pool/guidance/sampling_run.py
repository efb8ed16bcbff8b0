"""Runs the sampling of one image, or of a batch, from the seeds to the last step.

Combines the other modules of this folder; knows neither models, files nor texts. The random numbers of each image are
drawn separately, and nothing else differs between the members of a batch, so neither the rest of the batch nor the
order changes an image except in the last bits, where kernels round differently at another batch size.
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
from modelpool.pool.conditioning.micro_conditioning import ModelKwargs
from modelpool.pool.conditioning.regions import NO_REGIONS, Regions
from modelpool.pool.core.sampling_facts import Prediction
from modelpool.pool.core.stage_params import RunHooks, SampleParams
from modelpool.pool.core.stopping import stop_if_asked
from modelpool.pool.guidance.classifier_free import ImageGuidance, PredictNoise, guided_denoiser
from modelpool.pool.guidance.model_guiders import DEFAULT_GUIDER, GuiderConfig, run_guider
from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.run_context import call_facts
from modelpool.pool.options.wrappers import WrapperPoint
from modelpool.pool.sampling.noise import ImageNoise
from modelpool.pool.sampling.partial_run import PartialRun, run_states
from modelpool.pool.sampling.samplers import DRAWING, FLOW_FUNCTIONS, FUNCTIONS, Denoise, Noise, sample_euler_ancestral
from modelpool.pool.sampling.schedules import SigmaTable, make_sigmas, sd1_sigma_table


def denoise_images(
    predict_noise: PredictNoise,
    work: SampleParams,
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
    max_batch: int = 0,
    prediction: Prediction = Prediction.NOISE,
    start_BCHW: Tensor | None = None,
    regions: Regions = NO_REGIONS,
    without_image: ModelKwargs | None = None,
    guider: GuiderConfig = DEFAULT_GUIDER,
    part: PartialRun | None = None,
) -> Tensor:
    """Return the denoised latents of an image for each of `seeds`, from one run: float32 [B, C, H, W] on the CPU, in
    the model's scale.

    The images differ in seeds and texts and share the rest of `work`, whose own seed is not read. Noise is added to
    `start_BCHW` (float32, in the model's scale), else to the latent of `inpainting`. The state is kept in float32 on
    `device`, where `predict_noise` is called too: with 2 B texts (all unconditional ones first), or with B of them if
    the texts differ in length or hooks, or `max_batch` is 1, or cfg is 1 (`uncond` may then be None).
    `table`: the noise levels of the training, SD1's if None. Transformer options of `options` are applied by the
    caller. `apply_hooks` is called with the texts' weight hooks before each batch. `regions`: prompts for parts of the
    image in addition to `cond`. `without_image`: model inputs that replace those of the same names for the prediction
    of `uncond` without an image. `guider`: guidance options. `part`: the steps of a partial run; its state is updated,
    and passed to `hooks.checkpoint` between two steps. If it pauses, the latent is that after the last step done.
    Raises Stopped before a step if `hooks.should_stop()`, UnusableField for `inpainting` of other shapes.
    """
    table, options = table or sd1_sigma_table(), options or ModelOptions()
    wrappers = options.wrappers
    kept, start = _kept(inpainting, start_BCHW, (len(seeds), *latent_shape_CHW), device)

    def prepare() -> Denoise:
        negative = None if uncond is None else uncond.to(device)
        positive, blank = cond.to(device), _image_guidance(negative, without_image, work.image_cfg)
        how = work.cfg, options, apply_hooks, max_batch, prediction, regions.to(device), guider.cfg_rescale, blank
        memory = None if part is None else part.guidance
        run = run_guider(guider, work, seeds, positive, table.sigma_data, memory)
        return run.kept(guided_denoiser(predict_noise, table, positive, negative, *how, *run.denoiser_args))

    def outer_sample(noise: Noise, sigmas: Tensor) -> Tensor:
        denoise: Denoise = wrappers.around(WrapperPoint.PREPARE_SAMPLING, prepare)()
        stop_if_asked(hooks.should_stop)
        drawn_BC = noise()
        x_BCHW = _initial_or_resumed_latent(
            part, work.sampler, noise, _first_latent(drawn_BC, start, sigmas, table, prediction, guider)
        )
        if kept is not None:
            denoise = masked_denoiser(denoise, kept, drawn_BC, sigmas, options, prediction)
        sampler = wrappers.around(WrapperPoint.SAMPLER_SAMPLE, _sampler(work.sampler, prediction, table, part))
        latent_BCHW: Tensor = sampler(denoise, x_BCHW, sigmas, noise, _stoppable(hooks, work, part))
        return latent_BCHW

    sigmas = make_sigmas(work.schedule, work.steps, table)[work.first_step :]
    with torch.no_grad(), call_facts(sample_sigmas=sigmas):
        noise = _noise_of(seeds, latent_shape_CHW, device)
        latent_BCHW: Tensor = wrappers.around(WrapperPoint.OUTER_SAMPLE, outer_sample)(noise, sigmas)
        return latent_BCHW.to("cpu")


def _sampler(name: str, prediction: Prediction, table: SigmaTable, part: PartialRun | None) -> Callable[..., Tensor]:
    """Return the sampler function for the steps of `part`, for this kind of prediction and the noise levels of
    `table`."""
    if name == "euler_ancestral" and table.ancestral_residue:
        return partial(sample_euler_ancestral, left=table.ancestral_residue, part=part)
    functions = {**FUNCTIONS, **FLOW_FUNCTIONS} if prediction is Prediction.FLOW else FUNCTIONS
    return partial(functions[name], part=part)


def _initial_or_resumed_latent(part: PartialRun | None, sampler: str, noise: Noise, initial_BCHW: Tensor) -> Tensor:
    """Return the latent that a run starts or resumes from. Advances `noise` to its state at that step."""
    if part is None or part.latent_BCHW is None:
        return initial_BCHW
    for _ in range(part.done if sampler in DRAWING else 0):
        noise()
    return part.latent_BCHW


def _image_guidance(negative: Condition | None, inputs: ModelKwargs | None, strength: float) -> ImageGuidance | None:
    """Return the negative prompt with the `inputs` of a model without an image."""
    if negative is None or inputs is None:
        return None
    model_kwargs = {name: value.to(negative.context_BLD.device) for name, value in inputs.items()}
    return ImageGuidance(replace(negative, model_kwargs={**negative.model_kwargs, **model_kwargs}), strength)


def _kept(
    inpainting: Inpainting | None, start_BCHW: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> tuple[Inpainting | None, Tensor | None]:
    """Return the inpainting on `device`, and the latent that noise is added to."""
    kept = None if inpainting is None else inpainting.fitting(shape).to(device)
    return kept, kept.latent_BCHW if start_BCHW is None and kept is not None else start_BCHW


def _first_latent(
    noise_BCHW: Tensor,
    start_BCHW: Tensor | None,
    sigmas: Tensor,
    table: SigmaTable,
    prediction: Prediction,
    guider: GuiderConfig,
) -> Tensor:
    """Return the initial latent: noise at the first level, added to the start latent."""
    sigma = float(sigmas[0])
    is_flow = prediction is Prediction.FLOW
    x_BCHW = noise_BCHW * (sigma if is_flow else _initial_scale(sigma, table))
    if start_BCHW is None:
        return guider.initial_latent(x_BCHW)
    return x_BCHW + start_BCHW.to(noise_BCHW.device) * (1.0 - sigma if is_flow else 1.0)


def _noise_of(seeds: Sequence[int], shape_CHW: tuple[int, ...], device: torch.device) -> Noise:
    """Return a function that draws fresh noise for all images, [B, C, H, W], each from its own seed."""
    images = [ImageNoise(seed) for seed in seeds]

    def draw() -> Tensor:
        drawn = [image.draw((1, *shape_CHW)) for image in images]
        return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).to(device)

    return draw


def _stoppable(hooks: RunHooks, work: SampleParams, part: PartialRun | None) -> Callable[[int, int], None]:
    """Return a step callback that reports each step and stops the run before the next one if requested; before that,
    it offers the state of `part` for a checkpoint."""

    def on_step(done: int, steps: int) -> None:
        hooks.on_step(done, steps)
        if done < steps:
            stop_if_asked(hooks.should_stop)
            if part is not None:
                hooks.checkpoint(lambda: run_states(part, work))

    return on_step


def _initial_scale(sigma: float, table: SigmaTable) -> float:
    """Return the factor of the initial noise: `sigma`, or, at the top of the table, the standard deviation in training,
    including the signal of unit scale. Source: ComfyUI, `noise_scaling` with `max_denoise`."""
    return math.sqrt(1.0 + sigma**2) if sigma >= table.sigma_max * (1.0 - 1e-5) else sigma
