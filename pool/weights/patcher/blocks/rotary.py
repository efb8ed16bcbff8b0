"""Rotary positions of transformers: of those that are called with positions, and of those that count the patches of
their input in a module of their own.

Shape legend: L tokens, T Y X patches of a latent in time, height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.weights.options.transformer_options import RopeOptions
from modelpool.pool.weights.patcher.blocks import diffusers_names as names


def grid_rope(module: nn.Module) -> nn.Module | None:
    """Return the module of a transformer that makes the rotary embeddings of a grid of patches; None if it has none in
    a known form."""
    rope = getattr(module, "rope", None)
    is_known = isinstance(rope, nn.Module) and names.rope_settings(rope) is not None
    return rope if is_known else None


@dataclass(slots=True, eq=False)
class PlacedGrid:
    """Replaces the forward of the module `rope`: scales and shifts its positions by `options`."""

    rope: nn.Module
    options: RopeOptions
    #: the embeddings by the size of the grid, and by device: a run has one
    _made: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, original: Callable[..., Any], x_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the patches of a latent, in the shapes of the module."""
        found = names.rope_settings(self.rope)
        assert found is not None, "the module is of a known class"
        sizes = tuple(side // patch for side, patch in zip(x_BCTHW.shape[2:], found.patch, strict=True))
        key = (*sizes, x_BCTHW.device)
        if key not in self._made:
            # on the host: the same numbers on every device
            tables = [
                names.rotary_table(found, axis, torch.arange(size, dtype=torch.float64) * scale + shift)
                for axis, (size, (scale, shift)) in enumerate(zip(sizes, _axes(self.options), strict=True))
            ]
            cosines, sines = (self._joined([table[part] for table in tables], sizes) for part in (0, 1))
            device = x_BCTHW.device
            shape = (1, -1, 1, cosines.shape[-1]) if found.is_4d else (-1, cosines.shape[-1])
            self._made[key] = cosines.reshape(shape).to(device), sines.reshape(shape).to(device)
        return self._made[key]

    @staticmethod
    def _joined(tables: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
        """Return the tables of the three axes for each patch, [T, Y, X, width]."""
        views = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
        expanded = [table.view(*view, table.shape[-1]) for table, view in zip(tables, views, strict=True)]
        return torch.cat([each.expand(*sizes, -1) for each in expanded], dim=-1)


def placed_ids(ids_L3: Tensor, options: RopeOptions) -> Tensor:
    """Return positions of patches, [L, 3] with time, row and column first, scaled and shifted."""
    placed = ids_L3.clone()
    columns = (names.IDS_T, names.IDS_Y, names.IDS_X)
    for column, (scale, shift) in zip(columns, _axes(options), strict=True):
        placed[..., column] = ids_L3[..., column] * scale + shift
    return placed


def _axes(options: RopeOptions) -> tuple[tuple[float, float], ...]:
    """Return scale and shift of time, rows and columns."""
    return (
        (options.scale_t, options.shift_t),
        (options.scale_y, options.shift_y),
        (options.scale_x, options.shift_x),
    )
