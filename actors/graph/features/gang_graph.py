"""The GPUs of a request: how many may share its sampling runs, and what its recipe says about it.

`actors.graph.common.task_collector` makes it a part of the tasks. The recipe has what was requested: "auto" leaves the
number to the scheduler, which the last bits of an output depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.request.gpu_fields import AUTO

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


def _recorded(source: RecipeSource) -> Mapping[str, Any]:
    shared = any(work.gpus for work in source.samplings)
    return {"gpus": str(source.request.gpus) if shared else ""}


def _restored(recipe: Recipe, find: FindFile) -> Mapping[str, Any]:
    return {"gpus": recipe.gpus} if recipe.gpus else {}


def _lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.gpus:
        yield "gpus", "as many as the scheduler chose" if recipe.gpus == AUTO else f"{recipe.gpus} share a run"


GANG = Feature(recipe=Section(_recorded, _restored, _lines))
