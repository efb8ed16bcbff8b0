"""The texts of a run as conditions: prompts, negative prompts, regions and lyrics, with the numbers that the model
reads with each. Inputs of other features are added by their run parts.

Shape legend: B batch, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.image_embeds import pooled_vision, texts_read
from modelpool.pool.inference.conditioning.micro_conditioning import POOLED_TEXT, UNCONDITIONAL, micro_conditioning
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.regions import NO_REGIONS, Regions, region_weights
from modelpool.pool.inference.guidance.call_model import model_inputs
from modelpool.pool.models.text.encode import match_lengths
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import Encoded, Mask, SampleParams
from modelpool.pool.values.core.task_inputs import LYRICS, REGION_MASK, TaskInputs, numbered


def prompts_of(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    facts: SamplingFacts,
    cells: tuple[int, int],
    is_matched: bool,
) -> Prompts:
    """Return the conditions of a batch, for latents of `cells` (height, width), on the CPU. `is_matched`: prompt and
    negative prompt get one length if the model allows it. All prompts have one length, and so have all negative
    prompts."""
    read = [texts_read(work, each, facts) for work, each in zip(works, inputs, strict=True)]
    own = [each[: len(each) - len(works[0].regions)] for each in read]
    # repeating a text changes nothing with cross-attention (UNets), but does with joint attention
    texts = [_prompt_and_negative(each[:2], is_matched and not facts.model) for each in own]
    cond_BLD, uncond_BLD = _stacked([cond for cond, _ in texts]), _stacked([uncond for _, uncond in texts])
    assert cond_BLD is not None, "sampling reads a prompt"
    model_kwargs = _kwargs_of_texts(works, read, facts, len(own[0]))
    if (pooled_BV := pooled_vision(works, inputs, facts)) is not None:
        model_kwargs[0] = {**model_kwargs[0], POOLED_TEXT: pooled_BV}
    # a third text is the negative prompt of a prediction without images
    without, without_BLD = None, None
    if len(own[0]) > 2:
        without, without_BLD = model_kwargs[2], _stacked_texts([each[2] for each in own])
    regional = tuple(
        Condition(_stacked_texts([each[place] for each in read]), model_kwargs=model_kwargs[place])
        for place in range(len(own[0]), len(read[0]))
    )
    prompts = Prompts(
        Condition(cond_BLD, model_kwargs=model_kwargs[0]),
        None if uncond_BLD is None else Condition(uncond_BLD, model_kwargs=model_kwargs[1]),
        _regions(works[0], inputs, regional, cells),
        without,
        without_BLD,
    )
    is_unconditional = torch.ones(len(works), dtype=torch.bool)
    prompts = prompts.with_inputs({}, {UNCONDITIONAL: is_unconditional} if facts.has_unconditional else {})
    if not facts.reads_lyrics:
        return prompts
    return prompts.with_inputs({LYRICS: _stacked_texts([each.read(LYRICS, Encoded) for each in inputs])})


def _kwargs_of_texts(
    works: Sequence[SampleParams], read: Sequence[Sequence[Encoded]], facts: SamplingFacts, own: int
) -> list[dict[str, Tensor]]:
    """Return the numbers and pooled texts that the model reads with each text; the first `own` are of no region."""
    places, shape = range(len(read[0])), works[0].shape
    if facts.model:
        return [model_inputs(facts, [each[place] for each in read], works[0]) for place in places]
    pooled = [_stacked([_pooled(each[place]) for each in read]) for place in places]
    conditions = facts.size_conditions
    return [
        micro_conditioning(conditions, pooled_BV, shape.width, shape.height, 0 < place < own)
        for place, pooled_BV in enumerate(pooled)
    ]


def _regions(
    work: SampleParams, inputs: Sequence[TaskInputs], regional: tuple[Condition, ...], cells: tuple[int, int]
) -> Regions:
    if not regional:
        return NO_REGIONS
    drawn = [numbered(REGION_MASK, number) for number, area in enumerate(work.regions) if area.box is None]
    masks = [[each.read(name, Mask) for name in drawn] for each in inputs]
    return Regions(regional, region_weights(work.regions, masks, cells))


def _prompt_and_negative(inputs: Sequence[Encoded], is_matched: bool) -> tuple[Tensor, Tensor | None]:
    """Return prompt and negative prompt of one image; `is_matched` brings them to one length if possible."""
    contexts = [torch.from_numpy(i.context_LD.copy()) for i in inputs]
    cond_LD, uncond_LD = contexts[0], contexts[1] if len(contexts) > 1 else None
    if uncond_LD is None or not is_matched:
        return cond_LD, uncond_LD
    return match_lengths(cond_LD, uncond_LD)


def _pooled(text: Encoded) -> Tensor | None:
    return None if text.pooled_V is None else torch.from_numpy(text.pooled_V.copy())


def _stacked(texts: Sequence[Tensor | None]) -> Tensor | None:
    """Stack texts of equal length to a batch; None if there are none."""
    found = [text_LD for text_LD in texts if text_LD is not None]
    assert len(found) in (0, len(texts)), "some images of a batch have inputs that others lack"
    return torch.stack(found) if found else None


def _stacked_texts(texts: Sequence[Encoded]) -> Tensor:
    """Stack texts of equal length, one per image, to a batch."""
    return torch.stack([torch.from_numpy(text.context_LD.copy()) for text in texts])
