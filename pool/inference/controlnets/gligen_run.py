"""Texts in boxes (GLIGEN) in one sampling run: makes the tokens of the boxes once, and lets each block of the UNet read
them.

The negative text reads the tokens of no box. Source: Li et al. (arXiv 2301.07093), and `StableDiffusionGLIGENPipeline`
of diffusers.

Shape legend: B batch, N boxes, V width of a pooled text, C width of a token, L rows of the image, D width of a block, R
rows that were computed: the negative text's, then one for each task of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.inference.controlnets.gligen import Gligen
from modelpool.pool.values.core.stage_params import Encoded, GligenRef
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import BOX, TaskInputs, numbered
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.patcher.blocks.diffusers_names import attention_blocks
from modelpool.pool.weights.patcher.blocks.overlays import Overlays
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: model input, [B]: the row of each text in the tokens of boxes
ROWS = "gligen_rows"


class RunGligen:
    """The boxes of one run, and its current step."""

    def __init__(
        self,
        ref: GligenRef,
        patcher: ModelPatcher,
        tokens_RNC: Tensor,
        steps: int,
        interrupt: Callable[[], None],
    ) -> None:
        """`steps` are run. `interrupt` is as in `ModelPatcher.running`."""
        self._ref, self._patcher, self._tokens_RNC, self._interrupt = ref, patcher, tokens_RNC, interrupt
        self._steps = steps
        #: those of the texts of the current call; None where the boxes do not act
        self._read_BNC: Tensor | None = None

    def added_to(self, prompts: Prompts) -> Prompts:
        """Return `prompts` with the rows of their texts."""
        regions = replace(prompts.regions, conditions=tuple(_with_rows(each, 1) for each in prompts.regions.conditions))
        uncond = None if prompts.uncond is None else _with_rows(prompts.uncond, 0)
        return replace(prompts, cond=_with_rows(prompts.cond, 1), uncond=uncond, regions=regions)

    def begin_call(self, step: int, call: CallInputs) -> None:
        """Note the tokens that the texts of the next call read, after `step` steps; none where the boxes do not act.
        Their rows are removed from its inputs."""
        rows_B = call.model_kwargs.pop(ROWS)
        self._read_BNC = self._tokens_RNC[rows_B] if self._ref.is_on(step, self._steps) else None

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Have the blocks of `model`, which runs, read the tokens inside of the block of code."""
        run = current_run(model)
        assert run is not None, "the model of a run is the current one"
        overlays = Overlays(run)
        try:
            for number, block in enumerate(attention_blocks(model)):
                overlays.put(block, self._fused(number, block))
            yield
        finally:
            overlays.remove()

    def _fused(self, number: int, block: nn.Module) -> Callable[..., Any]:
        """Return the forward of a block in which the image attends to the tokens between its two attentions."""

        def fuse(x_BLD: Tensor, tokens_BNC: Tensor) -> Tensor:
            dtype = self._patcher.compute_dtype
            with self._patcher.running(self._interrupt) as module:
                assert isinstance(module, Gligen)
                return module.fused(number, x_BLD.to(dtype), tokens_BNC).to(x_BLD.dtype)

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._read_BNC is None:
                return original(*args, **kwargs)
            # diffusers' block calls its `fuser` if its arguments have objects for it
            more = {**(kwargs.pop("cross_attention_kwargs", None) or {}), "gligen": {"objs": self._read_BNC}}
            block.__dict__["fuser"] = fuse
            try:
                return original(*args, cross_attention_kwargs=more, **kwargs)
            finally:
                del block.__dict__["fuser"]

        return forward


def gligen_part(run: DenoisingRun) -> RunPart | None:
    """Make the tokens of the boxes of a run, and let the blocks of the model read them."""
    ref = run.work.gligen
    if ref is None:
        return None
    (patcher,) = run.resources.gligens
    interrupt = stop_check(run.hooks)
    tokens_RNC, partial_run = tokens_of(ref, run.inputs, patcher, interrupt), run.partial_run
    found = RunGligen(ref, patcher, tokens_RNC, run.work.steps_run, interrupt)
    run.prompts = found.added_to(run.prompts)

    @contextmanager
    def around(module: nn.Module) -> Iterator[None]:
        with run.model.thawed(), found.installed(module):  # compiled blocks are not changed
            yield

    return RunPart(before_call=lambda call: found.begin_call(partial_run.done, call), around=around)


def tokens_of(
    ref: GligenRef, inputs: Sequence[TaskInputs], patcher: ModelPatcher, interrupt: Callable[[], None]
) -> Tensor:
    """Return the tokens of no box, then of the boxes of each task, [R, N, C]. Each row is computed alone, so that it
    does not depend on the others. Raises Stopped at a layer."""
    device, dtype = patcher.device, patcher.compute_dtype
    boxes_N4 = torch.tensor(ref.boxes, dtype=torch.float32, device=device)
    with patcher.running(interrupt) as module, torch.no_grad():
        assert isinstance(module, Gligen)
        texts = [torch.stack(_pooled(read, len(ref.boxes))).to(device).to(dtype) for read in inputs]
        rows = [module.tokens(texts[0][:0], boxes_N4[:0]), *(module.tokens(each, boxes_N4) for each in texts)]
        return torch.cat(rows)


def _pooled(read: TaskInputs, boxes: int) -> list[Tensor]:
    found = [read.read(numbered(BOX, number), Encoded).pooled_V for number in range(boxes)]
    return [torch.from_numpy(each.copy()) for each in found if each is not None]


def _with_rows(condition: Condition, first: int) -> Condition:
    """Return `condition` with the rows of its texts: from `first`, or all row 0."""
    rows = torch.arange(len(condition.context_BLD)) + first if first else torch.zeros(len(condition.context_BLD)).long()
    return replace(condition, model_kwargs={**condition.model_kwargs, ROWS: rows})
