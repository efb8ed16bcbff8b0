"""The places of tiles of an image that is redrawn tile by tile, and of the seams between them, in pixels. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

#: sampled sides are multiples of it, so that models with patches of two cells read it
CELL = 16


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def right(self) -> int:
        """The first column behind it."""
        return self.left + self.width

    @property
    def bottom(self) -> int:
        """The first row below it."""
        return self.top + self.height

    def meets(self, other: Box) -> bool:
        """Whether both have a pixel in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )  # fmt: skip

    def grown(self, pixels: int) -> Box:
        """Return it with so many pixels more on each side."""
        return Box(self.left - pixels, self.top - pixels, self.width + 2 * pixels, self.height + 2 * pixels)

    def within(self, size: tuple[int, int]) -> Box:
        """Return its part in an image of this size."""
        left, top = max(0, self.left), max(0, self.top)
        return Box(left, top, min(size[0], self.right) - left, min(size[1], self.bottom) - top)


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of an image that is redrawn.

    box   what changes
    peak  the point, from the upper left corner of `box`, from which its mask fades to its sides: across (x > 0), down
          (y > 0), or around it (both); (0, 0) for a mask that does not fade
    """

    box: Box
    peak: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Grid:
    """Tiles of one size over an image of a size, from its upper left corner: the last ones of a row and of a column
    have the rest."""

    size: tuple[int, int]
    tile: tuple[int, int]

    @property
    def columns(self) -> int:
        """The number of tiles in a row."""
        return math.ceil(self.size[0] / self.tile[0])

    @property
    def rows(self) -> int:
        """The number of tiles in a column."""
        return math.ceil(self.size[1] / self.tile[1])

    def tiles(self, is_chess: bool) -> list[Tile]:
        """Return the tiles row by row; `is_chess`: the black fields of a chess board before the white ones."""
        places = [(column, row) for row in range(self.rows) for column in range(self.columns)]
        if is_chess:
            places.sort(key=lambda place: sum(place) % 2)
        return [Tile(self._box(column, row)) for column, row in places]

    def bands(self, width: int) -> list[list[Tile]]:
        """Return bands of a width along the seams between rows, then between columns, which fade to both sides."""
        high = wide = width // 2
        rows = [self._around(0, y, (0, high), (self.size[0], 2 * high)) for y in self._seams(1)]
        columns = [self._around(x, 0, (wide, 0), (2 * wide, self.size[1])) for x in self._seams(0)]
        return [rows, columns]

    def half_tiles(self) -> list[list[Tile]]:
        """Return tiles that are half a tile lower, then tiles that are half a tile to the right: their masks fade from
        the seam in their middle."""
        wide, high = self.tile[0] // 2, self.tile[1] // 2
        across = range(0, self.size[0], self.tile[0])
        down = range(0, self.size[1], self.tile[1])
        rows = [self._around(x, y, (0, high), self.tile) for y in self._seams(1) for x in across]
        columns = [self._around(x, y, (wide, 0), self.tile) for y in down for x in self._seams(0)]
        return [rows, columns]

    def intersections(self) -> list[Tile]:
        """Return tiles around the corners of four tiles, which fade around these."""
        peak = self.tile[0] // 2, self.tile[1] // 2
        return [self._around(x, y, peak, self.tile) for y in self._seams(1) for x in self._seams(0)]

    def _box(self, column: int, row: int) -> Box:
        return Box(column * self.tile[0], row * self.tile[1], *self.tile).within(self.size)

    def _seams(self, axis: int) -> Iterator[int]:
        return iter(range(self.tile[axis], self.size[axis], self.tile[axis]))

    def _around(self, x: int, y: int, peak: tuple[int, int], size: tuple[int, int]) -> Tile:
        """Return a tile of a size with its peak at a point of the image."""
        box = Box(x - peak[0], y - peak[1], *size).within(self.size)
        return Tile(box, (x - box.left if peak[0] else 0, y - box.top if peak[1] else 0))


def region_of(box: Box, padding: int, size: tuple[int, int], least: tuple[int, int] = (0, 0)) -> Box:
    """Return the box that is sampled for a part of an image of a size: it with padding on each side, as far as the
    image reaches. Its sides are multiples of `CELL`, or the sides of the image. `least`: a part that would be smaller
    at an end of the image gets more padding at the other side."""
    left, width = _span(box.left, box.width, padding, size[0], least[0])
    top, height = _span(box.top, box.height, padding, size[1], least[1])
    return Box(left, top, width, height)


def _span(start: int, length: int, padding: int, side: int, least: int) -> tuple[int, int]:
    """Return where a part of a side begins, with padding, and how long it is."""
    if least:
        first, last = start - padding, start + max(least, length) + padding
    else:
        first, last = max(0, start - padding), min(side, start + length + padding)
    found = min(side, whole_cells(last - first))
    return min(max(0, first), side - found), found


def whole_cells(pixels: int) -> int:
    """Return the next multiple of `CELL`."""
    return math.ceil(pixels / CELL) * CELL
