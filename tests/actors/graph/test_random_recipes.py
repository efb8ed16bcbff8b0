"""Random recipes and requests lead to what they led to in an earlier version: digests, texts, lines, requests, ids of
tasks, warnings and errors."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.actors.graph import random_recipes
from tests.actors.graph.random_recipes import GOLDEN, RECIPES, REQUESTS, digest, random_recipe, results

Results = list[list[Any]]


@pytest.fixture(scope="module", name="made")
def results_of_all() -> Results:
    return list(results())


def test_random_recipes_and_requests_lead_to_what_was_recorded(made: Results) -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(made) == len(recorded) == RECIPES + REQUESTS
    changed = [number for number, (one, other) in enumerate(zip(made, recorded, strict=True)) if digest(one) != other]
    assert changed == [], f"{len(changed)} of {len(made)} differ"


def test_the_random_recipes_have_every_field_of_earlier_recipes() -> None:
    rng = random.Random(34)
    recipes = [random_recipe(rng) for _ in range(RECIPES)]
    used = {name for recipe in recipes for name, value in recipe.items() if value}
    assert used == {*random_recipes.FIRST, *random_recipes.LATER, "loras", "versions", "warnings", "pictures", "sigmas"}
    images: list[dict[str, Any]] = [recipe["pictures"] for recipe in recipes if "pictures" in recipe]
    found = {name for each in images for name, value in each.items() if value}
    assert found == {*random_recipes.IMAGES, "controls", "image_prompts"}


def test_the_random_requests_reach_every_field_of_a_recipe(made: Results) -> None:
    """Except the settings of the pool, which only the driver knows."""
    seen = set[str]()
    for recipe, *others in made[RECIPES:]:
        if others:
            fields = json.loads(recipe)
            images = fields.pop("pictures", {})
            seen |= {name for each in (fields, images) for name, value in each.items() if value}
    expected = {*random_recipes.FIRST, *random_recipes.LATER, *random_recipes.IMAGES, "loras", "controls"}
    assert expected - seen == {"computed_by"}
