"""Runs a function over tiles of its input and blends the results.

For any number of dimensions; knows no model. One tile is computed at a time; the sum may be on another device.

Shape legend: B batch, C channels of the input or of the result, then one or more dimensions that are tiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.inference.pixels.spans import Scale, Span, spans, times
from modelpool.pool.values.core.errors import counted, unusable_field

#: [B, C, *dimensions] -> [B, C', *dimensions of the result]
TileCall: TypeAlias = Callable[[Tensor], Tensor]

HOST = torch.device("cpu")
#: rows of a single tile that move together, if bands are wanted
BAND = 256


def run_tiled(
    call: TileCall,
    x_BC: Tensor,
    tile: Sequence[int],
    overlap: Sequence[int],
    scales: Sequence[Scale | int],
    device: torch.device = HOST,
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    context: Sequence[int] = (),
) -> Tensor:
    """Compute `call(x_BC)` tile by tile: float32 on `device`, where the result is summed.

    `tile` and `overlap` are in positions of the input, `scales` map them to positions of the result (a number: a
    factor); one entry for each dimension after the channels. `call` gets the complete batch. A single tile is one plain
    call, bit for bit equal to one without tiles.
    `context` are positions around each tile that `call` gets too, as far as there are any; their results are
    dropped: results near the edge of a tile depend on positions beyond. It needs scales that are numbers.
    `finish` is applied to the result: a single tile's is still where and in what dtype `call` computed it, and
    moves to `device` afterwards, so that a smaller result moves faster; several tiles' is in float32 on `device`.
    `before_tile` is called before each tile, and may raise to end the run; `on_tile` after each with (done, total).
    Raises UnusableField for tiles that do not meet, and if the sizes of a result of `call` do not match `scales`.
    """
    axes = _axes(x_BC.shape[2:], tile, overlap, scales)
    whole = not any(context)

    def computed() -> Iterator[Tensor]:
        for tile_spans in itertools.product(*axes):
            if before_tile is not None:
                before_tile()
            # not in a variable: the result must be gone before the next tile is computed
            yield call(_cut(x_BC, tile_spans)) if whole else _within(call, x_BC, tile_spans, context, scales)

    return _blended(computed(), axes, device, on_tile, finish)


def run_some_tiles(
    call: TileCall,
    x_BC: Tensor,
    tile: Sequence[int],
    overlap: Sequence[int],
    scales: Sequence[Scale | int],
    places: range,
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Compute those tiles of `run_tiled` that have these `places` in its order: on the host, in the dtype of `call`,
    each with the part of the result that it covers. `blend_tiles` makes the result from all of them."""
    found: list[Tensor] = []
    axes = _axes(x_BC.shape[2:], tile, overlap, scales)
    for tile_spans in itertools.islice(itertools.product(*axes), places.start, places.stop):
        if before_tile is not None:
            before_tile()
        found.append(call(_cut(x_BC, tile_spans)).to(HOST).contiguous())
        _check(found[-1], tile_spans)
        if on_tile is not None:
            on_tile(len(found), len(places))
    return found


