"""Image prompts in one sampling run: calls each adapter once, and passes its tokens to the diffusion model.

Tokens of Redux are appended to the prompt. An IP-Adapter's are keys and values for every cross-attention, or for
the blocks of Flux; they follow from the image, so they are computed once and selected by row in each call.

An image prompt with masks acts in the part of the picture that is white in them: the addition of each attention is
multiplied by the mask at the attention's own resolution.

Shape legend: B batch, N images, T tokens, L rows of the attention, D width, H heads, E width of a head, R rows that
were computed: the negative prompt's, then one for each task of the run. M masks, J tasks of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.inference.image_prompts.adapter import ImagePromptAdapter
from modelpool.pool.inference.image_prompts.layouts import BlockReading
from modelpool.pool.inference.pixels.image_ops import stretched
from modelpool.pool.inference.sampling.noise_shares import levels_between
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.values.core.image_prompt_blocks import block_factor
from modelpool.pool.values.core.stage_params import ImageEmbeds, ImagePromptRef, Mask, SampleParams
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import (
    IMAGE_PROMPT,
    IMAGE_PROMPT_BLANK,
    IMAGE_PROMPT_FACE,
    IMAGE_PROMPT_MASK,
    TaskInputs,
    numbered,
)
from modelpool.pool.weights.ops.attention_calls import complete_keys
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import Extra, TransformerOptions
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists, cross_attentions, is_unet
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: model input, [B, 2]: the row of each text in the keys and values of image prompts, and its task
ROWS = "image_prompt_rows"
#: of the norm of keys in the code next to InstantX/FLUX.1-dev-IP-Adapter
_KEY_EPS = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """An image prompt with attended tokens: keys and values [R, T, D] of each layer of its file, and its masks
    in the size of the output; None if it acts everywhere. `blocks`: where the blocks of Flux read them; None for
    cross-attentions. `levels`: the lowest and the highest time input of the model with which it acts; None if it counts
    steps."""

    ref: ImagePromptRef
    layers: Sequence[tuple[Tensor, Tensor]]
    masks_JMHW: Tensor | None = None
    blocks: BlockReading | None = None
    levels: tuple[float, float] | None = None

    def is_on(self, step: int, steps: int, level: float) -> bool:
        """Whether it acts in this step, of the ones that are run, or with this time input."""
        if self.levels is None:
            return self.ref.is_on(step, steps)
        low, high = self.levels
        return low <= level <= high

    def shares(self, rows: int, picture: tuple[int, int]) -> Tensor | None:
        """Return how far it acts in each row of an attention over a latent of height and width `picture`,
        [J, M, L, 1]; None if it acts everywhere. Source: `IPAdapterMaskProcessor.downsample` of diffusers."""
        if self.masks_JMHW is None:
            return None
        size = attention_grid(rows, picture)
        shares_JMHW = torch.nn.functional.interpolate(self.masks_JMHW, size=size, mode="bicubic")
        return shares_JMHW.flatten(2).unsqueeze(-1)


class RunImagePrompts:
    """The image prompts of one run, and its current step."""

    def __init__(self, attended: Sequence[_Attended], appended_BTD: Sequence[Tensor], steps: int) -> None:
        self._attended, self._appended, self._steps = tuple(attended), tuple(appended_BTD), steps
        self._step, self._level = 0, 0.0
        self._rows_B2: Tensor | None = None
        #: of the image prompt with this number, at this resolution: one for each level of the model
        self._shares: dict[tuple[int, int], Tensor | None] = {}
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

    def added_to_options(self, options: ModelOptions, module: nn.Module) -> ModelOptions:
        """Return `options` of a run of `module` with attentions that read the image prompts."""
        if not self._attended:
            return options
        self._layers = [
            (place, tuple(block_factor(each.ref.blocks, name) for each in self._attended))
            for name, place in _places(module)
        ]
        return options.with_transformer(self._with_readings)

    def _with_readings(self, options: TransformerOptions) -> TransformerOptions:
        readings = {each.blocks for each in self._attended}
        if None in readings:
            options = options.with_attn2_addition(self._attend)
        if BlockReading.AFTER_BLOCK in readings:
            options = options.with_dit_block_addition(self._attend_after_block)
        if BlockReading.IN_ATTENTION in readings:
            options = options.with_dit_attention_addition(self._attend_in_attention)
        return options

    def begin_call(self, step: int, call: CallInputs) -> None:
        """Note the step, and the level and the rows of the texts of the next call of the model. The rows are removed
        from its inputs."""
        if self._attended:
            self._step, self._rows_B2 = step, call.model_kwargs.pop(ROWS)
            if any(each.levels is not None for each in self._attended):
                self._level = float(call.level_B.max())

    def _attend_after_block(self, q_BLD: Tensor, extra: Extra) -> Tensor | None:
        """The same for a double block of Flux. Source: FluxIPAdapterAttnProcessor of diffusers."""
        return self._attend(q_BLD, extra, BlockReading.AFTER_BLOCK)

    def _attend_in_attention(self, q_BLD: Tensor, extra: Extra) -> Tensor | None:
        """The same in any block of Flux. Source: the code next to InstantX/FLUX.1-dev-IP-Adapter."""
        return self._attend(q_BLD, extra, BlockReading.IN_ATTENTION)

    def _attend(self, q_BLD: Tensor, extra: Extra, blocks: BlockReading | None = None) -> Tensor | None:
        """Return the sum of the attention to each image prompt that is active. Source: IPAdapterAttnProcessor2_0 of
        diffusers."""
        assert self._rows_B2 is not None, "the call has begun"
        layer, factors = self._layers[extra["transformer_index"]]
        heads, total = extra["n_heads"], None
        rows_B, tasks_B = self._rows_B2.unbind(1)
        for number, (prompt, factor) in enumerate(zip(self._attended, factors, strict=True)):
            scale = prompt.ref.strength * factor
            if prompt.blocks is not blocks or scale == 0 or not prompt.is_on(self._step, self._steps, self._level):
                continue
            key_RTD, value_RTD = prompt.layers[layer]
            shares_JML1 = self._shares_of(number, q_BLD, extra)
            apart = max(1, prompt.ref.masks)
            parts = zip(key_RTD.chunk(apart, dim=1), value_RTD.chunk(apart, dim=1), strict=True)
            for place, (key, value) in enumerate(parts):
                q, k, v = (_by_head(t, heads) for t in (q_BLD, key[rows_B], value[rows_B]))
                if blocks is BlockReading.IN_ATTENTION:
                    k = torch.nn.functional.rms_norm(k.float(), k.shape[-1:], eps=_KEY_EPS)
                with complete_keys():
                    out_BHLE = torch.nn.functional.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype))
                out_BLD = out_BHLE.transpose(1, 2).reshape(q_BLD.shape) * scale
                if shares_JML1 is not None:
                    out_BLD = out_BLD * shares_JML1[tasks_B, place]
                total = out_BLD if total is None else total + out_BLD
        return total

    def _shares_of(self, number: int, q_BLD: Tensor, extra: Extra) -> Tensor | None:
        """Return the shares of one image prompt on the device, computed once for each resolution."""
        key = (number, q_BLD.shape[1])
        if key not in self._shares:
            shares = self._attended[number].shares(q_BLD.shape[1], extra["original_shape"][-2:])
            self._shares[key] = None if shares is None else shares.to(q_BLD)
        return self._shares[key]


def image_prompts_part(run: DenoisingRun) -> RunPart | None:
    """Call the adapters of the image prompts, and let the model read their tokens."""
    if not run.work.image_prompts:
        return None
    partial_run = run.partial_run
    found = image_prompts_of(run.works, run.inputs, run.resources.adapters, stop_check(run.hooks), run.table)
    run.prompts = found.added_to(run.prompts)
    run.options = found.added_to_options(run.options, run.model.module)
    return RunPart(before_call=lambda call: found.begin_call(partial_run.done, call))


def image_prompts_of(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    patchers: Sequence[ModelPatcher],
    interrupt: Callable[[], None],
    table: SigmaTable,
) -> RunImagePrompts:
    """Return the image prompts of the run of these works, with adapters `patchers`: calls each adapter. `table`: the
    noise levels of the model's training. Raises Stopped at a layer."""
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
            masks = _masks(ref, number, works[0], inputs) if ref.masks else None
            levels = levels_between(ref.start, ref.end, table) if ref.by_noise else None
            attended.append(_Attended(ref, module.keys_and_values(torch.cat(rows)), masks, module.blocks, levels))
    return RunImagePrompts(attended, appended, works[0].steps_run)


