"""Runs the ControlNets of one sampling run, step by step, and passes their residuals to the diffusion model.

Knows the images, strengths and active steps of one run. Weights are ready whenever a call is made: each call of a
ControlNet is a nested run inside the run of the diffusion model.

Shape legend: B batch, C channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.micro_conditioning import ModelKwargs, Residuals
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.inference.controlnets.block_samples import ControlResiduals, blocks_of
from modelpool.pool.inference.controlnets.blockwise import TOKENS, behind_blocks
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.inference.controlnets.cascade_controlnets import (
    BEFORE_BLOCKS,
    before_blocks,
    control_image,
    with_projection,
)
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind, kind_of
from modelpool.pool.inference.controlnets.inpainting_controlnets import with_mask, with_masked_pixels
from modelpool.pool.inference.guidance.controlled_transformer import RepeatedResiduals
from modelpool.pool.inference.pixels.image_ops import covering
from modelpool.pool.inference.sampling.noise_shares import levels_between
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.results import COLOURS
from modelpool.pool.values.core.stage_params import (
    ControlMaskMode,
    ControlRef,
    ImagePixels,
    Latent,
    Mask,
    RunHooks,
    SampleParams,
)
from modelpool.pool.values.core.step_shares import lies_within
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import CONTROL, CONTROL_MASK, CONTROL_MASKED_IMAGE, TaskInputs, numbered
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


@dataclass(frozen=True, slots=True, eq=False)
class RunControlNet:
    """One ControlNet in one run. `images_BCHW` are its control images: pixels from 0 to 1, or latents; with the inpaint
    mask if it reads one (`pool.inference.controlnets.inpainting_controlnets`). `levels` are the lowest and the highest
    time input of the model with which it is active; None: it counts steps."""

    ref: ControlRef
    patcher: ModelPatcher
    kind: ControlKind
    images_BCHW: Tensor
    levels: tuple[float, float] | None = None

    def is_on(self, step: int, steps: int, level_B: Tensor) -> bool:
        """Whether it is active in this step, of those that are run, or with this time input."""
        if self.levels is None:
            return lies_within(step, steps, self.ref.start, self.ref.end)
        low, high = self.levels
        return low <= float(level_B.max()) <= high


def levels_of(ref: ControlRef, table: SigmaTable) -> tuple[float, float] | None:
    """Return the lowest and the highest time input with which a ControlNet is active, both in it; None if it counts
    steps."""
    return levels_between(ref.start, ref.end, table) if ref.by_noise else None


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The residuals for a prompt, a step and a latent: other texts are predicted in separate calls."""

    step: int
    x_BCHW: Tensor
    residuals: ControlResiduals | None

    def is_of(self, step: int, x_BCHW: Tensor) -> bool:
        return self.step == step and torch.equal(self.x_BCHW, x_BCHW)


