"""The table of the diffusion models that are recognised: one row for each family. Torch-free.

A new family is a new row in one of the modules of `known`; one with an architecture of its own has a layout too, in one
of those of `layouts`. Rows that share a layout, the name of their latents and the class that runs them stand
together. Order matters twice:

1. Layouts are tried in the order in which they are first named. The narrower of two that a file could have comes first,
   where the keys that must not be there do not tell them apart already.
2. Of the rows of one layout the first counts whose condition holds and whose keys beside the model are there. The last
   one of a layout takes what is left; where none does, a file is told by the layout's title.

Sources: the published models' configurations; ComfyUI's class names, for those who know models by these (facts in
tests/golden/detection.json); class names of diffusers 0.42.1.
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
