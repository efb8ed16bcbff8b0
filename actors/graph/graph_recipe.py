"""Builds the recipe of a request: each feature records its fields. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelpool.actors.graph.all_features import FEATURES
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.feature import RecipeSource
from modelpool.actors.graph.features.recipe import Recipe, RecipeImages
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import LoraRef


def recipe_of(request: GenerateRequest, graph: JobGraph, loras: Sequence[LoraRef]) -> Recipe:
    """Return the recipe (without versions) of `request`, whose defaults are filled in and whose task graph is `graph`.
    `loras` are its LoRAs, which the graph has only as far as they change a component that runs."""
    source = RecipeSource(request, graph, loras)
    fields: dict[str, Any] = {}
    images: dict[str, Any] = {}
    for feature in FEATURES:
        fields |= feature.recipe.record(source)
        images |= feature.images.record(source)
    recorded = RecipeImages(**images)
    return Recipe(**fields, pictures=None if recorded == RecipeImages() else recorded)
