"""In which sizes the images and videos of a driver's own are used. Pure."""

from __future__ import annotations

from modelpool.actors.request.image_fields import MOST_PIXELS, MOST_SIDE
from modelpool.actors.request.requests import SIZE_STEP
from modelpool.pool.core.errors import unusable_field


def wanted_size(width: int | None, height: int | None, own: tuple[int, int]) -> tuple[int, int]:
    """The width and height that an image of its `own` size is used in. Raises UnusableField naming the side left out
    where that would have too many pixels, or both where both are said."""
    if width is None and height is None:
        return max(SIZE_STEP, own[0] // SIZE_STEP * SIZE_STEP), max(SIZE_STEP, own[1] // SIZE_STEP * SIZE_STEP)
    found = width or _stepped(own[0], height, own[1]), height or _stepped(own[1], width, own[0])
    if max(found) > MOST_SIDE or found[0] * found[1] > MOST_PIXELS:
        missing = "width" if width is None else "height" if height is None else "width, height"
        left_out = "" if width and height else f", in proportion to an image of {times_of(own)}"
        expected = f"an image of up to {MOST_SIDE} pixels on a side and {MOST_PIXELS} in all"
        raise unusable_field(missing, f"{times_of(found)}{left_out}", expected)
    return found


def _stepped(own: int, other: int | None, own_other: int) -> int:
    """One side in proportion to the `other`, which is said, of an image with these sides of its own."""
    assert other is not None, "of a side and the other, one is said"
    return max(SIZE_STEP, round(other * own / own_other / SIZE_STEP) * SIZE_STEP)


def times_of(size: tuple[int, int]) -> str:
    """A size in words."""
    return f"{size[0]}x{size[1]}"
