"""Formats a recipe as lines: what `modelpool inspect` shows of an image, video or audio file.

Shows every field that the digest covers, so that two files with different recipes never look alike.
"""

from __future__ import annotations

from modelpool.actors.graph.all_features import LINE_ORDER
from modelpool.actors.graph.features.feature import Line
from modelpool.actors.graph.features.recipe import Recipe


def recipe_facts(recipe: Recipe) -> list[Line]:
    """Return the lines of `recipe`: names and values."""
    found: list[Line] = []
    for feature in LINE_ORDER:
        found += feature.recipe.lines(recipe)
        if recipe.pictures is not None:
            found += feature.images.lines(recipe.pictures)
    return [
        *found,
        ("seed", str(recipe.seed)),
        ("recipe", recipe.digest),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(recipe.versions.items()))),
        *((f"pool {name}", value) for name, value in recipe.computed_by.items()),
        *(("warning", warning) for warning in recipe.warnings),
    ]
