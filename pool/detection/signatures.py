"""The table of recognised diffusion models: one row per family. Torch-free.

Families with a module in `pool.families.modules` have their rows from there. The others have a row in one of the
modules of `known`, and a layout in one of those of `layouts`. Rows that share a layout, a latent name and a class are
grouped. Order matters twice:

1. Layouts are tried in the order of their first mention. The narrower of two layouts that match a file comes first,
unless their excluded keys distinguish them. 2. Of the rows of one layout, the first whose condition and extra keys
match wins. The last row of a layout matches the rest; if none matches, the layout's title describes the file.

Sources: the published models' configurations; ComfyUI's class names (facts in tests/golden/detection.json); class names
of diffusers 0.42.1.
"""

from __future__ import annotations

from modelpool.pool.detection.known.flux import FLUXES
from modelpool.pool.detection.known.image import IMAGES
from modelpool.pool.detection.known.unets import UNETS
from modelpool.pool.detection.known.video import AUDIOS_AND_SHAPES, VIDEOS
from modelpool.pool.detection.layouts.signature import Layout, Signature, anything
from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.definition import FamilyDefinition


def with_definitions(rows: tuple[Signature, ...], definitions: tuple[FamilyDefinition, ...]) -> tuple[Signature, ...]:
    """Return `rows` and those of `definitions`.

    A new layout is tried before all of `rows`, since only its own module knows how narrow it has to be. A family with
    a condition precedes the rows of its layout, one without follows them.
    """
    merged = list(rows)
    for definition in reversed(definitions):
        row = Signature(
            definition.name, definition.title, definition.layout, definition.when, (), definition.latent,
            definition.comfyui, definition.module,
        )  # fmt: skip
        places = [place for place, other in enumerate(merged) if other.layout is definition.layout]
        last = definition.when is anything
        merged.insert(0 if not places else places[-1] + 1 if last else places[0], row)
    return tuple(merged)


SIGNATURES: tuple[Signature, ...] = with_definitions(
    (*UNETS, *FLUXES, *IMAGES, *VIDEOS, *AUDIOS_AND_SHAPES), defined_families()
)

#: each layout once, in the order in which they are tried
LAYOUTS: tuple[Layout, ...] = tuple({id(row.layout): row.layout for row in SIGNATURES}.values())
