"""A text for a part of an image, as the work of sampling has it. A pure function over values."""

from __future__ import annotations

from modelpool.actors.graph.orders import RegionOrder
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.stage_params import RegionWork


def region_work(region: RegionOrder, size: tuple[int, int]) -> RegionWork:
    """The part of an image of this width and height, before that is scaled up. Raises UnusableField for a box that
    reaches out of it."""
    if region.box is None:
        return RegionWork(region.strength)
    (left, top, width, height), (whole_width, whole_height) = region.box, size
    if left + width > whole_width or top + height > whole_height:
        raise unusable_field("regions.box", region.box, f"one within the {whole_width}x{whole_height} of the image")
    return RegionWork(
        region.strength,
        (left / whole_width, top / whole_height, width / whole_width, height / whole_height),
    )
