"""Random recipes and requests lead to what they led to in an earlier version: digests, texts, lines, requests, ids of
tasks, warnings and errors."""

from __future__ import annotations

import json
import random
from typing import Any

from modelpool.actors.outputs.recipe_json import recipe_from_json
from tests.actors.graph import random_recipes
from tests.actors.graph.random_recipes import GOLDEN, RECIPES, REQUESTS, digests, of_request, random_request


def test_random_recipes_and_requests_lead_to_what_was_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    made = list(digests())
    assert len(made) == len(recorded) == RECIPES + REQUESTS
    changed = [number for number, (one, other) in enumerate(zip(made, recorded, strict=True)) if one != other]
    assert changed == [], f"{len(changed)} of {len(made)} differ"


def test_the_random_recipes_have_every_field_of_earlier_recipes() -> None:
    rng = random.Random(34)
    recipes = [random_recipes.random_recipe(rng) for _ in range(RECIPES)]
    used = {name for recipe in recipes for name, value in recipe.items() if value}
    assert used == {*random_recipes.FIRST, *random_recipes.LATER, "loras", "versions", "warnings", "pictures", "sigmas"}
    images: list[dict[str, Any]] = [recipe["pictures"] for recipe in recipes if "pictures" in recipe]
    found = {name for each in images for name, value in each.items() if value}
    assert found == {*random_recipes.IMAGES, "controls", "image_prompts"}
    assert all(recipe_from_json(recipe).as_json() for recipe in recipes)


def test_the_random_requests_reach_almost_every_field_of_a_recipe() -> None:
    """Not those that only the driver knows, and faces."""
    rng, seen = random.Random(5), set[str]()
    for _ in range(1200):
        recipe, *others = of_request(random_request(rng))
        if others:
            fields = json.loads(recipe)
            images = fields.pop("pictures", {})
            seen |= {name for each in (fields, images) for name, value in each.items() if value}
    expected = {*random_recipes.FIRST, *random_recipes.LATER, *random_recipes.IMAGES, "loras", "controls"}
    assert expected - seen == {"computed_by"}
