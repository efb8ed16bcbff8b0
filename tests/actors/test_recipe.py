"""A recipe names a picture: what changes the picture changes the digest, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from actors.recipe import Recipe, RecipeLora

RECIPE = Recipe(
    model="shapes", model_sha256="ab", prompt="p", negative="n", loras=(RecipeLora("light", "cd", 0.5),), steps=4,
    cfg=5.0, sampler="euler", schedule="normal", width=64, height=64, seed=1, versions={"torch": "2.13"},
)  # fmt: skip
OTHER = {
    "model": "forms", "model_sha256": "xx", "prompt": "q", "negative": "", "loras": (), "steps": 5, "cfg": 4.0,
    "sampler": "ddim", "schedule": "karras", "width": 72, "height": 72, "seed": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_that_makes_the_picture_is_in_the_digest(field) -> None:
    assert replace(RECIPE, **{field: OTHER[field]}).digest != RECIPE.digest
    assert {f.name for f in fields(Recipe)} == {*OTHER, "versions", "warnings"}


def test_versions_are_told_and_not_in_the_digest() -> None:
    newer = replace(RECIPE, versions={"torch": "3"})
    assert newer.digest == RECIPE.digest
    assert newer.as_json()["versions"] == {"torch": "3"}


def test_a_recipe_is_json() -> None:
    assert json.loads(json.dumps(RECIPE.as_json()))["loras"] == [{"name": "light", "sha256": "cd", "strength": 0.5}]
