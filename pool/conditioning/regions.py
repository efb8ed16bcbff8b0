"""Texts that guide a part of an image: how much each counts where, and how their guesses become one.

The prompt counts 1 everywhere, a region its strength times what its mask or box says; a guess is the mean of all, so
weighted. Each text is asked about the whole image. Sums are of what a model predicts: of noise as of clean latents,
since weights add up to 1.

Shape legend: B batch, C latent channels, H W height and width of a latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import COND, UNCOND, Condition
from modelpool.pool.conditioning.starts import cell_shares
from modelpool.pool.core.stage_params import Mask, RegionWork

#: latent cells over which a box fades in, at edges that are not the image's; a quarter of the box where that is less.
#: Source: ComfyUI, which fades the areas of conditions so
FADE_CELLS = 8
#: of the regions among the conditions of a run: those before are the prompt and the negative prompt
FIRST_PLACE = max(COND, UNCOND) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The regions of a run: their texts, and how much each counts, [B or 1, 1, H, W] of float32."""

    conditions: tuple[Condition, ...] = ()
    weights: tuple[Tensor, ...] = ()

    def to(self, device: torch.device) -> Regions:
        """The same on `device`."""
        return Regions(tuple(c.to(device) for c in self.conditions), tuple(w.to(device) for w in self.weights))

    def joined(self, guesses: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """The one guess for all texts but the negative one, of their guesses by place."""
        total = guesses[COND]
        if not self.conditions:
            return total
        for place, weight in enumerate(self.weights, FIRST_PLACE):
            total = total + guesses[place] * weight
        # times the inverse: dividing by a number may round differently on another device
        inverse = 1.0 / (1.0 + torch.stack(torch.broadcast_tensors(*self.weights)).sum(0))
        return total * inverse


NO_REGIONS = Regions()


def region_weights(
    regions: Sequence[RegionWork], masks: Sequence[Sequence[Mask]], cells: tuple[int, int]
) -> tuple[Tensor, ...]:
    """How much each region counts in latents of `cells` (height, width). `masks` are, image by image, those of the
    regions that have one."""
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
    """A box (left, top, width, height in shares of the image) as how much it counts in each latent cell, [H, W]: 1 in
    it, 0 outside, and rising from its edges."""
    left, top, width, height = box
    vertical, horizontal = _rise(top, height, cells[0]), _rise(left, width, cells[1])
    return vertical[:, None] * horizontal[None, :]


def _rise(start: float, length: float, cells: int) -> Tensor:
    """Along one side. A box covers one cell at least."""
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
