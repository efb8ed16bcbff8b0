"""Converts a recipe back to a request, so that an output can be generated again. Pure, but for looking up input files.

A recipe has numbers where the request may have had none, and a first step where it had a strength. Several requests may
lead to one recipe; whether one does is known only where the task graph is built, so the candidates are returned in
order of likelihood, and the digest of their recipe decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from modelpool.actors.graph.features.music_graph import MUSIC_FIELDS
from modelpool.actors.graph.features.recipe import (
    Recipe,
    RecipeControl,
    RecipeImagePrompt,
    RecipeImages,
    RecipeRegion,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError

#: added to a number of steps so that rounding a product of floats gives that number
_ROUNDING = 1e-6


class InputMissing(UserError):
    """An input image or video that an output needs to be generated again. The message names the file."""


def requests_of(recipe: Recipe, find: Callable[[str], str]) -> tuple[GenerateRequest, ...]:
    """Return the requests that may lead to `recipe`, the likeliest first. `find` returns the path of an input file by
    its name; it raises UserError if there is none.

    Raises UserError if no request can: an input came from memory, or is missing.
    """
    fields: dict[str, Any] = {
        "model": recipe.model,
        "prompt": recipe.prompt,
        "negative": recipe.negative,
        "loras": tuple({k: v for k, v in lora.used.items() if k != "sha256"} for lora in recipe.loras),
        "steps": recipe.steps,
        "cfg": recipe.cfg,
        "sampler": recipe.sampler,
        "schedule": recipe.schedule,
        "seed": recipe.seed,
        "clip_skip": recipe.clip_skip,
    }
    sizes = ("width", "height", "frames", "frame_rate", "seconds")
    same = (*sizes, *MUSIC_FIELDS, "format", "quality", "motion", "image_noise", "elevation", "shift")
    fields |= {name: value for name in same if (value := getattr(recipe, name))}
    if recipe.decoder is not None:
        fields["decoder"] = {name: getattr(recipe.decoder, name) for name in ("model", "steps", "cfg")}
    if recipe.view is not None:
        last = "camera_distance" if recipe.view.image_elevation is None else "image_elevation"
        names = ("azimuth", "elevation", last)
        fields |= {name: getattr(recipe.view, name) for name in names}
    if recipe.noise is not None:
        fields |= {name: getattr(recipe.noise, name) for name in ("eta", "s_noise", "s_churn")}
    if recipe.sigmas:
        fields |= {"sigmas": recipe.sigmas, "schedule": None}
    if recipe.low_noise is not None:
        fields["low_noise"] = {name: getattr(recipe.low_noise, name) for name in ("cfg", "boundary")}
    if (upscale := recipe.upscale) is not None:
        tiles = {name: value for name in ("tile", "overlap") if (value := getattr(upscale, name))}
        fields["upscale"] = {"model": upscale.model, "scale": upscale.scale, **tiles}
    if recipe.options:
        fields["options"] = recipe.options
    if recipe.pictures is not None:
        fields |= _image_fields(recipe.pictures, find)
    strengths = _strengths(recipe)
    found = tuple(
        GenerateRequest(**{name: value for name, value in {**fields, **more}.items() if value is not None})
        for schedule in ({}, {"schedule": None})
        for more in ({**schedule, **strength} for strength in strengths)
    )
    return tuple(request.without_steps() for request in found) if _is_unsampled(recipe) else found


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


def _is_unsampled(recipe: Recipe) -> bool:
    """Whether no step of the schedule was run."""
    return recipe.pictures is not None and recipe.pictures.first_step >= recipe.steps


def _strengths(recipe: Recipe) -> tuple[dict[str, float], ...]:
    """Return the denoising strengths that may lead to the first step of a recipe: families round differently."""
    pictures = recipe.pictures
    if pictures is None or not pictures.image_sha256:
        return ({},)
    if _is_unsampled(recipe):
        return ({},)
    if pictures.first_step == 0:
        return ({}, {"strength": 1.0})
    left = recipe.steps - pictures.first_step
    return tuple({"strength": (left + change) / recipe.steps} for change in (0.0, _ROUNDING, -_ROUNDING))


def _image_fields(pictures: RecipeImages, find: Callable[[str], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "paste": pictures.paste,
        "hires": {name: value for name, value in pictures.hires.items() if name != "upscaler_sha256"} or None,
        "reference_as": pictures.reference_as or None,
        "image_cfg": pictures.image_cfg or None,
        "noise_level": pictures.noise_level or None,
    }
    for name in ("image", "mask", "last_image", "video", "video_mask", "face_video"):
        if getattr(pictures, f"{name}_sha256"):
            fields[name] = _found(name, getattr(pictures, f"{name}_file"), find)
    if pictures.reference_sha256:
        files = (pictures.reference_file, *pictures.more_reference_files)
        fields["reference"] = [_found("reference", file, find) for file in files]
    if pictures.controls:
        fields["controls"] = tuple(_control(control, pictures, find) for control in pictures.controls)
    if pictures.image_prompts:
        fields["image_prompts"] = tuple(_image_prompt(prompt, find) for prompt in pictures.image_prompts)
    if pictures.regions:
        fields["regions"] = tuple(_region(region) for region in pictures.regions)
    return fields


def _control(control: RecipeControl, pictures: RecipeImages, find: Callable[[str], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": control.name, "strength": control.strength}
    fields |= {"start": control.start, "end": control.end, "mode": control.mode}
    if control.image_sha256 != pictures.image_sha256:
        fields["image"] = _found("controls.image", control.image_file, find)
    if control.mask_sha256 and control.mask_sha256 != pictures.mask_sha256:
        raise InputMissing("controls.mask: recipes do not name the file of a mask")
    return fields


def _image_prompt(prompt: RecipeImagePrompt, find: Callable[[str], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": prompt.name, "encoder": prompt.encoder, "strength": prompt.strength}
    fields |= {"start": prompt.start, "end": prompt.end, "blocks": dict(prompt.blocks)}
    if prompt.image_files:
        fields["image"] = [_found("image_prompts.image", file, find) for file in prompt.image_files]
    if prompt.faces_sha256:
        fields["faces"] = _found("image_prompts.faces", prompt.faces_file, find)
    if prompt.mask_files:
        fields["mask"] = [_found("image_prompts.mask", file, find) for file in prompt.mask_files]
    return fields


def _region(region: RecipeRegion) -> dict[str, Any]:
    if region.box is None:
        raise InputMissing("regions.mask: recipes do not name the file of a mask")
    return {"prompt": region.prompt, "strength": region.strength, "box": region.box}


def _found(field: str, file: str, find: Callable[[str], str]) -> str:
    if not file:
        raise InputMissing(f"{field}: it came from the memory of a program, expected a file")
    return find(file)
