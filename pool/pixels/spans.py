"""Where tiles lie along one dimension, and how much each counts in each cell of the result.

Torch-free and pure; knows nothing of what is computed. A tile of an image is one `Span` of each dimension, and its
weight in a cell the product of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from modelpool.pool.core.errors import unusable_field


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """How cells along one dimension of the input become cells of the result.

    length  cells of the result that so many cells of the input give
    start   cell of the result at which the result of a tile begins that begins at this cell of the input
    """

    length: Callable[[int], int]
    start: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Downscale:
    """How a VAE divides one dimension.

    factor       pixels (frames, audio samples) along one latent cell
    first_alone  the first latent cell is of one frame only, as causal video VAEs have it: t cells are
                 factor * (t - 1) + 1 frames
    """

    factor: int
    first_alone: bool = False

    @property
    def decoding(self) -> Scale:
        """From latent cells to pixels.

        A tile that begins inside a video gives one frame for its first cell, and that is the cell's last one: the
        frames before it are the overlap's to give.
        """
        missing = self.factor - 1 if self.first_alone else 0
        return Scale(lambda cells: max(0, self.factor * cells - missing), lambda cell: self.factor * cell)

    @property
    def encoding(self) -> Scale:
        """From pixels to latent cells. Tiles begin at multiples of `factor`."""
        missing = self.factor - 1 if self.first_alone else 0
        return Scale(lambda pixels: (pixels + missing) // self.factor, lambda pixel: pixel // self.factor)

    def pixels(self, cells: int) -> int:
        """How many pixels so many latent cells stand for."""
        return self.decoding.length(cells)


def times(factor: int) -> Scale:
    """Each cell of the input becomes `factor` of the result."""
    return Downscale(factor).decoding


@dataclass(frozen=True, slots=True)
class Span:
    """One tile along one dimension.

    start, length          in cells of the input
    out_start, out_length  in cells of the result
    weights                how much it counts in each of its cells of the result; over all spans that cover a cell they
                           sum to 1, and where only one does, its weight is exactly 1
    """

    start: int
    length: int
    out_start: int
    out_length: int
    weights: tuple[float, ...]


def spans(size: int, tile: int, overlap: int, scale: Scale) -> tuple[Span, ...]:
    """Tiles of `tile` cells, `tile` - `overlap` apart, over `size` cells; the last one may be shorter.

    Weights rise and fall linearly over what two neighbours share. Raises UnusableField when the overlap is not less
    than the tile, or too small for the results of neighbours to meet.
    Source of the geometry and of the ramps: ComfyUI, `tiled_scale_multidim`.
    """
    if not 0 <= overlap < tile:
        raise unusable_field("overlap of tiles", overlap, f"0 to {tile - 1}, less than the tile's {tile} cells")
    starts = range(0, size - overlap, tile - overlap) if size > tile else range(1)
    bare = [_bare(start, min(tile, size - start), scale) for start in starts]
    out_size = scale.length(size)
    ends = [span.out_start + span.out_length for span in bare]
    for end, following in zip(ends, bare[1:], strict=False):
        if following.out_start > end:
            raise unusable_field("overlap of tiles", overlap, "more: the results of neighbouring tiles do not meet")
    assert ends[-1] == out_size, f"tiles end at {ends[-1]} of {out_size} cells"
    feather = scale.length(overlap)
    ramps = [_ramp(span.out_length, feather) for span in bare]
    totals = [0.0] * out_size
    for span, ramp in zip(bare, ramps, strict=True):
        for place, height in enumerate(ramp, span.out_start):
            totals[place] += height
    return tuple(
        Span(
            span.start,
            span.length,
            span.out_start,
            span.out_length,
            tuple(height / totals[place] for place, height in enumerate(ramp, span.out_start)),
        )
        for span, ramp in zip(bare, ramps, strict=True)
    )


def even_tile(size: int, most: int, overlap: int) -> int:
    """The least tile, at most `most`, that covers `size` cells in no more tiles than `most` does.

    So no tile is much smaller than the others: a sliver sees little around it, and norms over a tile differ most there.
    """
    if size <= most or overlap >= most:
        return most
    tiles = math.ceil((size - overlap) / (most - overlap))
    return math.ceil((size + (tiles - 1) * overlap) / tiles)


def _bare(start: int, length: int, scale: Scale) -> Span:
    return Span(start, length, scale.start(start), scale.length(length), ())


def _ramp(length: int, feather: int) -> list[float]:
    """Heights that rise from 1 / feather to 1 at the start and fall at the end; flat when there is no room for it."""
    heights = [1.0] * length
    if feather < length:
        for step in range(feather):
            height = (step + 1) / feather
            heights[step] *= height
            heights[length - 1 - step] *= height
    return heights
