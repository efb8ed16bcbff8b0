"""Converts a region of a request to the regional prompt of a sampling task. A pure function of values."""

from __future__ import annotations

from modelpool.actors.request.image_fields import Region
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.stage_params import RegionParams


def region_params(region: Region, size: tuple[int, int]) -> RegionParams:
    """Return the region of an image of this width and height, before it is scaled up. Raises UnusableField for a box
    that exceeds the image."""
    if region.box is None:
        return RegionParams(region.strength)
    (left, top, width, height), (whole_width, whole_height) = region.box, size
    if left + width > whole_width or top + height > whole_height:
        expected = f"a box within the image of {whole_width}x{whole_height} pixels"
        raise unusable_field("regions.box", region.box, expected)
    return RegionParams(
        region.strength,
        (left / whole_width, top / whole_height, width / whole_width, height / whole_height),
    )
