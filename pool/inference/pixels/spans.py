"""Positions of tiles along one dimension, and their blending weights.

Torch-free and pure; knows nothing of the computation. A tile of an image is one `Span` of each dimension; its weight at
a position is the product of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from modelpool.pool.values.core.errors import unusable_field


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Maps positions along one dimension of the input to positions of the result.

    length  length of the result for a length of the input
    start   start of a tile's result for the start of the tile
    """

    length: Callable[[int], int]
    start: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Downscale:
    """A VAE's downscale of one dimension.

    factor       pixels (frames, audio samples) for each latent position
    first_alone  the first latent frame is a single frame, as in causal video VAEs: t latent frames are
                 factor * (t - 1) + 1 frames
    """

    factor: int
    first_alone: bool = False

    @property
    def decoding(self) -> Scale:
        """From latent positions to pixels.

        The first latent frame of a tile inside a video decodes to one frame, the last of that latent frame; the frames
        before it come from the overlap.
        """
        missing = self.factor - 1 if self.first_alone else 0
        return Scale(lambda cells: max(0, self.factor * cells - missing), lambda cell: self.factor * cell)

    @property
    def encoding(self) -> Scale:
        """From pixels to latent positions. Tiles start at multiples of `factor`."""
        missing = self.factor - 1 if self.first_alone else 0
        return Scale(lambda pixels: (pixels + missing) // self.factor, lambda pixel: pixel // self.factor)

    def pixels(self, cells: int) -> int:
        """Return the number of pixels of `cells` latent positions."""
        return self.decoding.length(cells)


def times(factor: int) -> Scale:
    """Return the scale that maps each position to `factor` positions of the result."""
    return Downscale(factor).decoding


@dataclass(frozen=True, slots=True)
class Span:
    """One tile along one dimension.

    start, length          in positions of the input
    out_start, out_length  in positions of the result
    weights                blending weight at each of its positions of the result; over all spans that cover a position
                           they sum to 1, and if only one does, its weight is exactly 1
    """

    start: int
    length: int
    out_start: int
    out_length: int
    weights: tuple[float, ...]


def spans(size: int, tile: int, overlap: int, scale: Scale) -> tuple[Span, ...]:
    """Return tiles of length `tile`, `tile` - `overlap` apart, over `size` positions; the last one may be shorter.

    Weights rise and fall linearly over the overlap of two neighbours. Raises UnusableField if the overlap is not less
    than the tile, or too small for the results of neighbours to meet.
    Source of the geometry and of the ramps: ComfyUI, `tiled_scale_multidim`.
    """
    if not 0 <= overlap < tile:
        raise unusable_field("overlap of tiles", overlap, f"0 to {tile - 1}, less than the tile size of {tile}")
    starts = range(0, size - overlap, tile - overlap) if size > tile else range(1)
    bare = [_bare(start, min(tile, size - start), scale) for start in starts]
    out_size = scale.length(size)
    ends = [span.out_start + span.out_length for span in bare]
    for end, following in zip(ends, bare[1:], strict=False):
        if following.out_start > end:
            expected = "a larger one: the results of neighbouring tiles do not meet"
            raise unusable_field("overlap of tiles", overlap, expected)
    assert ends[-1] == out_size, f"tiles end at {ends[-1]} of {out_size} positions"
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
    """Return the smallest tile size, at most `most`, that covers `size` with as few tiles as `most` does.

    So no tile is much smaller than the others: a narrow tile has little context, and norms over a tile differ most
    there.
    """
    if size <= most or overlap >= most:
        return most
    tiles = math.ceil((size - overlap) / (most - overlap))
    return math.ceil((size + (tiles - 1) * overlap) / tiles)


def _bare(start: int, length: int, scale: Scale) -> Span:
    return Span(start, length, scale.start(start), scale.length(length), ())


def _ramp(length: int, feather: int) -> list[float]:
    """Return weights that rise from 1 / feather to 1 at the start and fall at the end; flat without room for that."""
    heights = [1.0] * length
    if feather < length:
        for step in range(feather):
            height = (step + 1) / feather
            heights[step] *= height
            heights[length - 1 - step] *= height
    return heights
