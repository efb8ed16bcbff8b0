"""The conditions of a run: prompt, negative prompt, and the prompts of regions.

Shape legend: B batch, L tokens, D text width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition, inputs_on
from modelpool.pool.inference.conditioning.micro_conditioning import NO_KWARGS, ModelKwargs
from modelpool.pool.inference.conditioning.regions import NO_REGIONS, Regions


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The conditions of a run; texts are [B, L, D] with the B of its latents.

    uncond         the negative prompt; None with a guidance scale of 1
    regions        prompts for parts of the image in addition to `cond`
    without_image  model inputs that replace inputs of the same names for a prediction of `uncond` without an image
    without_image_BLD  the text of that prediction; None: the text of `uncond`
    left_out       names of model inputs that this prediction has not
    """

    cond: Condition
    uncond: Condition | None = None
    regions: Regions = NO_REGIONS
    without_image: ModelKwargs | None = None
    without_image_BLD: Tensor | None = None
    left_out: frozenset[str] = frozenset()

    def to(self, device: torch.device) -> Prompts:
        """Return the same on `device`."""
        without = self.without_image
        return Prompts(
            self.cond.to(device),
            None if self.uncond is None else self.uncond.to(device),
            self.regions.to(device),
            None if without is None else inputs_on(without, device),
            None if self.without_image_BLD is None else self.without_image_BLD.to(device),
            self.left_out,
        )

    def with_inputs(self, model_kwargs: ModelKwargs, negative: ModelKwargs = NO_KWARGS) -> Prompts:
        """Return the same with `model_kwargs` for each text; `negative` replace them for the negative prompt."""
        if not model_kwargs and not negative:
            return self
        regional = (_with_inputs(each, model_kwargs) for each in self.regions.conditions)
        return replace(
            self,
            cond=_with_inputs(self.cond, model_kwargs),
            uncond=None if self.uncond is None else _with_inputs(self.uncond, {**model_kwargs, **negative}),
            regions=replace(self.regions, conditions=tuple(regional)),
        )


def _with_inputs(condition: Condition, model_kwargs: ModelKwargs) -> Condition:
    return replace(condition, model_kwargs={**condition.model_kwargs, **model_kwargs})
