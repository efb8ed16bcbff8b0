"""Tiles along one dimension: no cell is missed, weights sum to 1, whatever the sizes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.inference.pixels.spans import Downscale, Scale, Span, even_tile, spans, times
from modelpool.pool.values.core.errors import UnusableField

FACTORS = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int, Scale, int]:
    """Size, tile and overlap of the input, how it scales, and the size of the result."""
    factor, first_alone = draw(FACTORS), draw(st.booleans())
    cells, tile = draw(st.integers(1, 60)), draw(st.integers(2, 24))
    overlap = draw(st.integers(1 if first_alone else 0, tile - 1))
    downscale = Downscale(factor, first_alone)
    pixels = downscale.pixels(cells)
    if draw(st.booleans()):
        return cells, tile, overlap, downscale.decoding, pixels
    return pixels, tile * factor, overlap * factor, downscale.encoding, cells


@given(layouts())
def test_every_cell_is_covered_and_its_weights_sum_to_one(layout: tuple[int, int, int, Scale, int]) -> None:
    size, tile, overlap, scale, out_size = layout
    found = spans(size, tile, overlap, scale)
    totals, covers = [0.0] * out_size, [0] * out_size
    for span in found:
        assert len(span.weights) == span.out_length == scale.length(span.length)
        assert 0 < span.length <= max(tile, 1)
        for place, weight in enumerate(span.weights, span.out_start):
            assert weight > 0
            totals[place] += weight
            covers[place] += 1
    assert all(math.isclose(total, 1.0, rel_tol=1e-12) for total in totals)
    assert all(total == 1.0 for total, cover in zip(totals, covers, strict=True) if cover == 1)
    assert found[0].start == 0
    assert found[-1].start + found[-1].length == size
    assert all(right.start - left.start == tile - overlap for left, right in itertools.pairwise(found))


@given(size=st.integers(1, 300), most=st.integers(1, 80), data=st.data())
def test_even_tiles_are_as_many_none_larger_and_nearly_equal(size: int, most: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, most - 1))
    tile = even_tile(size, most, overlap)
    assert tile <= most
    even, plain = spans(size, tile, overlap, times(1)), spans(size, most, overlap, times(1))
    assert len(even) <= len(plain)
    assert max(s.length for s in even) - even[-1].length <= len(plain)
    if size <= most:
        assert len(even) == 1


def test_neighbours_fade_into_each_other_by_equal_steps() -> None:
    left, right = spans(10, 6, 2, times(2))
    assert left == Span(0, 6, 0, 12, left.weights)
    assert (right.start, right.length, right.out_start, right.out_length) == (4, 6, 8, 12)
    assert left.weights[:8] == right.weights[4:] == (1.0,) * 8
    assert left.weights[8:] == pytest.approx([4 / 5, 3 / 5, 2 / 5, 1 / 5])
    assert right.weights[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5])


def test_the_first_cell_of_a_tile_inside_a_video_is_one_frame_and_where_it_belongs() -> None:
    """Cell t > 0 stands for frames 4 t - 3 to 4 t; a tile that begins there gives the last of them."""
    first, second = spans(7, 4, 1, Downscale(4, first_alone=True).decoding)
    assert (first.out_start, first.out_length) == (0, 13)
    assert (second.start, second.out_start, second.out_length) == (3, 12, 13)


@pytest.mark.parametrize("overlap", [-1, 6, 7])
def test_an_overlap_outside_the_tile_is_refused(overlap: int) -> None:
    with pytest.raises(UnusableField, match="overlap of tiles"):
        spans(20, 6, overlap, times(1))


def test_tiles_of_a_video_that_leave_frames_out_are_refused() -> None:
    with pytest.raises(UnusableField, match="do not meet"):
        spans(20, 6, 0, Downscale(4, first_alone=True).decoding)
