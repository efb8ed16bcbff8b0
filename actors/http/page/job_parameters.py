"""What the web page shows of the parameters of a job, and which of them its form takes over. Pure.

Pixels are never sent: an image is a few words. Names of files on the server are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.actors.graph.features.lora_graph import RecipeLora
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.http.service.caller_images import IMAGE_FIELDS, LIST_FIELDS
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.control_video_fields import Frames
from modelpool.actors.request.image_fields import Pixels
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.run_options import RunOptions

#: fields that the page's form has as they are, besides LoRAs, ControlNets and options
PLAIN_FIELDS = (
    *("model", "prompt", "negative", "width", "height", "steps", "cfg", "sampler", "schedule", "seed", "strength"),
)
_FORM_FIELDS = frozenset({*PLAIN_FIELDS, "loras", "controls", "options"})
#: of a request, that are no parameters of its output
_NOT_SHOWN = frozenset({"user", "metadata", "preview"})
#: of a recipe, that describe files and programs, and are in the recipe itself
_RECIPE_ONLY = frozenset({"model_sha256", "versions", "warnings", "computed_by", "embeddings"})
_IMAGE, _VIDEO = "an image", "a video"


def request_fields(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request that the page's form has, as JSON values, and `others`: the names of what it does
    not take over."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in PLAIN_FIELDS}
    fields["loras"] = request.model_dump(mode="json", include={"loras"})["loras"]
    fields["controls"] = [_control(control) for control in request.controls]
    fields["options"] = {} if request.options is None else request.options.settings()
    others = request.model_fields_set - _FORM_FIELDS - _NOT_SHOWN
    images = {"controls.image"} if any(control.image is not None for control in request.controls) else set()
    return {**fields, "others": sorted(others | images)}


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the same of a recipe, which has the values that were used."""
    fields: dict[str, Any] = {name: getattr(recipe, name, None) for name in PLAIN_FIELDS}
    fields["loras"] = [{"name": lora.name, "strength": lora.strength} for lora in recipe.loras]
    is_plain = all(RecipeLora(each.name, each.sha256, each.strength) == each for each in recipe.loras)
    values = recipe.as_json()
    pictures = values.get("pictures") or {}
    controls = pictures.get("controls") or []
    names = ("strength", "start", "end", "mode")
    fields["controls"] = [
        {"model": each.get("name", "")} | {name: each[name] for name in names if each.get(name) is not None}
        for each in controls
    ]
    fields["options"] = values.get("options") or {}
    # a recipe has the first step that was run, from which the strength does not follow
    later = ("strength" if name == "first_step" else name for name in _later_parameters(values))
    others = {name for name in later if name == "strength" or name not in _FORM_FIELDS}
    others |= {"controls.image"} if controls else set()
    others |= set() if is_plain else {"loras (only names and strengths)"}
    return {**fields, "others": sorted(others)}


def request_parameters(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request that are set, as JSON values."""
    names = [name for name in type(request).model_fields if name in request.model_fields_set - _NOT_SHOWN]
    found = {name: _shown(getattr(request, name), name) for name in names}
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}


def recipe_parameters(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that are used, as JSON values, without hashes."""
    values = recipe.as_json()
    first = ("model", "prompt", "negative", "loras", "seed", "steps", "cfg", "sampler", "schedule", "width", "height")
    shown = {name: _without_files(values[name]) for name in first if name in values}
    shown |= _later_parameters(values)
    return {name: value for name, value in shown.items() if value not in (None, "", [], {}, 0, 0.0) or name == "seed"}


def _later_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that only some jobs have, with the ones about images at the same level."""
    plain = {name: value for name, value in values.items() if name not in _RECIPE_ONLY and name != "pictures"}
    first = {*PLAIN_FIELDS, "loras"}
    found = {name: _without_files(value) for name, value in plain.items() if name not in first}
    for name, value in (values.get("pictures") or {}).items():
        field, _, end = name.rpartition("_")
        if end == "sha256":
            if value:
                found[field] = _VIDEO if "video" in field else _IMAGE
        elif end not in ("file", "files"):
            found[name] = _without_files(value)
    return {name: value for name, value in found.items() if value not in (None, "", [], {}, 0, 0.0, False)}


def _without_files(value: Any) -> Any:
    """Return JSON values without hashes and names of files."""
    if isinstance(value, Mapping):
        kept = {name: each for name, each in value.items() if not name.endswith(("sha256", "_file", "_files"))}
        return {name: _without_files(each) for name, each in kept.items() if each not in (None, "", [], {})}
    return [_without_files(each) for each in value] if isinstance(value, list | tuple) else value


def _control(control: Control) -> dict[str, Any]:
    found = {"model": control.model, "strength": control.strength, "start": control.start, "end": control.end}
    return found if control.mode is None else {**found, "mode": control.mode}


def _shown(value: Any, name: str = "") -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case Pixels():
            return _IMAGE
        case Frames():
            return _VIDEO
        case str():
            return _IMAGE if name in IMAGE_FIELDS or name in LIST_FIELDS else value
        case RunOptions():
            return _shown(value.settings())
        case Strict():
            return {each: _shown(getattr(value, each), each) for each in value.model_fields_set}
        case Mapping():
            return {str(key): _shown(each, str(key)) for key, each in value.items()}
        case tuple() | list():
            return [_shown(each, name) for each in value]
    return str(getattr(value, "value", type(value).__name__))
