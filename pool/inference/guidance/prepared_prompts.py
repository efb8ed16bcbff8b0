"""Inputs that a model makes of its texts once in a run, before the steps.

Models that encode their texts themselves do so once instead of in each step; the state that some are guided against
is a part of their weights. Shape legend: C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from modelpool.pool.inference.conditioning.micro_conditioning import CONTEXT, NO_KWARGS, ModelKwargs
from modelpool.pool.inference.guidance.call_model import as_input
from modelpool.pool.inference.guidance.guided_steps import Prompts
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.sampling_facts import SamplingFacts


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
