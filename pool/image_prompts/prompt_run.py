"""Image prompts in one sampling run: calls each adapter once, and passes its tokens to the diffusion model.

Tokens of Redux are appended to the prompt. Those of an IP-Adapter are keys and values for every cross-attention; they
follow from the image, so they are computed once and selected by row in each call.

Shape legend: B batch, N images, T tokens, L rows of the attention, D width, H heads, E width of a head, R rows that
were computed: that of the negative prompt, then one for each task of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.core.image_prompt_blocks import block_factor
from modelpool.pool.core.stage_params import ImageEmbeds, ImagePromptRef, SampleParams
from modelpool.pool.core.task_inputs import (
    IMAGE_PROMPT,
    IMAGE_PROMPT_BLANK,
    IMAGE_PROMPT_FACE,
    TaskInputs,
    numbered,
)
from modelpool.pool.guidance.guided_steps import Prompts
from modelpool.pool.image_prompts.adapter import ImagePromptAdapter
from modelpool.pool.options.transformer_options import Extra
from modelpool.pool.patcher.blocks.diffusers_names import cross_attentions
from modelpool.pool.patcher.model_patcher import ModelPatcher

#: model input: the row of each text in the keys and values of image prompts
ROWS = "image_prompt_rows"


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """An image prompt whose tokens are attended to: keys and values [R, T, D] of each layer of its file."""

    ref: ImagePromptRef
    layers: Sequence[tuple[Tensor, Tensor]]


class RunImagePrompts:
    """The image prompts of one run, and its current step."""

    def __init__(self, attended: Sequence[_Attended], appended_BTD: Sequence[Tensor], steps: int) -> None:
        self._attended, self._appended, self._steps = tuple(attended), tuple(appended_BTD), steps
        self._step = 0
        self._rows_B: Tensor | None = None
        #: by transformer index: the layer of the file, and the factor of each image prompt
        self._layers: list[tuple[int, tuple[float, ...]]] = []

    def added_to(self, prompts: Prompts) -> Prompts:
        """Return `prompts` with the tokens that are appended, and with the rows of the others."""
        cond, uncond = prompts.cond, prompts.uncond
        if self._appended:
            context = cond.context_BLD
            parts = (context, *(each.to(context.dtype) for each in self._appended))
            cond = replace(cond, context_BLD=torch.cat(parts, dim=1))
        if not self._attended:
            return replace(prompts, cond=cond)
        regions = replace(prompts.regions, conditions=tuple(_with_rows(each, 1) for each in prompts.regions.conditions))
        uncond = None if uncond is None else _with_rows(uncond, 0)
        return replace(prompts, cond=_with_rows(cond, 1), uncond=uncond, regions=regions)

    def added_to_model(self, model: ModelPatcher) -> ModelPatcher:
        """Return a clone of `model` whose cross-attentions read the image prompts; itself if there is nothing to
        read."""
        if not self._attended:
            return model
        self._layers = [
            (place, tuple(block_factor(each.ref.blocks, name) for each in self._attended))
            for name, place, _ in cross_attentions(model.module)
        ]
        clone = model.clone()
        options = clone.model_options.with_transformer(lambda options: options.with_attn2_addition(self._attend))
        clone.state = replace(clone.state, options=options)
        return clone

    def begin_call(self, step: int, model_kwargs: dict[str, Tensor]) -> None:
        """Note the step, and the rows of the texts of the next call of the model, which are removed from its
        inputs."""
        if self._attended:
            self._step, self._rows_B = step, model_kwargs.pop(ROWS)

    def _attend(self, q_BLD: Tensor, extra: Extra) -> Tensor | None:
        """Return the sum of the attention to each image prompt that is active. Source: IPAdapterAttnProcessor2_0 of
        diffusers."""
        assert self._rows_B is not None, "the call has begun"
        layer, factors = self._layers[extra["transformer_index"]]
        heads, total = extra["n_heads"], None
        for prompt, factor in zip(self._attended, factors, strict=True):
            scale = prompt.ref.strength * factor
            if scale == 0 or not prompt.ref.is_on(self._step, self._steps):
                continue
            key_RTD, value_RTD = prompt.layers[layer]
            rows = self._rows_B
            q, k, v = (_by_head(t, heads) for t in (q_BLD, key_RTD[rows], value_RTD[rows]))
            out_BHLE = torch.nn.functional.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype))
            out_BLD = out_BHLE.transpose(1, 2).reshape(q_BLD.shape) * scale
            total = out_BLD if total is None else total + out_BLD
        return total


NO_IMAGE_PROMPTS = RunImagePrompts((), (), 1)


def image_prompts_of(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    patchers: Sequence[ModelPatcher],
    interrupt: Callable[[], None],
) -> RunImagePrompts:
    """Return the image prompts of the run of these works, whose adapters are `patchers`: calls each adapter. Raises
    Stopped at a layer."""
    attended: list[_Attended] = []
    appended: list[Tensor] = []
    for number, (ref, patcher) in enumerate(zip(works[0].image_prompts, patchers, strict=True)):
        with patcher.running(interrupt) as module, torch.no_grad():
            assert isinstance(module, ImagePromptAdapter)
            found = _Called(ref, number, module, patcher)
            tokens = [found.tokens(read) for read in inputs]
            if ref.appended:
                appended.append(torch.cat(tokens).to("cpu") * ref.strength)
                continue
            rows = [found.negative_tokens(inputs[0], tokens[0]), *tokens]
            attended.append(_Attended(ref, module.keys_and_values(torch.cat(rows))))
    return RunImagePrompts(attended, appended, works[0].schedule.steps_run)


@dataclass(frozen=True, slots=True, eq=False)
class _Called:
    """The adapter of one image prompt while it runs."""

    ref: ImagePromptRef
    number: int
    module: ImagePromptAdapter
    patcher: ModelPatcher

    def tokens(self, read: TaskInputs) -> Tensor:
        """Return the tokens of all its images, [1, N*T, D]."""
        states = self._read(read, IMAGE_PROMPT, self.ref.images) if self.ref.images else None
        faces = self._read(read, IMAGE_PROMPT_FACE, 1)[0] if self.ref.face_version else None
        if states is not None and faces is not None and len(states) < len(faces):
            states = states.expand(len(faces), -1, -1)
        tokens_NTD = self._call(states, faces)
        return tokens_NTD.reshape(1, -1, tokens_NTD.shape[-1])

    def negative_tokens(self, read: TaskInputs, like: Tensor) -> Tensor:
        """Return the tokens of the negative prompt: those of zeros in place of each embedding, and of no image for
        adapters that read the states of an image. As many as in `like`. Source: `prepare_ip_adapter_image_embeds` of
        diffusers' pipelines."""
        states = faces = None
        if self.ref.blank:
            states = self._read(read, IMAGE_PROMPT_BLANK, 1)
        elif self.ref.images:
            states = torch.zeros_like(self._read(read, IMAGE_PROMPT, self.ref.images)[:1])
        if self.ref.face_version:
            faces = torch.zeros_like(self._read(read, IMAGE_PROMPT_FACE, 1)[0][:1])
        tokens = self._call(states, faces)
        return tokens.repeat(1, like.shape[1] // tokens.shape[1], 1)

    def _read(self, read: TaskInputs, name: str, count: int) -> Tensor:
        states_LD = torch.from_numpy(read.read(numbered(name, self.number), ImageEmbeds).states_LD.copy())
        states = states_LD.reshape(count, -1, states_LD.shape[-1])
        return states.to(self.patcher.device).to(self.patcher.compute_dtype)

    def _call(self, states: Tensor | None, faces: Tensor | None) -> Tensor:
        some = states if states is not None else faces
        assert some is not None, "an image prompt has images or faces"
        return self.module.tokens(some if states is None else states, faces, self.ref.face_version == 2)


def _with_rows(condition: Condition, first: int) -> Condition:
    """Return `condition` with the rows of its texts: from `first`, or all that row if it is 0."""
    count = len(condition.context_BLD)
    rows = torch.arange(first, first + count) if first else torch.zeros(count, dtype=torch.long)
    return replace(condition, model_kwargs={**condition.model_kwargs, ROWS: rows})


def _by_head(x_BLD: Tensor, heads: int) -> Tensor:
    return x_BLD.view(x_BLD.shape[0], -1, heads, x_BLD.shape[-1] // heads).transpose(1, 2)
