"""Regional prompts: the weight of each prompt at each latent position, and the combination of their predictions.

The prompt has weight 1 everywhere, a region its strength times its mask or box; the combined prediction is the weighted
mean. Each prompt is predicted for the complete image. Predictions can be summed in the model's prediction type, noise
or clean latents, because the weights add up to 1.

Shape legend: B batch, C latent channels, H W height and width of a latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import COND, UNCOND, Condition
from modelpool.pool.inference.conditioning.starts import cell_shares
from modelpool.pool.values.core.stage_params import Mask, RegionParams

#: latent positions over which a box fades in, at edges that are not the image's; at most a quarter of the box.
#: Source: ComfyUI, which fades the areas of conditions like this
FADE_CELLS = 8
#: index of the first region among the conditions of a run, after the prompt and the negative prompt
FIRST_PLACE = max(COND, UNCOND) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The regions of a run: their prompts, and their weights, [B or 1, 1, H, W] of float32."""

    conditions: tuple[Condition, ...] = ()
    weights: tuple[Tensor, ...] = ()

    def to(self, device: torch.device) -> Regions:
        """Return the same on `device`."""
        return Regions(tuple(c.to(device) for c in self.conditions), tuple(w.to(device) for w in self.weights))

    def combine(self, predictions: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return the combined prediction of all prompts except the negative one, from the predictions by index."""
        total = predictions[COND]
        if not self.conditions:
            return total
        for place, weight in enumerate(self.weights, FIRST_PLACE):
            total = total + predictions[place] * weight
        # times the inverse: dividing by a number may round differently on another device
        inverse = 1.0 / (1.0 + torch.stack(torch.broadcast_tensors(*self.weights)).sum(0))
        return total * inverse


NO_REGIONS = Regions()


def region_weights(
    regions: Sequence[RegionParams], masks: Sequence[Sequence[Mask]], cells: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return the weight of each region in latents of `cells` (height, width). `masks` are, for each image, the masks of
    the regions that have one."""
    by_region = iter(zip(*masks, strict=True))
    weights = []
    for region in regions:
        if region.box is None:
            shares = torch.stack([cell_shares(mask.values_HW, cells) for mask in next(by_region)])[:, None]
        else:
            shares = box_weights(region.box, cells)[None, None]
        weights.append(shares * region.strength)
    return tuple(weights)


def box_weights(box: tuple[float, float, float, float], cells: tuple[int, int]) -> Tensor:
    """Return the weights of a box (left, top, width, height as fractions of the image), [H, W]: 1 inside, 0 outside,
    rising from its edges."""
    left, top, width, height = box
    vertical, horizontal = _rise(top, height, cells[0]), _rise(left, width, cells[1])
    return vertical[:, None] * horizontal[None, :]


def _rise(start: float, length: float, cells: int) -> Tensor:
    """Return the weights along one side. A box covers at least one latent position."""
    first = min(round(start * cells), cells - 1)
    last = max(first + 1, round((start + length) * cells))
    weights = torch.zeros(cells)
    weights[first:last] = 1.0
    fade = min(FADE_CELLS, (last - first) // 4)
    for step in range(fade):
        share = (step + 1) / fade
        if first > 0:
            weights[first + step] *= share
        if last < cells:
            weights[last - 1 - step] *= share
    return weights