class RunControlNets:
    """The ControlNets of one run, and its current step."""

    def __init__(
        self,
        controls: Sequence[RunControlNet],
        steps: int,
        interrupt: Callable[[], None],
        prompt: Condition | None = None,
        done: int = 0,
    ) -> None:
        """`interrupt` is as in `ModelPatcher.running`. `prompt` is for ControlNets that read only the prompt. `done`
        steps were done before."""
        self._controls = tuple(control for control in controls if not control.kind.is_blockwise)
        self._blockwise = tuple(control for control in controls if control.kind.is_blockwise)
        self._steps, self._interrupt = steps, interrupt
        self._prompt = prompt if any(control.kind.reads_prompt_only for control in controls) else None
        self._done = done
        self._last: _Last | None = None
        #: residuals of those that read only their image, by position
        self._constant: dict[int, ControlResiduals] = {}
        #: tokens of the images of blockwise ones, by position, and those that act in this call
        self._tokens: dict[int, Tensor] = {}
        self._acting: tuple[int, ...] = ()
        #: residuals of this call before blocks of stage C of Stable Cascade
        self._before: Sequence[Tensor] = ()

    def counting(self, hooks: RunHooks) -> RunHooks:
        """Return `hooks` that also count steps here."""

        def on_step(done: int, steps: int) -> None:
            self._done = done
            hooks.on_step(done, steps)

        return replace(hooks, on_step=on_step)

    def residuals(
        self, model: nn.Module, x_BCHW: Tensor, level_B: Tensor, context_BLD: Tensor, model_kwargs: ModelKwargs
    ) -> Residuals | None:
        """Return the residuals for `model`, which runs, of the ControlNets that are active in this step, in the dtype
        of `x_BCHW`; None if none is active. Blockwise ones act inside of the call that follows."""
        self._acting = tuple(
            place for place, one in enumerate(self._blockwise) if one.is_on(self._done, self._steps, level_B)
        )
        self._before = ()
        if not self._controls:
            return None
        if self._prompt is None:
            residuals = self._sum_residuals(model, ControlInputs(x_BCHW, level_B, context_BLD, x_BCHW, model_kwargs))
            return None if residuals is None else self._kept(self._spread(residuals, model))
        self._prompt = self._prompt.to(x_BCHW.device)
        prompt, count = self._prompt, len(self._prompt.context_BLD)
        prompt_x_BCHW = x_BCHW[:count]
        if self._last is None or not self._last.is_of(self._done, prompt_x_BCHW):
            self._last = None  # frees its memory
            control_inputs = ControlInputs(
                prompt_x_BCHW, level_B[:count], prompt.context_BLD, prompt_x_BCHW, prompt.model_kwargs
            )
            # a slice would keep the complete batch in memory
            kept_BCHW = prompt_x_BCHW if count == len(x_BCHW) else prompt_x_BCHW.clone()
            self._last = _Last(self._done, kept_BCHW, self._sum_residuals(model, control_inputs))
        if self._last.residuals is None:
            return None
        texts = len(x_BCHW) // count
        return {
            name: RepeatedResiduals(queue, texts) for name, queue in self._spread(self._last.residuals, model).items()
        }

    def _kept(self, residuals: Residuals) -> Residuals | None:
        """Return what the model has arguments for; None for nothing. The rest is kept for its blocks."""
        self._before = residuals.get(BEFORE_BLOCKS, ())
        return {name: samples for name, samples in residuals.items() if name != BEFORE_BLOCKS} or None

    @property
    def changes_blocks(self) -> bool:
        """Some act inside of the blocks of the model."""
        return bool(self._blockwise) or any(control.kind.cell_side for control in self._controls)

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Have the blocks of blockwise ControlNets run behind the blocks of `model`, which runs, and projections added
        before its blocks, inside of the block of code."""
        if any(control.kind.cell_side for control in self._controls):
            with before_blocks(model, self._projected):
                yield
            return
        if not self._blockwise:
            yield
            return
        (attribute,) = self._blockwise[0].kind.blocks.values()
        with behind_blocks(model, getattr(model, attribute), self._added):
            yield

    def _projected(self, number: int, x_BCHW: Tensor) -> Tensor:
        """Return the input of a block of the model with a projection, if ControlNets act in this call."""
        return with_projection(x_BCHW, self._before[number]) if self._before else x_BCHW

    def _added(self, block: int, image_BND: Tensor) -> Tensor | None:
        """Return what blockwise ControlNets add to the tokens of an image behind a block of the model."""
        total: Tensor | None = None
        for place in self._acting:
            control = self._blockwise[place]
            patcher, dtype = control.patcher, control.patcher.compute_dtype
            with patcher.running(self._interrupt) as module:
                if place not in self._tokens:
                    images = control.images_BCHW.to(patcher.device).to(dtype)
                    (self._tokens[place],) = control.kind.call(
                        module, ControlInputs(images, images, images, images, {})
                    )[TOKENS]
                tokens = self._tokens[place]
                tokens = tokens if len(tokens) == 1 else tokens.repeat(len(image_BND) // len(tokens), 1, 1)
                blockwise: Any = module
                found = blockwise.added(block, image_BND[:, : tokens.shape[1]].to(dtype), tokens)
            found = found.to(image_BND.dtype) * control.ref.strength
            total = found if total is None else total + found
        return total

    def _spread(self, residuals: ControlResiduals, model: nn.Module) -> Residuals:
        return residuals.spread(blocks_of(self._controls[0].kind, model))

    def _sum_residuals(self, model: nn.Module, control_inputs: ControlInputs) -> ControlResiduals | None:
        """Return the sum of the residuals for the inputs `control_inputs`, except the images."""
        total: ControlResiduals | None = None
        for place, control in enumerate(self._controls):
            if not control.is_on(self._done, self._steps, control_inputs.level_B):
                continue
            if control.kind.reads_image_only:
                found = self._of_image(place, control, control_inputs.x_BC)
            else:
                found = self._one(control, model, control_inputs).to(control_inputs.x_BC.dtype)
            total = found if total is None else total.plus(found, blocks_of(control.kind, model))
        return total

    def _of_image(self, place: int, control: RunControlNet, x_BC: Tensor) -> ControlResiduals:
        """Return the residuals of a ControlNet that reads only its image, for the rows of `x_BC`; it is called the
        first time."""
        if place not in self._constant:
            patcher, images = control.patcher, control.images_BCHW
            images = images.to(patcher.device).to(patcher.compute_dtype)
            inputs = ControlInputs(images, images, images, images, {}, strength=control.ref.strength)
            with patcher.running(self._interrupt) as module:
                found = ControlResiduals(control.kind.call(module, inputs), control.kind)
            self._constant[place] = found.to(x_BC.dtype)
        one, count = self._constant[place], len(control.images_BCHW)
        if count == 1 or count == len(x_BC):  # one image broadcasts
            return one
        texts = len(x_BC) // count
        repeated = {name: [each.repeat(texts, 1, 1, 1) for each in samples] for name, samples in one.samples.items()}
        return ControlResiduals(repeated, control.kind)

    def _one(self, control: RunControlNet, model: nn.Module, control_inputs: ControlInputs) -> ControlResiduals:
        patcher, dtype, kind = control.patcher, control.patcher.compute_dtype, control.kind
        x_BC = control_inputs.x_BC
        if kind.reads_rows(patcher.module):
            transformer: Any = model  # diffusers is not typed
            x_BC = transformer.pos_embed(x_BC)
        images = control.images_BCHW.to(patcher.device).to(dtype)
        images = images.repeat(len(x_BC) // len(images), 1, 1, 1)
        scaled_inputs = replace(
            control_inputs,
            x_BC=x_BC,
            images_BC=images,
            strength=control.ref.strength,
            mode=control.ref.mode,
            model=model,
        )
        with patcher.running(self._interrupt) as module:
            return ControlResiduals(kind.call(module, scaled_inputs.to(dtype)), kind)


def controlnets_part(run: DenoisingRun) -> RunPart | None:
    """Add the residuals of the ControlNets to the inputs of each call. Behind the parts that change the prompts, which
    ControlNets read, and the weights or inputs of a call."""
    if not run.work.controls:
        return None
    done = run.partial_run.done - run.partial_run.begin
    found = controls_of(
        run.works,
        run.inputs,
        run.resources.controls,
        run.latent,
        run.prompts.cond,
        stop_check(run.hooks),
        done,
        run.table,
    )
    run.hooks = found.counting(run.hooks)

    def add_residuals(call: CallInputs) -> None:
        call.residuals = found.residuals(call.module, call.x_BCHW, call.level_B, call.context_BLD, call.model_kwargs)

    @contextmanager
    def changed(module: nn.Module) -> Iterator[None]:
        with run.model.thawed(), found.installed(module):  # compiled blocks are not changed
            yield

    return RunPart(before_call=add_residuals, around=changed if found.changes_blocks else found.installed)


def controls_of(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    patchers: Sequence[ModelPatcher],
    latent: LatentFacts,
    prompt: Condition,
    interrupt: Callable[[], None],
    done: int,
    table: SigmaTable,
) -> RunControlNets:
    """Return the ControlNets of the run of these works. Each reads an image of each work, pixels or a latent;
    inpainting ones also a mask. `prompt` is each work's; `done` of its steps were done before."""
    work = works[0]
    kinds = [kind_of(patcher.module) for patcher in patchers]
    kinds_read = list(zip(kinds, patchers, strict=True))
    read = [_images_of(results, work, kinds_read, latent) for results in inputs]
    controls = []
    for ref, patcher, kind in zip(work.controls, patchers, kinds, strict=True):
        images = torch.stack([next(queue) for queue in read])
        if ref.reads_latent and kind.reads_unshifted(patcher.module):
            images = images + latent.shift * latent.scaling_factor
        controls.append(RunControlNet(ref, patcher, kind, images.to(patcher.device), levels_of(ref, table)))
    return RunControlNets(controls, work.steps_run, interrupt, prompt, done)


