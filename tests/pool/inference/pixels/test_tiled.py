"""Runs by tiles: the published results, exactness where there is nothing to blend, order, memory, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.pixels.spans import Downscale, Scale
from modelpool.pool.inference.pixels.tiled import count_tiles, run_tiled
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import Stopped

GOLDEN = Path(__file__).parents[3] / "golden"
CASES = json.loads((GOLDEN / "misc.json").read_text())["tiled_scale"]
INDEX = 69  # of a simulated device that no other test uses


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def enlarged(factor: int) -> Callable[[Tensor], Tensor]:
    """Nearest neighbour plus the mean of all that a call sees, so that every tile has something of its own."""

    def call(x_BC: Tensor) -> Tensor:
        mean_B = x_BC.mean(dim=tuple(range(1, x_BC.ndim)), keepdim=True)
        return functional.interpolate(x_BC[:, :3], scale_factor=factor) + mean_B

    return call


def published(name: str) -> Tensor:
    return load_file(GOLDEN / "misc.safetensors")[f"tile.{name}"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_images_as_published(case: dict[str, object]) -> None:
    x_BC = drawn(case["seed"], *case["shape"])
    tile, overlap = (case["tile_y"], case["tile_x"]), (case["overlap"],) * 2
    scales = (case["upscale"],) * 2
    told: list[tuple[int, int]] = []
    found = run_tiled(
        enlarged(case["upscale"]), x_BC, tile, overlap, scales, on_tile=lambda done, tiles: told.append((done, tiles))
    )
    torch.testing.assert_close(found, published(case["name"]), rtol=0, atol=1e-6)
    tiles = case["steps"]
    assert count_tiles(x_BC.shape[2:], tile, overlap, scales) == tiles
    assert told == [(done, tiles) for done in range(1, tiles + 1)]


def test_audio_as_published() -> None:
    def call(x_BCL: Tensor) -> Tensor:
        return functional.interpolate(x_BCL[:, :2], scale_factor=3) + x_BCL.mean()

    found = run_tiled(call, drawn(25, 1, 4, 40), (16,), (4,), (3,))
    torch.testing.assert_close(found, published("audio"), rtol=0, atol=1e-6)


def test_video_as_published() -> None:
    """The first frame stands alone in time: 7 cells are 25 frames."""

    def call(x: Tensor) -> Tensor:
        sizes = (4 * x.shape[2] - 3, 2 * x.shape[3], 2 * x.shape[4])
        return functional.interpolate(x[:, :3], size=sizes) + x.mean()

    scales = (Downscale(4, first_alone=True).decoding, 2, 2)
    found = run_tiled(call, drawn(24, 1, 4, 7, 10, 12), (3, 6, 6), (1, 2, 2), scales)
    torch.testing.assert_close(found, published("video"), rtol=0, atol=1e-6)


def test_encoding_as_published() -> None:
    def call(x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, 4) + x.mean()

    scale = Downscale(4).encoding
    found = run_tiled(call, drawn(26, 1, 3, 24, 24), (16, 16), (8, 8), (scale, scale))
    torch.testing.assert_close(found, published("down"), rtol=0, atol=1e-6)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    dimensions = draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(1, 14)) for _ in range(dimensions))
    tile = tuple(draw(st.integers(2, 16)) for _ in range(dimensions))
    return sizes, tile, tuple(draw(st.integers(0, edge - 1)) for edge in tile)


@given(tilings(), st.integers(1, 3), st.integers(1, 2))
def test_what_works_cell_by_cell_comes_out_as_without_tiles(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], factor: int, batch: int
) -> None:
    sizes, tile, overlap = layout

    def call(x_BC: Tensor) -> Tensor:
        return functional.interpolate(x_BC, scale_factor=factor).tanh()

    x_BC = drawn(0, batch, 2, *sizes)
    found = run_tiled(call, x_BC, tile, overlap, (factor,) * len(sizes))
    torch.testing.assert_close(found, call(x_BC), rtol=1e-6, atol=1e-6)


@given(tilings())
def test_tiles_that_only_touch_are_put_together_bit_for_bit(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    sizes, tile, _ = layout
    x_BC = drawn(0, 1, 2, *sizes)
    assert torch.equal(run_tiled(torch.cos, x_BC, tile, (0,) * len(sizes), (1,) * len(sizes)), torch.cos(x_BC))


def test_one_tile_is_the_plain_call_bit_for_bit() -> None:
    x_BC = drawn(3, 2, 4, 9, 11).half()
    found = run_tiled(enlarged(2), x_BC, (11, 11), (4, 4), (2, 2))
    assert torch.equal(found, enlarged(2)(x_BC).float())


def test_the_input_is_left_as_it_was() -> None:
    """Also by a call that returns a view of what it got."""
    x_BC = drawn(3, 1, 2, 12)
    before = x_BC.clone()
    run_tiled(lambda tile: tile, x_BC, (5,), (2,), (1,))
    assert torch.equal(x_BC, before)


def test_a_run_ends_before_the_tile_at_which_it_was_asked_to() -> None:
    done: list[int] = []

    def before_tile() -> None:
        if len(done) == 2:
            raise Stopped

    def on_tile(count: int, tiles: int) -> None:
        done.append(count)

    with pytest.raises(Stopped):
        run_tiled(enlarged(1), drawn(0, 1, 3, 20), (6,), (2,), (1,), before_tile=before_tile, on_tile=on_tile)
    assert done == [1, 2]


def test_a_result_of_another_size_than_the_scales_say_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"scales of tiles.*\(12,\).*\(18,\)"):
        run_tiled(enlarged(2), drawn(0, 1, 3, 20), (6,), (2,), (3,))


def test_what_is_computed_at_once_is_one_tile() -> None:
    """The device holds one tile's input, result and temporary, not the whole's; the result is added up on the host."""
    sim.configure(INDEX, 64 << 20)
    device = torch.device("sim", INDEX)

    def call(x_BC: Tensor) -> Tensor:
        return functional.interpolate(x_BC.to(device), scale_factor=8).sin()

    x_BC = drawn(0, 1, 3, 64, 64)
    sim.reset_peak(INDEX)
    found = run_tiled(call, x_BC, (16, 16), (4, 4), (8, 8))
    tile_bytes = 4 * 3 * 16 * 16 * (1 + 2 * 8 * 8)
    assert sim.memory_stats(INDEX).peak_bytes <= tile_bytes + 4096
    sim.reset_peak(INDEX)
    there = run_tiled(call, x_BC, (16, 16), (4, 4), (8, 8), device=device)
    assert there.device.type == "sim"
    assert torch.equal(there.cpu(), found)
    accumulator_bytes = 4 * 3 * 512 * 512
    assert accumulator_bytes < sim.memory_stats(INDEX).peak_bytes <= accumulator_bytes + 3 * tile_bytes


def test_a_scale_may_be_any_two_functions() -> None:
    halves = Scale(length=lambda cells: cells // 2, start=lambda cell: cell // 2)
    x_BC = drawn(2, 1, 3, 20)
    found = run_tiled(lambda tile: functional.avg_pool1d(tile, 2), x_BC, (8,), (4,), (halves,))
    torch.testing.assert_close(found, functional.avg_pool1d(x_BC, 2), rtol=1e-6, atol=1e-6)
