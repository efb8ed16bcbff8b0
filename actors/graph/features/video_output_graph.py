"""Builds the video fields of a run: checks, and the first frame of image-to-video.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.output_shape import format_of, kind_of, missing_extent, output_plural, quality_of
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section, same_fields
from modelpool.actors.request.field_errors import missing_field, unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import follows_video, takes_control_video
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import FirstFrameMode, LastFrameMode, ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ModelRef

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


def check_video_output(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for fields that models of `facts` do not support in a video or an audio clip."""
    quality_of(request.quality, format_of(request.format, request.model, facts))
    if (kind := kind_of(facts)) == "image":
        return
    image_only = {
        "mask": request.mask,
        "hires": request.hires,
        "controls": request.controls or None,
        "regions": request.regions or None,
        "strength": request.strength,
    }
    for name, value in image_only.items():
        if value is not None:
            raise unsupported_field(name, request.model, f"generates {output_plural(facts)}; the field is for images")
    if kind == "audio" and request.image is not None:
        raise unsupported_field("image", request.model, "generates audio clips")


def first_frame_mode(request: GenerateRequest, model: str, facts: SamplingFacts) -> FirstFrameMode | None:
    """Return how the model reads the first frame of `request`; None without a first frame, or for images. Raises
    UnusableField for an image that the model does not accept, and for a missing one that it requires."""
    if facts.video is None:
        if request.last_image is not None:
            raise unsupported_field("last_image", model, "generates no videos")
        return None
    begins, ends = facts.video.begins, facts.video.ends
    if request.last_image is not None and ends is None:
        raise unsupported_field("last_image", model, "accepts no last frame")
    if request.last_image is None and ends is LastFrameMode.MUST:
        raise missing_field("last_image", f"model {model!r} requires the last frame of the video")
    if request.last_image is not None and request.frames == 1:
        raise unusable_field("frames", 1, "at least 2 for a video with first and last frame")
    if request.image is None:
        if begins is not None and begins.is_required:
            raise missing_field("image", f"model {model!r} requires the first frame of the video")
        return None
    if begins is None:
        reason = "generates videos from text only"
        if facts.makes_layers:
            reason = "accepts the image that it splits into layers as reference"
        elif takes_control_video(facts):
            reason = "follows a video" if follows_video(facts) else "accepts images as reference or video"
        raise unsupported_field("image", model, reason)
    return begins


#: format of images with a recipe that names none
IMAGE_FORMAT = "png"
_EXTENT = ("width", "height", "frames", "frame_rate", "seconds")


def _recorded_extent(source: RecipeSource) -> dict[str, Any]:
    return {name: getattr(source.sample.shape, name) for name in _EXTENT}


def _restored_extent(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return same_fields(recipe, *_EXTENT)


def _size_lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.seconds:
        yield "length", f"{recipe.seconds:g} seconds"
    else:
        yield "size", f"{recipe.width}x{recipe.height}"


def _frame_lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.is_video:
        yield "frames", f"{recipe.frames}, {recipe.frame_rate:g} per second"
    elif recipe.is_layers and not recipe.seconds:
        yield "layers", str(recipe.frames)


def _recorded_file(source: RecipeSource) -> dict[str, Any]:
    name = source.request.format
    return {"format": "" if name in (None, IMAGE_FORMAT) else name, "quality": source.request.quality or 0}


def _restored_file(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return same_fields(recipe, "format", "quality")


def _file_lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.quality:
        yield "quality", str(recipe.quality)


def _extent_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, int]:
    return missing_extent(request, defaults)


def _file_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, Any]:
    file_format = format_of(request.format, request.model, defaults.sampling)
    return {"format": file_format, "quality": quality_of(request.quality, file_format)}


#: width and height, or length
SIZE = Feature(check_video_output, _extent_defaults, Section(_recorded_extent, _restored_extent, _size_lines))
#: frames or layers; a part of `SIZE` with a later line
FRAMES = Feature(recipe=Section(lines=_frame_lines))
FILE = Feature(defaults=_file_defaults, recipe=Section(_recorded_file, _restored_file, _file_lines))
