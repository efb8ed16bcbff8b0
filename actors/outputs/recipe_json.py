"""Reads a recipe from JSON values of unknown origin: a manifest, or the metadata of an output file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded import check_names, from_json
from modelpool.actors.request.json_text import parse_json
from modelpool.pool.values.core.errors import UserError, unusable_field

#: the last parts of a message that quotes values
_MOST_QUOTED = 80


class UnusableRecipe(UserError):
    """JSON values that are not a recipe. The message names the field, the value found and the value expected."""


def recipe_from_text(text: str) -> Recipe:
    """Parse the JSON text of a recipe. Raises UserError."""
    return recipe_from_json(parse_json(text.encode("utf-8", "surrogatepass")))


def recipe_in(path: str | Path, kind: str, key: str, text: str | None) -> Recipe:
    """Return the recipe in the `text` under `key` of a file, an "image" or another "file". Raises UserError."""
    if text is None:
        raise UserError(f"{path}: no {key!r} text in this {kind} (not from modelpool, or stripped)")
    try:
        return recipe_from_text(text)
    except UserError as error:
        raise UserError(f"{path}: the recipe in this {kind} cannot be read ({error})") from error


def recipe_from_json(fields: Any) -> Recipe:
    """Invert `Recipe.as_json`. Nothing is converted, so that the digest equals the original's. Raises UserError for
    anything else.
    """
    if not isinstance(fields, Mapping):
        raise unusable_field("recipe", type(fields).__name__, "an object")
    check_names(Recipe, fields)
    _check_types(fields)
    recipe: Recipe = from_json(Recipe, fields)
    return recipe


def _check_types(fields: Mapping[str, Any]) -> None:
    """Raise UnusableRecipe for a value of another type, or for a missing field."""
    from pydantic import ValidationError

    try:
        _validator().validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, found = ".".join(map(str, first["loc"])), repr(first["input"])
        quoted = found if len(found) <= _MOST_QUOTED else f"{found[:_MOST_QUOTED]}..."
        raise UnusableRecipe(f"{name}: found {quoted}, {first['msg']}") from None


@lru_cache(maxsize=1)
def _validator() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Recipe)
