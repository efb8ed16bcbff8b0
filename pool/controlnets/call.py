"""How ControlNets are called beside a UNet, and what of theirs the UNet is given.

Knows the pictures, strengths and shares of the steps of one run. The weights are ready whenever a call is made: inside
the run of the UNet each ControlNet has a run of its own for the time of a call.

Shape legend: B batch, C channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pool.patcher import ModelPatcher
from pool.pictures import covering
from pool.sampling.extras import IMAGE, Extras, Residuals
from pool.work import ControlRef, Picture, Result, RunHooks, SampleWork


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """One ControlNet in one run. `pictures_BCHW` are those of the pictures of the run, from 0 to 1, in whole pixels."""

    ref: ControlRef
    patcher: ModelPatcher
    pictures_BCHW: Tensor

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it speaks in the step of this number. Source: `controlnet_keep` of diffusers' pipelines."""
        return not (step / steps < self.ref.start or (step + 1) / steps > self.ref.end)


class Controls:
    """The ControlNets of one run, and which step it is at."""

    def __init__(self, controls: Sequence[Control], steps: int, interrupt: Callable[[], None]) -> None:
        """`interrupt` is as of `ModelPatcher.running`."""
        self._controls, self._steps, self._interrupt = tuple(controls), steps, interrupt
        self._done = 0

    def counting(self, hooks: RunHooks) -> RunHooks:
        """`hooks` that count steps here."""
        if not self._controls:
            return hooks

        def on_step(done: int, steps: int) -> None:
            self._done = done
            hooks.on_step(done, steps)

        return replace(hooks, on_step=on_step)

    def residuals(self, x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, told: Extras) -> Residuals | None:
        """What those that speak in this step add to the UNet's skip connections and to its middle, in the dtype of
        `x_BCHW`; None when none speaks."""
        total: Residuals | None = None
        for control in self._controls:
            if not control.is_on(self._done, self._steps):
                continue
            patcher, dtype = control.patcher, control.patcher.compute_dtype
            pictures = control.pictures_BCHW.to(patcher.device).to(dtype)
            pictures = pictures.repeat(len(x_BCHW) // len(pictures), 1, 1, 1)
            with patcher.running(self._interrupt) as module:
                found = call_controlnet(
                    module, x_BCHW.to(dtype), timestep_B, context_BLD.to(dtype), pictures, told, control.ref.strength
                )
            found = [one.to(x_BCHW.dtype) for one in found]
            total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
        return total


def controls_of(
    works: Sequence[SampleWork],
    inputs: Sequence[Sequence[Result]],
    patchers: Sequence[ModelPatcher],
    interrupt: Callable[[], None],
) -> Controls:
    """The ControlNets of the run of these works, which read a picture for each."""
    work = works[0]
    pictures = [[one for one in read if isinstance(one, Picture)] for read in inputs]
    controls = []
    for place, (ref, patcher) in enumerate(zip(work.controls, patchers, strict=True)):
        pixels = [covering(own[place].pixels_HWC, work.width, work.height) for own in pictures]
        stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        controls.append(Control(ref, patcher, stacked.to(patcher.device)))
    return Controls(controls, work.steps_run, interrupt)


def call_controlnet(
    module: nn.Module,
    x_BCHW: Tensor,
    timestep_B: Tensor,
    context_BLD: Tensor,
    pictures_BCHW: Tensor,
    told: Extras,
    strength: float = 1.0,
) -> Residuals:
    """One call of diffusers' ControlNetModel: what it adds to each skip connection of the UNet, then to its middle."""
    config: Any = module.config
    added = {name: v if name == "time_ids" else v.to(x_BCHW.dtype) for name, v in told.items() if name != IMAGE}
    skips, middle = module(
        x_BCHW,
        timestep_B,
        context_BLD,
        pictures_BCHW,
        conditioning_scale=strength,
        added_cond_kwargs=added if config.addition_embed_type else None,
        return_dict=False,
    )
    return [*skips, middle]