def _images_of(
    read: TaskInputs, work: SampleParams, kinds: Sequence[tuple[ControlKind, ModelPatcher]], latent: LatentFacts
) -> Iterator[Tensor]:
    """Yield the control image of each ControlNet, [C,H,W], in their order. Raises UnusableField."""
    size = work.shape.width, work.shape.height
    for number, (ref, (kind, patcher)) in enumerate(zip(work.controls, kinds, strict=True)):
        image, mask_HW = numbered(CONTROL, number), None
        if kind.cell_side:
            high, wide = (cells * kind.cell_side for cells in latent.sides(*size))
            hidden_HW = None if ref.mask_mode is None else read.read(numbered(CONTROL_MASK, number), Mask).values_HW
            pixels_HWC, channels = read.read(image, ImagePixels).pixels_HWC, kind.pixel_channels(patcher.module)
            yield control_image(ref.name, pixels_HWC, hidden_HW, (wide, high), channels)
            continue
        if ref.mask_mode is not None:
            mask_HW = covering(read.read(numbered(CONTROL_MASK, number), Mask).values_HW, *size)
        if ref.reads_latent:
            latent_CHW = torch.from_numpy(read.read(image, Latent).samples_CHW.copy())
            if mask_HW is not None:
                hidden_CHW = None
                if ref.mask_mode is ControlMaskMode.SEPARATE:
                    hidden_CHW = torch.from_numpy(read.read(numbered(CONTROL_MASKED_IMAGE, number), Latent).samples_CHW)
                latent_CHW = with_mask(latent_CHW, mask_HW, hidden_CHW)
            yield latent_CHW
            continue
        # a copy: an image that already has this size is shared and must not be written
        whole = np.array(covering(read.read(image, ImagePixels).pixels_HWC, *size), order="C")
        if whole.shape[-1] > COLOURS:
            found = f"controls.image: found an alpha channel; ControlNet {ref.name!r} reads colours alone"
            raise UnusableField(found)
        image_CHW = torch.from_numpy(whole).permute(2, 0, 1).float() / 255
        if mask_HW is not None:
            image_CHW = with_masked_pixels(image_CHW, mask_HW, kind)
        yield image_CHW
