"""The table of recognised diffusion models: one row per family. Torch-free.

Families with a module in `pool.families.definitions` have their rows from there; families of `not_running` are
recognised and do not run. Order matters twice:

1. A layout is tried before all that have fewer of its keys: the narrower of two that match a file. Others are tried in
   the order of their first mention; the order of modules says nothing, so excluded keys distinguish those.
2. Of the rows of one layout, the first with matching condition and extra keys wins. The last row of a layout matches
   the rest; if none matches, the layout's title describes the file.

Sources: the published models' configurations; ComfyUI's class names (facts in tests/golden/detection.json); class names
of diffusers 0.42.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelpool.pool.families.definitions import Definition, all_definitions
from modelpool.pool.families.detection.layouts.signature import Layout, Signature, anything
from modelpool.pool.families.detection.not_running import NOT_RUNNING


def with_definitions(rows: tuple[Signature, ...], definitions: tuple[Definition, ...]) -> tuple[Signature, ...]:
    """Return `rows` and the rows of `definitions`, by layout.

    A family with a condition precedes the rows of its layout, and one without follows them; those with extra keys are
    the first.
    """
    merged = list(rows)
    for definition in reversed(definitions):
        detect = definition.detect
        row = Signature(
            definition.name, definition.title, detect.layout, detect.when, detect.extra_keys, definition.latent,
            detect.comfyui, definition.module,
        )  # fmt: skip
        places = [place for place, other in enumerate(merged) if other.layout is detect.layout]
        last = detect.when is anything
        merged.insert(0 if not places else places[-1] + 1 if last else places[0], row)
    tried = {id(row.layout): place for place, row in reversed(list(enumerate(merged)))}
    return tuple(sorted(merged, key=lambda row: (tried[id(row.layout)], not row.extra_keys)))


SIGNATURES: tuple[Signature, ...] = with_definitions(NOT_RUNNING, all_definitions())


def narrower_first(layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    """Return each of `layouts` once: each before all with a part of its keys, and in their order otherwise."""
    ordered: list[Layout] = []
    for layout in {id(each): each for each in layouts}.values():
        before = (place for place, other in enumerate(ordered) if _is_narrower(layout, other))
        ordered.insert(next(before, len(ordered)), layout)
    return tuple(ordered)


def _is_narrower(layout: Layout, other: Layout) -> bool:
    return any(
        one.naming is another.naming and set(one.keys) > set(another.keys)
        for one in layout.namings
        for another in other.namings
    )


#: each layout once, in the order in which they are tried
LAYOUTS: tuple[Layout, ...] = narrower_first(row.layout for row in SIGNATURES)
