"""The image that an output starts from, its mask, and the second pass: their place in recipes. Pure functions of
values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    Line,
    RecipeSource,
    Section,
    find_input,
    image_line,
)
from modelpool.pool.values.core.stage_params import UpscaleParams

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe, RecipeImages


#: added to a number of steps so that rounding a product of floats gives that number
_ROUNDING = 1e-6
_INPUTS = ("image", "mask")


def is_unsampled(recipe: Recipe) -> bool:
    """Whether no step of the schedule was run."""
    return recipe.pictures is not None and recipe.pictures.first_step >= recipe.steps


def strengths_of(recipe: Recipe) -> tuple[dict[str, float], ...]:
    """Return the denoising strengths that may lead to the first step of a recipe: families round differently."""
    if is_unsampled(recipe):
        return ({},)
    images = recipe.pictures
    if images is None or not images.image_sha256:
        return ({},)
    if images.first_step == 0:
        return ({}, {"strength": 1.0})
    left = recipe.steps - images.first_step
    return tuple({"strength": (left + change) / recipe.steps} for change in (0.0, _ROUNDING, -_ROUNDING))


def _recorded(source: RecipeSource) -> dict[str, Any]:
    request = source.request
    found: dict[str, Any] = {"first_step": source.sample.schedule.first_step}
    found["paste"] = request.mask is not None and request.paste
    for name in _INPUTS:
        if (given := getattr(request, name)) is not None:
            found |= {f"{name}_sha256": given.sha256, f"{name}_file": given.file}
    return found


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    found: dict[str, Any] = {"paste": images.paste}
    for name in _INPUTS:
        if getattr(images, f"{name}_sha256"):
            found[name] = find_input(name, getattr(images, f"{name}_file"), find)
    return found


def _lines(recipe: Recipe) -> Iterator[Line]:
    images = recipe.pictures
    if images is not None and images.image_sha256:
        since = f", from step {images.first_step} of {recipe.steps}" if images.first_step else ""
        yield "image", image_line(images.image_file, images.image_sha256, since)
    if images is not None and images.mask_sha256:
        kept = ", unmasked area pasted back" if images.paste else ""
        yield "mask", image_line(images.mask_file, images.mask_sha256, kept)


def _recorded_hires(source: RecipeSource) -> dict[str, Any]:
    """Return the second pass, with the upscaler of the first if it has one."""
    hires = source.request.hires
    if hires is None:
        return {}
    found = hires.recorded()
    del found["upscaler"]
    if hires.upscaler is not None:
        # the upscaling of the output comes after the second pass
        first = next(stage for stage in source.stages if isinstance(stage, UpscaleParams))
        found |= {"upscaler": first.model.name, "upscaler_sha256": first.model.sha256}
    return {"hires": found}


def _restored_hires(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    return {"hires": {name: value for name, value in images.hires.items() if name != "upscaler_sha256"} or None}


def _hires_lines(images: RecipeImages) -> Iterator[Line]:
    """Yield the fields as in a request; unset ones are left out."""
    if not images.hires:
        return
    known = {name: value for name, value in images.hires.items() if value is not None}
    if (sha256 := known.pop("upscaler_sha256", None)) is not None:
        known["upscaler"] = f"{known['upscaler']} (sha256 {sha256})"
    scale = f"scale {known.pop('scale'):g}" if "scale" in known else ""
    yield "second pass", ", ".join(filter(None, (scale, *(f"{name} {value}" for name, value in known.items()))))


START_IMAGE = Feature(recipe=Section(lines=_lines), images=Section(_recorded, _restored))
HIRES = Feature(images=Section(_recorded_hires, _restored_hires, _hires_lines))