def _places(module: nn.Module) -> list[tuple[str, int]]:
    """Return the name of each attention that may read image prompts, and the number of its layer in files, in the order
    in which "transformer_index" counts them."""
    if is_unet(module):
        return [(name, place) for name, place, _ in cross_attentions(module)]
    names = [
        f"{kind.removesuffix('_block')}.{number}"
        for kind, blocks in block_lists(module)
        for number, _ in enumerate(blocks)
    ]
    return [(name, place) for place, name in enumerate(names)]


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
        """Return the tokens of the negative prompt: from zeros in place of each embedding, and of no image for
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


def attention_grid(rows: int, picture: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the `rows` of an attention in a model that halves a latent of height and width
    `picture` from level to level."""
    height, width = picture
    while height * width > rows and max(height, width) > 1:
        height, width = math.ceil(height / 2), math.ceil(width / 2)
    assert height * width == rows, f"an attention of {rows} rows over a latent of {picture}"
    return height, width


def _masks(ref: ImagePromptRef, number: int, work: SampleParams, inputs: Sequence[TaskInputs]) -> Tensor:
    """Return the masks of the image prompt with this number, [J, M, H, W] from 0 to 1, in the size of the output."""
    names = [numbered(numbered(IMAGE_PROMPT_MASK, number), place) for place in range(ref.masks)]
    shape = work.shape
    found = [
        [stretched(read.read(name, Mask).values_HW, shape.width, shape.height) for name in names] for read in inputs
    ]
    return torch.from_numpy(np.array(found, dtype=np.float32) / 255)


def _with_rows(condition: Condition, first: int) -> Condition:
    """Return `condition` with the rows of its texts, from `first`, or all that row if it is 0, and their tasks."""
    tasks = torch.arange(len(condition.context_BLD))
    rows = tasks + first if first else torch.zeros_like(tasks)
    return replace(condition, model_kwargs={**condition.model_kwargs, ROWS: torch.stack([rows, tasks], dim=1)})


def _by_head(x_BLD: Tensor, heads: int) -> Tensor:
    return x_BLD.view(x_BLD.shape[0], -1, heads, x_BLD.shape[-1] // heads).transpose(1, 2)
