"""How other programs count the layers of CLIP, and what that means for `clip_skip` of a request.

They number the layer that is read, from the last one; a request counts layers that are skipped besides those that its
model skips by itself. Torch-free.
"""

from __future__ import annotations

from modelpool.pool.families.parts.text_reading import reading_of
from modelpool.pool.families.supported import running_families
from modelpool.pool.families.text_readings import readings_of

#: beginnings of titles of families that read CLIP one layer before the last, in short forms that name no family here
_PENULTIMATE = ("SDXL", "SD XL", "SD 2")


def layers_left_out(family: str) -> int:
    """Return how many last layers of CLIP models of a family leave out by themselves. `family` is its title; an unknown
    one leaves out none."""
    for name, each in running_families().items():
        if each.title == family:
            readings = readings_of(name) or tuple(map(reading_of, each.texts.values()))
            return max((reading.layers_left_out for reading in readings if reading.is_clip), default=0)
    return 1 if family.startswith(_PENULTIMATE) else 0


def skipped_by_layer(layer: int, family: str) -> int:
    """Return the `clip_skip` for A1111's and Forge's number of the layer that CLIP is read at, 1 for the last one:
    models that leave out layers by themselves do so for smaller numbers, too."""
    return max(0, layer - 1 - layers_left_out(family))
