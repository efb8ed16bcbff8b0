"""`ConditioningPart`: an encoded text and where it applies; a conditioning is a tuple of them. Pure and torch-free.

The texts themselves may be `Encoded` values or names of tasks: nothing here reads them. What changes their numbers is
in `encoded_edits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from modelpool.pool.inference.operations.operation import MAX_SIDE, need
from modelpool.pool.values.core.errors import UnusableField

Text = TypeVar("Text")
Masked = TypeVar("Masked")
#: texts of one conditioning
MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Area:
    """Left, top, width and height: in pixels or, `in_shares`, in shares of the sides of the image."""

    x: float
    y: float
    width: float
    height: float
    in_shares: bool = False

    def cells(self, width: int, height: int, downscale: int = 8) -> tuple[int, int, int, int]:
        """Return left, top, width and height in cells of a latent of `width` x `height` cells. Pixels are divided and
        cut off; shares are multiplied and rounded, halves to the even number, sizes to at least 1. The area is cut at
        the sides of the latent."""
        if self.in_shares:
            wide, high = max(1, round(self.width * width)), max(1, round(self.height * height))
            left, top = round(self.x * width), round(self.y * height)
        else:
            left, top, wide, high = (int(one) // downscale for one in (self.x, self.y, self.width, self.height))
        return left, top, max(0, min(wide, width - left)), max(0, min(high, height - top))


@dataclass(frozen=True, slots=True)
class ConditioningPart(Generic[Text, Masked]):
    """A text and where it applies.

    strength       its weight where several apply
    mask           where it applies; None for everywhere
    in_mask_bounds  it is only computed for the rectangle around the mask
    start, end     the share of the sampling in which it applies
    """

    text: Text
    area: Area | None = None
    strength: float = 1.0
    mask: Masked | None = None
    mask_strength: float = 1.0
    in_mask_bounds: bool = False
    start: float = 0.0
    end: float = 1.0

    def applies(self, share: float) -> bool:
        """Whether it applies when this share of the sampling is done: 0 at its start."""
        return self.start <= share <= self.end


Parts: TypeAlias = "Sequence[ConditioningPart[Text, Masked]]"


def combined(first: Parts[Text, Masked], second: Parts[Text, Masked]) -> tuple[ConditioningPart[Text, Masked], ...]:
    """Return the parts of both, in order: each is predicted, and the predictions are averaged by strength. Raises
    UnusableField for too many."""
    if len(first) + len(second) > MAX_PARTS:
        raise UnusableField(f"conditioning: found {len(first) + len(second)} texts, expected up to {MAX_PARTS}")
    return (*first, *second)


def in_area(
    parts: Parts[Text, Masked], area: Area, strength: float = 1.0
) -> tuple[ConditioningPart[Text, Masked], ...]:
    """Return the parts, each for an area. An area that they had is replaced. Raises UnusableField."""
    most = 1.0 if area.in_shares else float(MAX_SIDE)
    for name in ("x", "y", "width", "height"):
        need(name, getattr(area, name), 0, most)
    need("strength", strength, 0, 10)
    return tuple(replace(part, area=area, strength=strength) for part in parts)


def with_strength(parts: Parts[Text, Masked], strength: float) -> tuple[ConditioningPart[Text, Masked], ...]:
    """Return the parts with another strength in their area. Raises UnusableField."""
    need("strength", strength, 0, 10)
    return tuple(replace(part, strength=strength) for part in parts)


def in_mask(
    parts: Parts[Text, Masked], mask: Masked, strength: float = 1.0, in_bounds: bool = False
) -> tuple[ConditioningPart[Text, Masked], ...]:
    """Return the parts, each for a mask. A mask that they had is replaced. Raises UnusableField."""
    need("strength", strength, 0, 10)
    return tuple(replace(part, mask=mask, mask_strength=strength, in_mask_bounds=in_bounds) for part in parts)


def in_range(parts: Parts[Text, Masked], start: float, end: float) -> tuple[ConditioningPart[Text, Masked], ...]:
    """Return the parts, each for a part of the sampling. A range that they had is replaced. Raises UnusableField."""
    need("start", start, 0, 1)
    need("end", end, 0, 1)
    return tuple(replace(part, start=start, end=end) for part in parts)
