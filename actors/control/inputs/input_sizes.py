"""Computes the sizes at which input images and videos are used. Pure."""

from __future__ import annotations

from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_PIXELS, MAX_SIDE
from modelpool.pool.values.core.errors import unusable_field


def wanted_size(width: int | None, height: int | None, size: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height at which an image of size `size` is used. Raises UnusableField if that has too many
    pixels, naming the missing side, or both if both are set."""
    if width is None and height is None:
        return max(SIZE_STEP, size[0] // SIZE_STEP * SIZE_STEP), max(SIZE_STEP, size[1] // SIZE_STEP * SIZE_STEP)
    found = width or _stepped(size[0], height, size[1]), height or _stepped(size[1], width, size[0])
    if max(found) > MAX_SIDE or found[0] * found[1] > MAX_PIXELS:
        missing = "width" if width is None else "height" if height is None else "width, height"
        left_out = "" if width and height else f", in proportion to an image of {times_of(size)}"
        expected = f"an image of up to {MAX_SIDE} pixels on a side and {MAX_PIXELS} pixels in total"
        raise unusable_field(missing, f"{times_of(found)}{left_out}", expected)
    return found


def _stepped(size: int, other: int | None, own_other: int) -> int:
    """Return one side in proportion to the requested `other`, for an image with these sides."""
    assert other is not None, "one of the two sides is requested"
    return max(SIZE_STEP, round(other * size / own_other / SIZE_STEP) * SIZE_STEP)


def times_of(size: tuple[int, int]) -> str:
    """Return a size as text."""
    return f"{size[0]}x{size[1]}"
