"""The table of recognised diffusion models: one row per family. Torch-free.

A new family is a new row in one of the modules of `known`; one with a new architecture also needs a layout in one of
those of `layouts`. Rows that share a layout, a latent name and a class are grouped. Order matters twice:

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
from modelpool.pool.detection.layouts.signature import Layout, Signature

SIGNATURES: tuple[Signature, ...] = (*UNETS, *FLUXES, *IMAGES, *VIDEOS, *AUDIOS_AND_SHAPES)

#: each layout once, in the order in which they are tried
LAYOUTS: tuple[Layout, ...] = tuple({id(row.layout): row.layout for row in SIGNATURES}.values())
