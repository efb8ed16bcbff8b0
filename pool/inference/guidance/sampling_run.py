"""Runs the sampling of one image, or of a batch, from the seeds to the last step.

Combines the other modules of this folder; knows neither models, files nor texts. The random numbers of each image are
drawn separately, and nothing else differs between the members of a batch, so neither the rest of the batch nor the
order changes an image except in the last bits, where kernels round differently at another batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from modelpool.pool.devices.pinned_memory import empty_to_send, sent
from modelpool.pool.inference.conditioning.inpainting import Inpainting, masked_denoiser
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart, RunResults
from modelpool.pool.inference.conditioning.starts import NOISE_ONLY, StartLatent
from modelpool.pool.inference.guidance.guided_steps import ModelCall, Unconditional, guided_denoiser
from modelpool.pool.inference.guidance.guiders import Guider
from modelpool.pool.inference.guidance.model_guiders import NO_FIRST_FRAME, FirstFrame
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.noise_path import EXPLODING, flow_path
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory, PartialRun, run_states, sampler_states
from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.samplers import FLOW_FUNCTIONS, FUNCTIONS, Denoise, Noise
from modelpool.pool.inference.sampling.schedules import SigmaTable, levels_of
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import FloatArray, RunHooks, SampleParams
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.weights.options.run_context import call_facts
from modelpool.pool.weights.options.wrappers import WrapperPoint

#: level of a flow above which a run without an image begins with the noise itself, as pipelines do
NOISE_ALONE = 0.999


@dataclass(frozen=True, slots=True, eq=False)
class ImagesToDenoise:
    """The images of one run. They differ in seeds and texts and share the rest of `work`; its own seed is not read.

    shape_CHW  of the latent of each
    cells      latent frames of a video; behind them is its audio. 0: all
    """

    work: SampleParams
    seeds: Sequence[int]
    shape_CHW: tuple[int, ...]
    cells: int = 0


def denoise_images(
    images: ImagesToDenoise,
    prompts: Prompts,
    call: ModelCall,
    guider: Guider,
    device: torch.device,
    hooks: RunHooks,
    start: StartLatent = NOISE_ONLY,
    first_frame: FirstFrame = NO_FIRST_FRAME,
    part: PartialRun | None = None,
) -> Tensor:
    """Return the denoised latents of `images`, from one run: float32 [B, C, H, W] on the CPU, in the model's scale.

    Noise is added to the latent of `start` (float32, in the model's scale), else to its inpainting's. The state
    is kept in float32 on `device`, where the model is called too: with 2 B texts (all negative ones first), or with B
    of them as `guided_denoiser` says. `prompts` are on the host. `part`: the steps of a partial run; its state is
    updated, and passed to `hooks.checkpoint` between two steps. If it pauses, the latent is from after the last step
    done. Raises Stopped before a step if `hooks.should_stop()`, UnusableField for inpainting of other shapes.
    """
    work, wrappers = images.work, call.options.wrappers
    unconditional = Unconditional() if work.schedule.reads_unguided else None
    kept, start_BCHW = _kept(start, (len(images.seeds), *images.shape_CHW), device)

    def prepare() -> Denoise:
        placed = prompts.to(device)
        memory = GuidanceMemory() if part is None else part.guidance
        drawn_inputs = first_frame.drawn_inputs(placed.cond, images.seeds, call.table.sigma_data, memory)
        denoise = guided_denoiser(call, placed, guider, drawn_inputs, unconditional)
        return first_frame.keep(denoise, placed.cond)

    def outer_sample(noise: Noise, sigmas: Tensor) -> Tensor:
        denoise: Denoise = wrappers.around(WrapperPoint.PREPARE_SAMPLING, prepare)()
        stop_if_asked(hooks.should_stop)
        drawn_BC = noise()
        if work.part is not None and not work.part.adds_noise:
            drawn_BC = torch.zeros_like(drawn_BC)
        initial_BC = _initial_latent(drawn_BC, start_BCHW, sigmas, call, first_frame)
        x_BCHW = _initial_or_resumed_latent(part, noise, initial_BC)
        if kept is not None:
            denoise = masked_denoiser(denoise, kept, drawn_BC, sigmas, call.options, call.prediction)
        denoise = _previewed(denoise, hooks, images.cells)
        sampler = wrappers.around(WrapperPoint.SAMPLER_SAMPLE, _sampler(work, call, hooks, part, unconditional))
        step_noise = noise if part is None else _counted(noise, part)
        latent_BCHW: Tensor = sampler(denoise, x_BCHW, sigmas, step_noise, _stoppable(hooks, work, part))
        return latent_BCHW

    sigmas = run_levels(work, call.table)
    with torch.no_grad(), call_facts(sample_sigmas=sigmas):
        noise = _noise_of(images.seeds, images.shape_CHW, device)
        latent_BCHW: Tensor = wrappers.around(WrapperPoint.OUTER_SAMPLE, outer_sample)(noise, sigmas)
        left = float(sigmas[-1])
        if left and call.prediction is Prediction.FLOW:  # as `_initial_latent` reads it again
            latent_BCHW = latent_BCHW / (1.0 - left)
        return latent_BCHW.to("cpu")


def run_levels(work: SampleParams, table: SigmaTable) -> Tensor:
    """Return the noise levels of the run of `work`: before its first step, and after each; the last is 0 unless the
    result keeps noise."""
    levels, part = levels_of(work.schedule, table), work.part
    if part is None:
        return levels[work.schedule.first_step :]
    levels = levels[work.schedule.first_step : (part.last_step or work.schedule.steps) + 1]
    return levels if part.keeps_noise else torch.cat((levels[:-1], levels.new_zeros(1)))


def partial_run_part(run: DenoisingRun) -> RunPart:
    """Let a run pause as its hooks say, and return its state if it pauses, or for the expert that continues it. A run
    that fails forgets its tensors."""
    partial_run, work = run.partial_run, run.work

    @contextmanager
    def pausing(module: nn.Module) -> Iterator[None]:
        partial_run.should_pause = run.hooks.should_pause
        try:
            yield
        except BaseException:
            partial_run.forget()
            raise

    def states(samples_BCHW: Tensor) -> RunResults | None:
        if partial_run.paused:
            return run_states(partial_run, work)
        if work.schedule.switch and not work.schedule.low_noise:
            return sampler_states(samples_BCHW, partial_run.memory)
        return None

    return RunPart(around=pausing, results=states, captures=True)


def _previewed(denoise: Denoise, hooks: RunHooks, cells: int) -> Denoise:
    """Return `denoise`, which offers its predictions for previews, of videos `cells` latent frames, 0 for all;
    itself if nobody can want any."""
    preview = hooks.preview
    if preview is None:
        return denoise

    def denoise_and_offer(x_BCHW: Tensor, sigma: float) -> Tensor:
        clean_BCHW = denoise(x_BCHW, sigma)
        preview(partial(_copied_frames, clean_BCHW, cells))
        return clean_BCHW

    return denoise_and_offer


def _copied_frames(clean_BCHW: Tensor, cells: int) -> tuple[FloatArray, ...]:
    """Return latents on the host; of videos [B, C, T, H, W], only the middle one of `cells` frames, 0 for all."""
    if clean_BCHW.dim() == 5:
        clean_BCHW = clean_BCHW[:, :, (cells or clean_BCHW.shape[2]) // 2]
    return tuple(latent_CHW.numpy() for latent_CHW in clean_BCHW.to("cpu", torch.float32, copy=True).unbind())


def _sampler(
    work: SampleParams, call: ModelCall, hooks: RunHooks, part: PartialRun | None, unconditional: Unconditional | None
) -> Callable[..., Tensor]:
    """Return the sampler function for the steps of `part`, for this kind of prediction and these noise levels."""
    is_flow = call.prediction is Prediction.FLOW
    schedule = work.schedule
    settings = SamplerSettings(
        eta=schedule.eta,
        s_noise=schedule.s_noise,
        s_churn=schedule.s_churn,
        path=flow_path(call.table) if is_flow else EXPLODING,
        table=call.table,
        unconditional=None if unconditional is None else unconditional.read,
        check_stop=partial(stop_if_asked, hooks.should_stop),
    )
    functions = {**FUNCTIONS, **FLOW_FUNCTIONS} if is_flow else FUNCTIONS
    return partial(functions[schedule.sampler], part=part, settings=settings)


def _counted(noise: Noise, part: PartialRun) -> Noise:
    """Return `noise`, which counts its calls in the state of the run."""

    def draw() -> Tensor:
        part.memory.draws += 1
        return noise()

    return draw


def _initial_or_resumed_latent(part: PartialRun | None, noise: Noise, initial_BCHW: Tensor) -> Tensor:
    """Return the latent that a run starts or resumes from. Advances `noise` to its state there."""
    if part is None or part.latent_BCHW is None:
        return initial_BCHW
    for _ in range(part.memory.draws):
        noise()
    return part.latent_BCHW


def _kept(start: StartLatent, shape: tuple[int, ...], device: torch.device) -> tuple[Inpainting | None, Tensor | None]:
    """Return the inpainting on `device`, and the latent that noise is added to."""
    kept = None if start.inpainting is None else start.inpainting.fitting(shape).to(device)
    return kept, kept.latent_BCHW if start.latent_BCHW is None and kept is not None else start.latent_BCHW


def _initial_latent(
    noise_BCHW: Tensor, start_BCHW: Tensor | None, sigmas: Tensor, call: ModelCall, first_frame: FirstFrame
) -> Tensor:
    """Return the initial latent: noise at the first level, added to the start latent."""
    sigma = float(sigmas[0])
    is_flow = call.prediction is Prediction.FLOW
    if start_BCHW is None:
        scale = (1.0 if sigma > NOISE_ALONE else sigma) if is_flow else _initial_scale(sigma, call.table)
        return first_frame.initial_latent(noise_BCHW * scale)
    x_BCHW = noise_BCHW * (sigma if is_flow else _initial_scale(sigma, call.table))
    return x_BCHW + start_BCHW.to(noise_BCHW.device) * (1.0 - sigma if is_flow else 1.0)


def _noise_of(seeds: Sequence[int], shape_CHW: tuple[int, ...], device: torch.device) -> Noise:
    """Return a function that draws fresh noise for all images, [B, C, H, W], each from its own seed."""
    images = [ImageNoise(seed) for seed in seeds]

    def draw() -> Tensor:
        drawn_BC = empty_to_send((len(images), *shape_CHW), device)
        for image, out in zip(images, drawn_BC.split(1), strict=True):
            image.draw_into(out)
        return sent(drawn_BC, device)

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
