"""Calls a diffusion model of any kind, and assembles its inputs other than latents and text states.

Knows that UNets and transformers are called differently, and which numbers of a run each model reads. Does not know
samplers.

Shape legend: B batch, C latent channels, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.camera_path import CAMERA
from modelpool.pool.inference.conditioning.guides import GUIDE_MASK
from modelpool.pool.inference.conditioning.micro_conditioning import (
    CONTEXT,
    FRAME_RATE,
    GUIDANCE,
    IMAGE_CONTEXT,
    POOLED,
    SECONDS,
    SIZE,
    STEP,
    ModelKwargs,
    Residuals,
    call_unet,
)
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.inference.conditioning.video_numbers import NUMBERS, numbers_of_video
from modelpool.pool.inference.guidance.controlled_transformer import ControlledTransformer
from modelpool.pool.inference.sampling.schedules import FlowTable, SigmaTable, levels_of, sigma_table
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.sampling_facts import SamplingFacts, VideoFacts
from modelpool.pool.values.core.stage_params import Encoded, FloatArray, SampleParams

#: inputs that stay float32: half precision has too few digits for them
_NUMBERS = frozenset({GUIDANCE, SIZE, FRAME_RATE, SECONDS, NUMBERS, STEP, GUIDE_MASK, CAMERA})


def call_model(
    facts: SamplingFacts,
    module: nn.Module,
    x_BC: Tensor,
    level_B: Tensor,
    context_BLD: Tensor,
    inputs: ModelKwargs,
    residuals: Residuals | None = None,
) -> Tensor:
    """Return the prediction of `module` for the latents `x_BC` at `level_B`, in the dtype of `x_BC`. `context_BLD` are
    text states (or image embeddings, for models that read no text), `inputs` the other inputs: numbers stay float32,
    masks keep their dtype. `residuals` are from ControlNets."""
    if not facts.model:
        return call_unet(module, x_BC, level_B, context_BLD, inputs, residuals)
    if residuals is not None:
        module = ControlledTransformer(module, residuals)
    dtype = x_BC.dtype
    text = CONTEXT if facts.reads_text else IMAGE_CONTEXT
    texts = {text: context_BLD.to(dtype), **{name: as_input(name, value, dtype) for name, value in inputs.items()}}
    return ARCHITECTURES[facts.model].call(module, x_BC, level_B, texts)


def as_input(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an input in the dtype in which the model reads it: numbers stay float32, masks keep their dtype."""
    return value if name in _NUMBERS or not value.is_floating_point() else value.to(dtype)


def video_cells(video: VideoFacts, frames: int) -> int:
    """Return the number of latent frames of a video of `frames`."""
    return 1 + (frames - 1) // video.frames_per_cell


def tokens_of(facts: SamplingFacts, work: SampleParams) -> int:
    """Return the number of patches of the latent of `work`, which the shift of some flows depends on."""
    return patches_of(facts, work.shape.width, work.shape.height, work.shape.frames)


def table_of(facts: SamplingFacts, work: SampleParams) -> SigmaTable:
    """Return the noise levels of a model of `facts`, for the size and the steps of `work`."""
    return sigma_table(facts.noise.shifted_by(work.schedule.shift), tokens_of(facts, work), work.schedule.steps)


def patches_of(facts: SamplingFacts, width: int, height: int, frames: int) -> int:
    """Return the number of patches of the latent of an image of this size, or of a video of such frames; of one of its
    layers, if an image has several."""
    side, video = max(1, facts.patch_side or facts.side_multiple), facts.video
    cells = 1 if video is None or video.layers or not frames else video_cells(video, frames)
    return cells * (width // side) * (height // side)


def model_inputs(facts: SamplingFacts, texts: Sequence[Encoded], work: SampleParams) -> dict[str, Tensor]:
    """Return the inputs of a model of `facts` other than the states of `texts`, one for each image of a run like
    `work`: each [B, ...], on the CPU."""
    inputs = {
        name: torch.stack([torch.from_numpy(text.others[name].copy()) for text in texts]) for name in texts[0].others
    }
    if texts[0].pooled_V is not None and POOLED in facts.reads:
        inputs[POOLED] = torch.stack([torch.from_numpy(_pooled(text)) for text in texts])
    return inputs | number_inputs(facts, work, len(texts))


def number_inputs(facts: SamplingFacts, work: SampleParams, count: int) -> dict[str, Tensor]:
    """Return the numbers of `work` that a model of `facts` reads, for `count` images; [B, ...], on the CPU."""
    inputs = {}
    if GUIDANCE in facts.reads:
        inputs[GUIDANCE] = torch.full((count,), work.guidance.distilled, dtype=torch.float32)
    if FRAME_RATE in facts.reads:
        inputs[FRAME_RATE] = torch.full((count,), work.shape.frame_rate, dtype=torch.float32)
    if SECONDS in facts.reads:
        inputs[SECONDS] = torch.tensor([[0.0, work.shape.seconds]], dtype=torch.float32).repeat(count, 1)
    if facts.video is not None and facts.video.numbers is not None:
        numbers = numbers_of_video(facts.video.numbers, work)
        inputs[NUMBERS] = numbers.repeat(count, *[1] * numbers.dim())
    if facts.knows_steps:  # of the first step: the run replaces it
        inputs[STEP] = step_input((1.0, 1.0 - 1.0 / work.schedule.steps), facts.noise.shift, count)
    if SIZE in facts.reads:
        inputs[SIZE] = torch.tensor([[work.shape.height, work.shape.width]], dtype=torch.float32).repeat(count, 1)
    return inputs


def step_input(levels: tuple[float, float], shift: float, count: int) -> Tensor:
    """Return the input "step" for `count` images: the levels at the start and at the end of a step, and the shift of
    the flow; [B,3], on the CPU."""
    return torch.tensor([[*levels, shift]], dtype=torch.float32).repeat(count, 1)


def step_levels_part(run: DenoisingRun) -> RunPart | None:
    """Pass the levels at the start and at the end of each step to models that read them."""
    if not run.facts.knows_steps:
        return None
    clock, table = run.clock, run.table
    levels = levels_of(run.work.schedule, table).tolist()
    assert isinstance(table, FlowTable), f"{run.facts.model} reads the levels of a step, which only flows have"
    shift = table.shift

    def pass_levels(call: CallInputs) -> None:
        start, end = levels[clock.now : clock.now + 2]
        call.model_kwargs[STEP] = step_input((start, end), shift, len(call.x_BCHW))

    return RunPart(before_call=pass_levels, captures=True)


def _pooled(text: Encoded) -> FloatArray:
    assert text.pooled_V is not None, "some texts of a run have a pooled embedding, others have none"
    return text.pooled_V.copy()
