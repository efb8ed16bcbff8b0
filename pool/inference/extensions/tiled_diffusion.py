"""Tiled diffusion: predicts overlapping tiles of the latent and averages the predictions.

Sources: Bar-Tal et al. 2023 ("MultiDiffusion"), equation 5, for equal weights; Jimenez 2023 ("Mixture of Diffusers"),
equation 4, for Gaussian ones. Shape legend: B batch, C latent channels, H W cells.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.values.core.run_options import TiledDiffusion
from modelpool.pool.weights.options.wrappers import Wrapper

#: pixels along a side of a cell of the latent
_CELL_PIXELS = 8
#: variance of the Gaussian weights as a share of the tile. Source: the mixture pipeline of diffusers
_VARIANCE = 0.01


def tiled_model(option: TiledDiffusion) -> Wrapper:
    """Return the wrapper around a model call that calls the model for each tile."""
    tile, overlap = (pixels // _CELL_PIXELS for pixels in (option.tile, option.overlap))

    def apply(model: Any, x_BCHW: Tensor, sigma_B: Tensor, context_BLD: Tensor, *inputs: Any) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        spans = list(product(tile_spans(height, tile, overlap), tile_spans(width, tile, overlap)))
        if len(spans) == 1:
            whole: Tensor = model(x_BCHW, sigma_B, context_BLD, *inputs)
            return whole
        total_BCHW, weights_HW = torch.zeros_like(x_BCHW), x_BCHW.new_zeros(height, width)
        for rows, columns in spans:
            part_BCHW = x_BCHW[..., rows, columns]
            weight_HW = tile_weights(option.weights, part_BCHW)
            total_BCHW[..., rows, columns] += model(part_BCHW, sigma_B, context_BLD, *inputs) * weight_HW
            weights_HW[rows, columns] += weight_HW
        return total_BCHW / weights_HW

    return apply


def tile_spans(side: int, tile: int, overlap: int) -> list[slice]:
    """Return the cells of each tile along a side; the last one ends at the side's end."""
    if side <= tile:
        return [slice(0, side)]
    starts = [*range(0, side - tile, tile - overlap), side - tile]
    return [slice(start, start + tile) for start in starts]


def tile_weights(kind: str, part_BCHW: Tensor) -> Tensor:
    """Return the weight of each cell of a tile, [H, W]."""
    if kind == "equal":
        return part_BCHW.new_ones(part_BCHW.shape[-2:])
    sides = []
    for side in part_BCHW.shape[-2:]:
        place = (torch.arange(side, dtype=part_BCHW.dtype, device=part_BCHW.device) - (side - 1) / 2) / side
        sides.append(torch.exp(-(place**2) / (2 * _VARIANCE)))
    return torch.outer(*sides)
