"""Reads a recipe from JSON values of unknown origin: a manifest, or the metadata of an output file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from modelpool.actors.graph.features.recipe import (
    Recipe,
    RecipeControl,
    RecipeDecoder,
    RecipeImagePrompt,
    RecipeImages,
    RecipeLora,
    RecipeLowNoise,
    RecipeNoise,
    RecipeRegion,
    RecipeUpscale,
    RecipeView,
)
from modelpool.actors.request.json_text import parse_json
from modelpool.pool.values.core.errors import UserError, unknown_name, unusable_field

#: fields of an image prompt that are lists
_PROMPT_LISTS = ("image_sha256", "image_files", "mask_sha256", "mask_files")
#: the last parts of a message that quotes values
_MOST_QUOTED = 80


class UnusableRecipe(UserError):
    """JSON values that are not a recipe. The message names the field, the value found and the value expected."""


def recipe_from_text(text: str) -> Recipe:
    """Parse the JSON text of a recipe. Raises UserError."""
    return recipe_from_json(parse_json(text.encode("utf-8", "surrogatepass")))


def recipe_from_json(fields: Any) -> Recipe:
    """Invert `Recipe.as_json`. Nothing is converted, so that the digest is that of the original. Raises UserError for
    anything else.
    """
    if not isinstance(fields, Mapping):
        raise unusable_field("recipe", type(fields).__name__, "an object")
    unknown = sorted(set(fields) - set(Recipe.__dataclass_fields__))
    if unknown:
        raise unknown_name("field of a recipe", unknown[0], Recipe.__dataclass_fields__)
    _check_types(fields)
    pictures, second, low = fields.get("pictures"), fields.get("decoder"), fields.get("low_noise")
    noise, upscale, view = fields.get("noise"), fields.get("upscale"), fields.get("view")
    try:
        return Recipe(
            **{
                **fields,
                "loras": tuple(_lora_from_json(lora) for lora in fields["loras"]),
                "warnings": tuple(fields.get("warnings", ())),
                "embeddings": tuple((name, sha256) for name, sha256 in fields.get("embeddings", ())),
                "pictures": None if pictures is None else _images_from_json(pictures),
                "decoder": None if second is None else RecipeDecoder(**second),
                "low_noise": None if low is None else RecipeLowNoise(**low),
                "noise": None if noise is None else RecipeNoise(**noise),
                "view": None if view is None else RecipeView(**view),
                "sigmas": tuple(fields.get("sigmas", ())),
                "upscale": None if upscale is None else RecipeUpscale(**upscale),
                "options": {
                    name: {setting: _without_lists(value) for setting, value in settings.items()}
                    for name, settings in fields.get("options", {}).items()
                },
            }
        )
    except TypeError as error:  # a part has a field that is unknown
        raise UnusableRecipe(str(error)) from None


def _without_lists(value: Any) -> Any:
    """Return a setting of an option with tuples for lists."""
    return tuple(_without_lists(each) for each in value) if isinstance(value, list) else value


def _lora_from_json(fields: Mapping[str, Any]) -> RecipeLora:
    blocks = tuple((name, factor) for name, factor in fields.get("blocks", ()))
    keyframes = tuple((share, strength) for share, strength in fields.get("keyframes", ()))
    return RecipeLora(**{**fields, "blocks": blocks, "keyframes": keyframes, "only": tuple(fields.get("only", ()))})


def _images_from_json(fields: Mapping[str, Any]) -> RecipeImages:
    controls = tuple(RecipeControl(**control) for control in fields.get("controls", ()))
    regions = tuple(
        RecipeRegion(**{**region, "box": None if region["box"] is None else tuple(region["box"])})
        for region in fields.get("regions", ())
    )
    prompts = tuple(_image_prompt_from_json(prompt) for prompt in fields.get("image_prompts", ()))
    more = {name: tuple(fields.get(name, ())) for name in ("more_references", "more_reference_files")}
    return RecipeImages(**{**fields, "controls": controls, "image_prompts": prompts, "regions": regions, **more})


def _image_prompt_from_json(fields: Mapping[str, Any]) -> RecipeImagePrompt:
    lists = {name: tuple(fields.get(name, ())) for name in _PROMPT_LISTS}
    blocks = tuple((name, factor) for name, factor in fields.get("blocks", ()))
    return RecipeImagePrompt(**{**fields, **lists, "blocks": blocks})


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
