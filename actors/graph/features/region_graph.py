"""The regions of a request: prompts for parts of the image. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    InputMissing,
    Line,
    RecipeSource,
    Section,
    without_unused_parts,
)
from modelpool.actors.request.image_fields import Region
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.stage_params import RegionParams

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages


#: an empty text that a run predicts for, besides its prompts: of the complete image, and without weight
EMPTY_TEXT = RegionParams(0.0, (0.0, 0.0, 1.0, 1.0))


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


@dataclass(frozen=True, slots=True)
class RecipeRegion:
    """A prompt for a part of the image: in a box (left, top, width, height in pixels) or a mask."""

    prompt: str
    strength: float
    box: tuple[int, int, int, int] | None
    mask_sha256: str


def _recorded(source: RecipeSource) -> dict[str, Any]:
    regions = source.request.regions
    return {
        "regions": tuple(
            RecipeRegion(each.prompt, each.strength, each.box, "" if each.mask is None else each.mask.sha256)
            for each in regions
        )
    }


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    found = []
    for region in images.regions:
        if region.box is None:
            raise InputMissing("regions.mask: recipes do not name the file of a mask")
        found.append({"prompt": region.prompt, "strength": region.strength, "box": region.box})
    return {"regions": tuple(found)} if found else {}


def _lines(images: RecipeImages) -> Iterator[Line]:
    for region in images.regions:
        place = "x".join(map(str, region.box[2:])) + f" at {region.box[0]},{region.box[1]}" if region.box else ""
        masked = f"a mask (sha256 of its pixels {region.mask_sha256})" if region.mask_sha256 else ""
        yield "region", f"{region.prompt!r}, strength {region.strength:g}, {place or masked}"


REGIONS = Feature(defaults=partial(without_unused_parts, "regions"), images=Section(_recorded, _restored, _lines))
