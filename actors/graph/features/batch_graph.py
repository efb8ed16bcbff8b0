"""The batch size of a request: how many images the forward passes have in which it is sampled.

`actors.graph.common.task_collector` makes it a part of the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


def _recorded(source: RecipeSource) -> dict[str, Any]:
    size = source.request.batch
    assert isinstance(size, int), "it was chosen where the graph is built"
    return {"batch": size if size > 1 else 0}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return {"batch": recipe.batch} if recipe.batch else {}


def _lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.batch:
        yield "batch", f"{recipe.batch} images per forward pass"


BATCH = Feature(recipe=Section(_recorded, _restored, _lines))