def blend_tiles(
    tiles: Iterable[Tensor],
    sizes: Sequence[int],
    tile: Sequence[int],
    overlap: Sequence[int],
    scales: Sequence[Scale | int],
    device: torch.device = HOST,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the result of `run_tiled` for an input of `sizes`, bit for bit, from the results of all its tiles in
    order: `run_tiled` blends with the same function. Raises UnusableField for tiles of other sizes."""
    return _blended(iter(tiles), _axes(sizes, tile, overlap, scales), device, None, finish)


def _blended(
    tiles: Iterator[Tensor],
    axes: Sequence[tuple[Span, ...]],
    device: torch.device,
    on_tile: Callable[[int, int], None] | None,
    finish: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Sum the results of `tiles`, each computed when it is added, in their order."""
    out_sizes = tuple(axis[-1].out_start + axis[-1].out_length for axis in axes)
    count = math.prod(len(axis) for axis in axes)
    out_BC: Tensor | None = None
    for done, tile_spans in enumerate(itertools.product(*axes), 1):
        part_BC = next(tiles)
        _check(part_BC, tile_spans)
        if count == 1 and finish is not None:
            out_BC = finish(part_BC).to(device)
            del part_BC
            if on_tile is not None:
                on_tile(done, count)
            return out_BC
        # first move, then convert to float32: the computing device may have room for the tile only
        part_BC = part_BC.to(device).to(torch.float32)
        if count == 1:
            out_BC = part_BC
        else:
            if out_BC is None:
                out_BC = torch.zeros((*part_BC.shape[:2], *out_sizes), dtype=torch.float32, device=device)
            places = [slice(None)] * 2 + [slice(s.out_start, s.out_start + s.out_length) for s in tile_spans]
            out_BC[tuple(places)].addcmul_(part_BC, _weights(tile_spans).to(device))
        del part_BC  # before the next tile is computed
        if on_tile is not None:
            on_tile(done, count)
    assert out_BC is not None
    return out_BC if finish is None else finish(out_BC)


def run_tiled_bands(
    call: TileCall,
    x_BC: Tensor,
    tile: Sequence[int],
    overlap: Sequence[int],
    scales: Sequence[Scale | int],
    device: torch.device = HOST,
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
    context: Sequence[int] = (),
) -> Iterator[Tensor]:
    """Yield the result of `run_tiled` in bands along the first dimension, in order, each as soon as no tile changes it
    any more: so much of it is on `device`. A single tile is computed as a whole, and moved in bands of `BAND`.
    """
    rows, *others = _axes(x_BC.shape[2:], tile, overlap, scales)
    out_sizes = tuple(axis[-1].out_start + axis[-1].out_length for axis in others)
    count = len(rows) * math.prod(len(axis) for axis in others)
    done = 0
    band_BC: Tensor | None = None
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        before_BC, band_BC = band_BC, None
        for rest in itertools.product(*others):
            tile_spans = (row, *rest)
            if before_tile is not None:
                before_tile()
            whole = not any(context)
            part_BC = call(_cut(x_BC, tile_spans)) if whole else _within(call, x_BC, tile_spans, context, scales)
            _check(part_BC, tile_spans)
            done += 1
            if count == 1:
                if on_tile is not None:
                    on_tile(done, count)
                for begin in range(0, row.out_length, BAND):
                    yield part_BC[:, :, begin : begin + BAND].to(device).to(torch.float32)
                return
            part_BC = part_BC.to(device).to(torch.float32)
            if band_BC is None:
                band_BC = _band(part_BC, row.out_length, out_sizes, before_BC)
                before_BC = None
            places = [slice(None)] * 2 + [slice(s.out_start, s.out_start + s.out_length) for s in rest]
            band_BC[(*places[:2], slice(None), *places[2:])].addcmul_(part_BC, _weights(tile_spans).to(device))
            del part_BC  # before the next tile is computed
            if on_tile is not None:
                on_tile(done, count)
        assert band_BC is not None, "a row has tiles"
        complete = row.out_length if following is None else following.out_start - row.out_start
        yield band_BC[:, :, :complete]
        band_BC = band_BC[:, :, complete:].clone()


def _band(part_BC: Tensor, length: int, out_sizes: tuple[int, ...], begun_BC: Tensor | None) -> Tensor:
    """Return an empty band of this length that begins with what tiles before have added to it."""
    band_BC = torch.zeros((*part_BC.shape[:2], length, *out_sizes), dtype=torch.float32, device=part_BC.device)
    if begun_BC is not None:
        band_BC[:, :, : begun_BC.shape[2]] = begun_BC
    return band_BC


def count_tiles(
    sizes: Sequence[int], tile: Sequence[int], overlap: Sequence[int], scales: Sequence[Scale | int]
) -> int:
    """Return how many calls `run_tiled` makes. Raises as it does."""
    return math.prod(len(axis) for axis in _axes(sizes, tile, overlap, scales))


def _axes(
    sizes: Sequence[int], tile: Sequence[int], overlap: Sequence[int], scales: Sequence[Scale | int]
) -> list[tuple[Span, ...]]:
    assert len(sizes) == len(tile) == len(overlap) == len(scales), (
        f"{counted(len(sizes), 'dimension')}, {tile}, {overlap}"
    )
    known = [times(scale) if isinstance(scale, int) else scale for scale in scales]
    return [spans(*numbers) for numbers in zip(sizes, tile, overlap, known, strict=True)]


def _cut(x_BC: Tensor, tile_spans: tuple[Span, ...]) -> Tensor:
    places = [slice(None)] * 2 + [slice(span.start, span.start + span.length) for span in tile_spans]
    return x_BC[tuple(places)]


def _within(
    call: TileCall, x_BC: Tensor, tile_spans: tuple[Span, ...], context: Sequence[int], scales: Sequence[Scale | int]
) -> Tensor:
    """Return the result of a tile that is computed with its surroundings."""
    read, kept = [slice(None)] * 2, [slice(None)] * 2
    for span, more, scale, size in zip(tile_spans, context, scales, x_BC.shape[2:], strict=True):
        assert isinstance(scale, int), "tiles with context need scales that are numbers"
        begin = max(0, span.start - more)
        read.append(slice(begin, min(size, span.start + span.length + more)))
        kept.append(slice((span.start - begin) * scale, (span.start - begin + span.length) * scale))
    return call(x_BC[tuple(read)])[tuple(kept)]


def _weights(tile_spans: tuple[Span, ...]) -> Tensor:
    """Return the weights of a tile, one number for each position of its result."""
    weights = torch.ones(())
    for span in tile_spans:
        weights = weights.unsqueeze(-1) * torch.tensor(span.weights, dtype=torch.float32)
    return weights


def _check(part_BC: Tensor, tile_spans: tuple[Span, ...]) -> None:
    expected = tuple(span.out_length for span in tile_spans)
    if tuple(part_BC.shape[2:]) != expected:
        cells = tuple(span.length for span in tile_spans)
        found = f"{tuple(part_BC.shape[2:])} for a tile of {cells}"
        raise unusable_field("scales of tiles", found, f"{expected}, as the scales say")
