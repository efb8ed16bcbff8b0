"""Inputs that a model makes of its texts once in a run, before the steps.

Models that encode their texts themselves do so once instead of in each step; the state that some are guided against
is a part of their weights. Shape legend: C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from modelpool.pool.inference.conditioning.micro_conditioning import CONTEXT, NO_KWARGS, SILENCE, ModelKwargs
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.inference.guidance.call_model import as_input
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.sampling_facts import SamplingFacts


def learned_negative_part(run: DenoisingRun) -> RunPart | None:
    """Give a run the prompt in place of the negative prompt that its model learned, until the model replaces it."""
    if run.facts.learned_negative and run.work.reads_negative:
        run.prompts = replace(run.prompts, uncond=run.prompts.cond)
    return None


def prepared_prompts_part(run: DenoisingRun) -> RunPart | None:
    """Let the model prepare the prompts before the first step, with the latent of silence if it reads one. Behind all
    parts that change the prompts or the model."""
    if not run.facts.model or ARCHITECTURES[run.facts.model].prepare is None:
        return None
    silence_1LC = run.resources.silence_1LC
    more = {} if silence_1LC is None else {SILENCE: silence_1LC}

    @contextmanager
    def prepared(module: nn.Module) -> Iterator[None]:
        dtype, device = run.model.compute_dtype, run.model.device
        run.prompts = prepared_prompts(run.facts, module, run.prompts, run.shape_CHW, dtype, device, more)
        yield

    return RunPart(around=prepared, captures=True)


def prepared_prompts(
    facts: SamplingFacts,
    module: nn.Module,
    prompts: Prompts,
    shape_CHW: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    more: ModelKwargs = NO_KWARGS,
) -> Prompts:
    """Return `prompts` as the steps of a run of `module`, a model of `facts`, read them; unchanged for models that
    prepare nothing. `more` are inputs that only the preparation reads. Call it while `module` may run."""
    prepare = ARCHITECTURES[facts.model].prepare if facts.model else None
    if prepare is None:
        return prompts
    inputs = {CONTEXT: prompts.cond.context_BLD, **prompts.cond.model_kwargs, **more}
    with torch.no_grad():
        own, uncond_BLD = prepare(
            module, shape_CHW, {name: as_input(name, value.to(device), dtype) for name, value in inputs.items()}
        )
    others = {name: value for name, value in own.items() if name != CONTEXT}
    uncond = prompts.uncond
    return replace(
        prompts,
        cond=replace(prompts.cond, context_BLD=own[CONTEXT], model_kwargs=others),
        uncond=None if uncond is None else replace(uncond, context_BLD=uncond_BLD, model_kwargs=others),
    )
