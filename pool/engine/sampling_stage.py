"""The stage that samples, for one task or a batch: goes through the parts of a run (`pool.engine.all_run_parts`) and
knows no feature by name. Without memory management.

Shape legend: B batch, L tokens, D text width, C latent channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from modelpool.pool.engine.all_run_parts import RUN_PARTS
from modelpool.pool.families.parts.audio_tracks import SoundTrack
from modelpool.pool.inference.conditioning.guides import guided_end, guided_start
from modelpool.pool.inference.conditioning.run_parts import (
    NO_RESOURCES,
    CallInputs,
    DenoisingRun,
    PreparePart,
    RunPart,
    RunResources,
    RunResults,
)
from modelpool.pool.inference.conditioning.starts import StartLatent, start_of
from modelpool.pool.inference.guidance.call_model import call_model, table_of
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.model_guiders import FirstFrame, guider_of
from modelpool.pool.inference.guidance.run_texts import prompts_of
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.guidance.sound_track_run import with_sounds
from modelpool.pool.inference.pixels.latent_pixels import latent_shape, sampled_shape, sound_length_of, to_model_scale
from modelpool.pool.inference.sampling.partial_run import partial_run_of
from modelpool.pool.values.core.errors import CorruptFile, counted, unusable_field
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.values.core.stage_params import Latent, RunHooks, SampleParams
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def sample(
    work: SampleParams,
    inputs: TaskInputs,
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
) -> Latent:
    """Denoise the latent of `work` from its seed, and from its start latent if it has one. Raises Stopped at a step or
    layer.

    With `division.batch` 1 the two texts are evaluated separately, each with its own length. `facts` are the model's.
    """
    (made,) = sample_batch((work,), (inputs,), diffusion_model, latent, hooks, division, facts)
    assert isinstance(made, Latent), f"a partial run has no decodable latent: {work}"
    return made


def sample_batch(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
    resources: RunResources = NO_RESOURCES,
    parts: Sequence[PreparePart] = RUN_PARTS,
) -> RunResults:
    """`sample` for each of `works`, which differ in their seeds and texts, in one run: `denoise_images`. `parts` are
    the features that may act in it, with what the worker has ready for them in `resources`. A part may return other
    results: states of a run that pauses, or that another expert continues.

    All prompts have one length, and so have all negative prompts. Raises CorruptFile if any latent is not finite.
    """
    if not works[0].steps_run:
        return _unsampled(works, inputs, latent)
    found = ready_run(works, inputs, diffusion_model, latent, hooks, division, facts, resources, parts)
    return results_of(found, _sampled(found))


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRun:
    """A run with the parts that act in it, before its weights are used; and what it starts from."""

    run: DenoisingRun
    parts: Sequence[RunPart]
    start: StartLatent


def ready_run(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    facts: SamplingFacts,
    resources: RunResources,
    parts: Sequence[PreparePart] = RUN_PARTS,
) -> ReadyRun:
    """Return the run of `works`, as `sample_batch` runs it."""
    work = works[0]
    shape_CHW, cells = sampled_shape(work, latent), latent.sides(work.shape.width, work.shape.height)
    start = guided_start(start_of(works, inputs, cells), work, inputs, shape_CHW)
    _check_start(start, shape_CHW, work)
    if latent.sound is not None and start.latent_BCHW is not None and start.latent_BCHW.shape[1:] != shape_CHW:
        found = "x".join(map(str, start.latent_BCHW.shape[2:]))
        raise unusable_field("latent", f"{found} cells", f"{'x'.join(map(str, shape_CHW[1:]))}: its frames and audio")
    # a model for one of the texts, and another one for the negative text
    max_batch = 1 if facts.has_unconditional or work.gpus else 0 if division is None else division.batch
    run = DenoisingRun(
        works,
        inputs,
        diffusion_model,
        latent,
        facts,
        shape_CHW,
        table_of(facts, work),
        partial_run_of(works, inputs, diffusion_model.device, resources.resumed),
        resources,
        prompts_of(works, inputs, facts, cells, max_batch != 1),
        diffusion_model.model_options,
        hooks,
        max_batch,
    )
    return ReadyRun(run, [part for prepare in parts if (part := prepare(run)) is not None], start)


def results_of(found: ReadyRun, samples_BCHW: Tensor) -> RunResults:
    """Return the results of a run from the latents after its last step. Raises CorruptFile if any is not finite."""
    _check_finite(samples_BCHW, found.run.work)
    for part in found.parts:
        results = None if part.results is None else part.results(samples_BCHW)
        if results is not None:
            return results
    return _latents(samples_BCHW, found.run.work)


def _check_start(start: StartLatent, shape_CHW: tuple[int, ...], work: SampleParams) -> None:
    """Raise UnusableField for a start latent of another kind of model."""
    if start.latent_BCHW is not None and (found := start.latent_BCHW.shape[1]) != shape_CHW[0]:
        expected = f"{shape_CHW[0]}, which model {work.model.name!r} has; decode and encode it in between"
        raise unusable_field("latent", counted(found, "channel"), expected)


def _sampled(found: ReadyRun) -> Tensor:
    """Return the latents after the last step."""
    run = found.run
    captures = all(part.captures for part in found.parts)
    with run.model.running(stop_check(run.hooks), run.options, captures) as module:
        return denoised(found, module, partial(call_as_asked, run.facts))


def call_as_asked(facts: SamplingFacts, call: CallInputs) -> Tensor:
    """Return the prediction of a model of `facts` for one call."""
    return call_model(
        facts, call.module, call.x_BCHW, call.level_B, call.context_BLD, call.model_kwargs, call.residuals
    )


def denoised(found: ReadyRun, module: nn.Module, predict: Callable[[CallInputs], Tensor]) -> Tensor:
    """Return the latents after the last step of a run. Its `module` may run now. `predict` calls it, with what the
    parts have made of the inputs."""
    run, parts = found.run, found.parts
    work, facts, model, partial_run, clock = run.work, run.facts, run.model, run.partial_run, run.clock
    dtype, device = model.compute_dtype, model.device
    changes = [part.before_call for part in parts if part.before_call is not None]
    with ExitStack() as entered:
        for part in parts:
            if part.around is not None:
                entered.enter_context(part.around(module))

        def predict_noise(x_BCHW: Tensor, level_B: Tensor, context_BLD: Tensor, **model_kwargs: Tensor) -> Tensor:
            call = CallInputs(module, x_BCHW.to(dtype), level_B, context_BLD.to(dtype), model_kwargs)
            for change in changes:
                change(call)
            return predict(call)

        call = ModelCall(
            predict_noise, run.table, facts.prediction, run.options, run.apply_hooks, run.max_batch, run.spread
        )
        shape_BC, cond = (len(run.works), *run.shape_CHW), run.prompts.cond
        found_BC = denoise_images(
            ImagesToDenoise(work, [each.seed for each in run.works], run.shape_CHW, run.cells),
            run.prompts,
            call,
            guider_of(facts, work, cond, shape_BC, device, partial_run.guidance, lambda: clock.now, run.table),
            device,
            run.hooks,
            found.start,
            FirstFrame.of(facts, work, cond),
            partial_run,
        )
        return found_BC if partial_run.paused else guided_end(found_BC, work, cond.model_kwargs)


def _check_finite(samples_BCHW: Tensor, work: SampleParams) -> None:
    """Raise CorruptFile for a latent with NaN or infinity."""
    if not torch.isfinite(samples_BCHW).all():
        loras = "".join(f" with LoRA {lora.name!r} at {lora.strength}" for lora in work.loras)
        raise CorruptFile(f"model {work.model.name!r}{loras}: found a latent with NaN or infinity, expected numbers")


def _unsampled(works: Sequence[SampleParams], inputs: Sequence[TaskInputs], latent: LatentFacts) -> tuple[Latent, ...]:
    """Return the latents of runs without a step: those that they start from, or latents that are zero for the VAE."""
    found_BCHW = start_of(works, inputs, latent.sides(works[0].shape.width, works[0].shape.height)).latent_BCHW
    if found_BCHW is None:
        found_BCHW = to_model_scale(torch.zeros(len(works), *sampled_shape(works[0], latent)), latent)
    shape = works[0].shape
    if latent.sound is not None and shape.frames:
        cells = latent_shape(shape.width, shape.height, shape.frames, latent)[1]
        return with_sounds(found_BCHW, SoundTrack(latent.sound, cells, sound_length_of(shape, latent)))
    return _latents(found_BCHW, works[0])


def _latents(samples_BCHW: Tensor, work: SampleParams) -> tuple[Latent, ...]:
    """Return the latent of each image, without the leading cells that its result drops."""
    kept_BCHW = samples_BCHW[:, :, work.shape.leading - work.leading_kept :].contiguous()
    return tuple(Latent(samples_CHW.numpy()) for samples_CHW in kept_BCHW.unbind())
