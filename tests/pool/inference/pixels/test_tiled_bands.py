"""Tiles with a result that comes in bands compute what tiles with a whole result do, and hold a band of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.pixels import tiled as tiled_module
from modelpool.pool.inference.pixels.tiled import run_tiled, run_tiled_bands


@pytest.mark.parametrize("tile", [(9, 8), (9, 30), (40, 8), (40, 30), (11, 13)])
def test_bands_of_tiles_are_the_rows_of_the_whole_result(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_module, "BAND", 7)
    x_BCHW = torch.rand(2, 3, 40, 30, generator=torch.Generator().manual_seed(0))
    seen: list[tuple[int, int]] = []

    def call(part: Tensor) -> Tensor:
        return torch.nn.functional.interpolate(part * 1.3 + part.mean(), scale_factor=2)

    overlap = tuple(3 if edge < side else 0 for edge, side in zip(tile, (40, 30), strict=True))
    context = tuple(2 if edge < side else 0 for edge, side in zip(tile, (40, 30), strict=True))
    whole = run_tiled(call, x_BCHW, tile, overlap, (2, 2), context=context)
    bands = list(
        run_tiled_bands(call, x_BCHW, tile, overlap, (2, 2), context=context, on_tile=lambda *at: seen.append(at))
    )
    assert torch.equal(torch.cat(bands, dim=2), whole)
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    most = 7 if tile == (40, 30) else 2 * tile[0]
    assert all(band.shape[2] <= most for band in bands)
