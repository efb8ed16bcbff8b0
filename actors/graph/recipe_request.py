"""Converts a recipe back to a request, so that an output can be generated again. Pure, but for looking up input files.

A recipe has numbers where the request may have had none, and a first step where it had a strength. Several requests may
lead to one recipe; whether one does is known only where the task graph is built, so the candidates are returned in
order of likelihood, and the digest of their recipe decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelpool.actors.graph.all_features import FEATURES
from modelpool.actors.graph.features.feature import FindFile
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.start_image_graph import is_unsampled, strengths_of
from modelpool.actors.graph.workflow_recipe import request_of_workflow
from modelpool.actors.request.requests import GenerateRequest


def requests_of(recipe: Recipe, find: FindFile) -> tuple[GenerateRequest, ...]:
    """Return the requests that may lead to `recipe`, the likeliest first. `find` returns the path of an input file by
    its name; it raises UserError if there is none.

    Raises UserError if no request can: an input came from memory, or is missing.
    """
    if recipe.workflow is not None:
        return (request_of_workflow(recipe, find),)
    fields: dict[str, Any] = {}
    for feature in FEATURES:
        fields |= feature.recipe.restore(recipe, find)
        if recipe.pictures is not None:
            fields |= feature.images.restore(recipe.pictures, find)
    strengths = strengths_of(recipe)
    found = tuple(
        GenerateRequest(**{name: value for name, value in {**fields, **more}.items() if value is not None})
        for schedule in ({}, {"schedule": None})
        for more in ({**schedule, **strength} for strength in strengths)
    )
    return tuple(request.without_steps() for request in found) if is_unsampled(recipe) else found


def differing_fields(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """Return the fields in which two recipes differ, as far as they determine the output. Sorted; fields of parts are
    named with their part, such as "pictures.image_sha256".
    """
    return tuple(sorted(_differing(recipe.determining(), other.determining())))


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for name in {*one, *other}:
        first, second = one.get(name), other.get(name)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from (f"{name}.{part}" for part in _differing(first, second))
        elif first != second:
            yield name
