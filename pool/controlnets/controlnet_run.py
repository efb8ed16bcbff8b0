"""The ControlNets of one run beside a diffusion model, and what of theirs that is given.

Knows the images, strengths and shares of the steps of one run. The weights are ready whenever a call is made: inside
the run of the diffusion model each ControlNet has a run of its own for the time of a call.

Shape legend: B batch, C channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.micro_conditioning import Extras, Residuals
from modelpool.pool.controlnets.block_samples import Said, blocks_of
from modelpool.pool.controlnets.calls import Heard
from modelpool.pool.controlnets.inpainting import with_hole, with_mask
from modelpool.pool.controlnets.kinds import ControlKind, kind_of
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.stage_params import (
    ControlRef,
    HoleTold,
    ImagePixels,
    Latent,
    Mask,
    Result,
    RunHooks,
    SampleWork,
)
from modelpool.pool.guidance.controlled_transformer import ForEachText
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.image_ops import covering


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """One ControlNet in one run. `images_BCHW` are those of the images of the run: from 0 to 1 in whole pixels, or
    latents; with a hole, where it is told of one (`pool.controlnets.inpainting`)."""

    ref: ControlRef
    patcher: ModelPatcher
    kind: ControlKind
    images_BCHW: Tensor

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it speaks in the step of this number. Source: `controlnet_keep` of diffusers' pipelines."""
        return not (step / steps < self.ref.start or (step + 1) / steps > self.ref.end)


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """What was said to a prompt in a step, for a latent: other texts are asked about in calls of their own."""

    step: int
    x_BCHW: Tensor
    said: Said | None

    def is_of(self, step: int, x_BCHW: Tensor) -> bool:
        return self.step == step and torch.equal(self.x_BCHW, x_BCHW)


class Controls:
    """The ControlNets of one run, and which step it is at."""

    def __init__(
        self,
        controls: Sequence[Control],
        steps: int,
        interrupt: Callable[[], None],
        prompt: Condition | None = None,
    ) -> None:
        """`interrupt` is as of `ModelPatcher.running`. `prompt` is what those hear that hear the prompt alone."""
        self._controls, self._steps, self._interrupt = tuple(controls), steps, interrupt
        self._prompt = prompt if any(control.kind.hears_prompt for control in controls) else None
        self._done = 0
        self._last: _Last | None = None

    def counting(self, hooks: RunHooks) -> RunHooks:
        """`hooks` that count steps here."""
        if not self._controls:
            return hooks

        def on_step(done: int, steps: int) -> None:
            self._done = done
            hooks.on_step(done, steps)

        return replace(hooks, on_step=on_step)

    def residuals(
        self, model: nn.Module, x_BCHW: Tensor, level_B: Tensor, context_BLD: Tensor, told: Extras
    ) -> Residuals | None:
        """What those that speak in this step add to `model`, which runs, in the dtype of `x_BCHW`; None when none
        speaks."""
        if not self._controls:
            return None
        if self._prompt is None:
            said = self._said(model, Heard(x_BCHW, level_B, context_BLD, x_BCHW, told))
            return None if said is None else self._spread(said, model)
        self._prompt = self._prompt.to(x_BCHW.device)
        prompt, count = self._prompt, len(self._prompt.context_BLD)
        own_BCHW = x_BCHW[:count]
        if self._last is None or not self._last.is_of(self._done, own_BCHW):
            self._last = None  # its memory may be needed
            heard = Heard(own_BCHW, level_B[:count], prompt.context_BLD, own_BCHW, prompt.extras)
            # a part of a batch holds all of it
            kept_BCHW = own_BCHW if count == len(x_BCHW) else own_BCHW.clone()
            self._last = _Last(self._done, kept_BCHW, self._said(model, heard))
        if self._last.said is None:
            return None
        texts = len(x_BCHW) // count
        return {name: ForEachText(own, texts) for name, own in self._spread(self._last.said, model).items()}

    def _spread(self, said: Said, model: nn.Module) -> Residuals:
        return said.spread(blocks_of(self._controls[0].kind, model))

    def _said(self, model: nn.Module, heard: Heard) -> Said | None:
        """The sum of what is said, to all that is `heard` but the images."""
        total: Said | None = None
        for control in self._controls:
            if not control.is_on(self._done, self._steps):
                continue
            found = self._one(control, model, heard).to(heard.x_BC.dtype)
            total = found if total is None else total.plus(found, blocks_of(control.kind, model))
        return total

    def _one(self, control: Control, model: nn.Module, heard: Heard) -> Said:
        patcher, dtype, kind = control.patcher, control.patcher.compute_dtype, control.kind
        x_BC = heard.x_BC
        if kind.reads_rows(patcher.module):
            own: Any = model  # diffusers is not typed
            x_BC = own.pos_embed(x_BC)
        images = control.images_BCHW.to(patcher.device).to(dtype)
        images = images.repeat(len(x_BC) // len(images), 1, 1, 1)
        own_heard = replace(
            heard, x_BC=x_BC, images_BC=images, strength=control.ref.strength, mode=control.ref.mode, model=model
        )
        with patcher.running(self._interrupt) as module:
            return Said(kind.call(module, own_heard.to(dtype)), kind)


def controls_of(
    works: Sequence[SampleWork],
    inputs: Sequence[Sequence[Result]],
    patchers: Sequence[ModelPatcher],
    latent: LatentFacts,
    prompt: Condition,
    interrupt: Callable[[], None],
) -> Controls:
    """The ControlNets of the run of these works, which read an image for each: pixels, or after all other latents that
    of the image; and after all other masks one for each that is told a hole. `prompt` is that of each."""
    work = works[0]
    kinds = [kind_of(patcher.module) for patcher in patchers]
    read = [_images_of(own, work, kinds) for own in inputs]
    controls = []
    for ref, patcher, kind in zip(work.controls, patchers, kinds, strict=True):
        images = torch.stack([next(own) for own in read])
        if ref.reads_latent and kind.reads_unshifted(patcher.module):
            images = images + latent.shift * latent.scaling_factor
        controls.append(Control(ref, patcher, kind, images.to(patcher.device)))
    return Controls(controls, work.steps_run, interrupt, prompt)


def _images_of(read: Sequence[Result], work: SampleWork, kinds: Sequence[ControlKind]) -> Iterator[Tensor]:
    """The image of each ControlNet, [C,H,W], in their order."""
    pixels = (one.pixels_HWC for one in read if isinstance(one, ImagePixels))
    latents = [one.samples_CHW for one in read if isinstance(one, Latent)]
    count = sum(ref.reads_latent + (ref.hole is HoleTold.BESIDE) for ref in work.controls)
    own = iter(latents[len(latents) - count :])
    masks = [one.values_HW for one in read if isinstance(one, Mask)]
    holes = iter(masks[len(masks) - sum(ref.hole is not None for ref in work.controls) :])
    size = work.width, work.height
    for ref, kind in zip(work.controls, kinds, strict=True):
        if ref.reads_latent:
            latent_CHW = torch.from_numpy(next(own).copy())
            if ref.hole is not None:
                hidden_CHW = torch.from_numpy(next(own)) if ref.hole is HoleTold.BESIDE else None
                latent_CHW = with_mask(latent_CHW, covering(next(holes), *size), hidden_CHW)
            yield latent_CHW
            continue
        # a copy: what is of that size already may be another's, and not to be written
        whole = np.array(covering(next(pixels), *size), order="C")
        image_CHW = torch.from_numpy(whole).permute(2, 0, 1).float() / 255
        if ref.hole is not None:
            image_CHW = with_hole(image_CHW, covering(next(holes), *size), kind)
        yield image_CHW
