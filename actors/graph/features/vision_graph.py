"""Builds the vision inputs and the conditioning numbers of a run, and selects the texts that it reads.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.sampling_runs import SamplingRun, StageTask, start_image_task
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section, same_fields
from modelpool.actors.request.control_video_fields import TaskVideo
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.sampling.model_choices import resolve_guidance
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.sampling_facts import FirstFrameMode, SamplingFacts, SeenAs, VideoNumbers
from modelpool.pool.values.core.stage_params import (
    EncodeImageParams,
    FirstFrames,
    ModelRef,
    SampleParams,
    SeenImages,
    VideoBeginning,
    ViewCondition,
)
from modelpool.pool.values.core.task_inputs import LAST_IMAGE, VIDEO
from modelpool.pool.values.specs.spec import TaskId
from modelpool.pool.values.specs.wire_value import evolve

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: how warnings begin about a negative prompt without guidance. Programs that send one text for all models expect none
UNGUIDED = "negative: ignored without guidance"
#: conditioning numbers of requests, and the kinds of models that accept them
_NUMBERS: dict[str, frozenset[VideoNumbers]] = {
    "motion": frozenset({VideoNumbers.MOTION}),
    "image_noise": frozenset(VideoNumbers),
    "elevation": frozenset({VideoNumbers.VIEWS}),
}
_MEANINGS = {
    "motion": "accepts no amount of motion",
    "image_noise": "adds no noise to the first frame",
    "elevation": "accepts no camera elevation",
    "azimuth": "shows no object from another view",
    "camera_distance": "shows no object from another view",
    "image_elevation": "shows no object from another view",
}
#: fields of a view
_VIEW = ("azimuth", "elevation", "camera_distance", "image_elevation")
#: names of models that read the elevation of the image's camera, in place of the distance: not names of a folder such
#: as `stable-diffusion`; and its usual value. Source: stabilityai/stable-zero123
_READS_ELEVATION, _LEVEL_CAMERA = re.compile(r"stable[^a-z]*zero", re.IGNORECASE), 0.0


@dataclass(frozen=True, slots=True)
class VideoConditioning:
    """Conditioning numbers of a video, as in `SampleParams`; all 0 if the model accepts none."""

    image_noise: float = 0.0
    motion: int = 0
    elevation: float = 0.0


def check_video_numbers(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a conditioning number that models of `facts` do not accept."""
    known = None if facts.video is None else facts.video.numbers
    for name, meaning in _MEANINGS.items():
        value, is_view = getattr(request, name), facts.takes_view and name in _VIEW
        if value is not None and not is_view and known not in _NUMBERS.get(name, ()):
            raise unsupported_field(name, request.model, meaning, value)


def view_condition(request: GenerateRequest, model: str) -> ViewCondition:
    """Return the view from which `model` shows the object of the image. Raises UnusableField for a distance that it
    does not read."""
    image_elevation = request.image_elevation
    if image_elevation is None and _READS_ELEVATION.search(model):
        image_elevation = _LEVEL_CAMERA
    if request.camera_distance is not None and image_elevation is not None:
        expected = "no value together with image_elevation, which Stable Zero123 reads in its place"
        raise unusable_field("camera_distance", request.camera_distance, expected)
    return ViewCondition(
        request.azimuth or 0.0, request.elevation or 0.0, request.camera_distance or 0.0, image_elevation
    )


def video_conditioning(request: GenerateRequest, facts: SamplingFacts) -> VideoConditioning:
    """Return the conditioning numbers of a run: the request's, else the model's defaults."""
    if facts.video is None or facts.video.numbers is None:
        return VideoConditioning()
    defaults, numbers = facts.defaults, facts.video.numbers
    assert defaults is not None, "a model with conditioning numbers has defaults"
    motion = defaults.motion if request.motion is None else request.motion
    return VideoConditioning(
        image_noise=defaults.image_noise if request.image_noise is None else request.image_noise,
        motion=motion if numbers in _NUMBERS["motion"] else 0,
        elevation=request.elevation or 0.0 if numbers in _NUMBERS["elevation"] else 0.0,
    )


def unread_text_warnings(run: SamplingRun, positive: str, negative: str, reads_negative: bool) -> Iterator[str]:
    """Yield warnings about texts that are set but not read; `reads_negative`: the run reads the negative prompt."""
    model, reads_text = run.model.name, run.facts.reads_text
    if positive and not reads_text:
        yield f"prompt: ignored, model {model!r} reads no prompt"
    guides_itself = run.facts.learned_negative or run.facts.has_unconditional
    if run.cfg != 1 and negative and not (reads_negative and reads_text and not guides_itself):
        yield f"negative: ignored, model {model!r} reads no negative prompt with these settings"


def with_unguided_warning(graph: JobGraph, model: ModelRef, facts: SamplingFacts, negative: str) -> JobGraph:
    """Return `graph` with a warning about a negative prompt that no run of it reads since none is guided. Blanks and
    the usual one of the model are no text of a user, and other warnings may have said so."""
    usual = "" if facts.defaults is None else facts.defaults.negative
    guided = [work.reads_negative for work in graph.works.values() if isinstance(work, SampleParams)]
    is_own = bool(negative.strip()) and negative != usual
    if not is_own or not guided or any(guided) or any(map(_is_of_negative, graph.warnings)):
        return graph
    may_be_guided = facts.reads_text and not (facts.learned_negative or facts.has_unconditional)
    if may_be_guided and resolve_guidance(facts.defaults, 2.0)[0] != 1:
        warning = f"{UNGUIDED}: cfg is 1; with any other it is read"
    else:
        warning = f"{UNGUIDED}: model {model.name!r} reads no negative prompt"
    return evolve(graph, warnings=(*graph.warnings, warning))


def _is_of_negative(warning: str) -> bool:
    return warning.startswith("negative: ignored")


def image_context_lengths(facts: SamplingFacts, reads_negative: bool) -> tuple[int, ...] | None:
    """Return the context lengths of a model that reads only images: one embedding, and zeros of the same length if
    the run `reads_negative`. None for models that read texts."""
    return None if facts.reads_text else (1,) * (2 if reads_negative else 1)


def reads_own_images(request: GenerateRequest, model: str, facts: SamplingFacts) -> bool:
    """Return whether image prompts of `request` are images that `model` of `facts` reads by itself, next to a text."""
    if facts.seen_as is None:
        return False
    return any(prompt.model in (request.model, model) for prompt in request.image_prompts)


def seen_images(request: GenerateRequest, model: str, facts: SamplingFacts) -> tuple[SeenImages, ...]:
    """Return how `model` of `facts` reads the images that it varies, or that it reads next to a text; nothing for one
    that it varies as it is. Raises UnusableField for an image prompt that is none of the model itself, or with more
    than it reads."""
    is_optional = facts.seen_as is not None
    strengths, noises = ([1.0], [0.0]) if request.image is not None and not is_optional else ([], [])
    for prompt in request.image_prompts:
        if prompt.model not in (request.model, model):
            expected = f"{request.model!r}: this model reads images by itself"
            raise unusable_field("image_prompts.model", prompt.model, expected)
        others = prompt.faces or prompt.masks or prompt.blocks or (prompt.start, prompt.end) != (0, 1)
        if others or (prompt.encoder and not is_optional):
            raise unusable_field("image_prompts", prompt.model, "image, strength and noise alone for this model")
        strengths += [prompt.strength] * len(prompt.images)
        noises += [prompt.noise] * len(prompt.images)
    if is_optional:
        _check_optional(request, noises, facts)
    elif (strengths, noises) == ([1.0], [0.0]):
        return ()
    return (SeenImages(tuple(strengths), tuple(noises)),)


def _check_optional(request: GenerateRequest, noises: Sequence[float], facts: SamplingFacts) -> None:
    """Raise UnusableField for images that a model reads next to a text in another way than here."""
    if len({prompt.encoder for prompt in request.image_prompts}) > 1:
        found = ", ".join(sorted({repr(prompt.encoder) for prompt in request.image_prompts}))
        raise unusable_field("image_prompts.encoder", found, "one vision encoder for all images")
    if facts.seen_as is SeenAs.STATES and any(noises):
        raise unusable_field("image_prompts.noise", max(noises), "0: this model reads embeddings without noise")
    if request.regions:
        expected = "none together with images that the model reads by itself"
        raise UnusableField(f"regions: found {counted(len(request.regions), 'region')}, expected {expected}")


def varied_images(request: GenerateRequest, facts: SamplingFacts) -> tuple[TaskId, ...]:
    """Return the images that a model of `facts` varies, or reads next to a text: as many as `seen_images` has numbers
    for."""
    is_start = request.image is None or facts.seen_as is not None
    first = () if is_start else (input_image_id(request.image),)
    return (*first, *(input_image_id(image) for prompt in request.image_prompts for image in prompt.images))


def vision_images(request: GenerateRequest) -> tuple[TaskId, ...]:
    """Return the input images that a vision encoder reads, each once: the first and the last frame, or the character to
    animate. That they are set was checked before."""
    images = (request.image, *(() if request.last_image is None else (request.last_image,)))
    if request.image is None:
        images = request.references[:1]
    return tuple(dict.fromkeys(input_image_id(each) for each in images))


def first_frame_task(run: SamplingRun, begins: FirstFrameMode | None, frames: int, noise: float) -> StageTask:
    """Return the encoding of the image that `run` starts from: of a video of `frames`, or with `noise`, for models that
    read the first frame as latent channels."""
    request, task = run.request, start_image_task(run)
    assert isinstance(task.work, EncodeImageParams), "the start image is encoded"
    match begins:
        case FirstFrameMode.CONCATENATED:
            ends = {} if request.last_image is None else {LAST_IMAGE: input_image_id(request.last_image)}
            return StageTask(replace(task.work, video=VideoBeginning(frames, ends=bool(ends))), {**task.needs, **ends})
        case FirstFrameMode.REPEATED:
            return StageTask(replace(task.work, noise=noise, seed=run.seed if noise else 0), task.needs)
        case _:
            return task


def first_frames_task(run: SamplingRun, begins: FirstFrameMode | None, frames: int, first: TaskVideo) -> StageTask:
    """Return the encoding of the frames that `run`, of a video of `frames`, begins with. Raises UnusableField for a
    model that reads one image."""
    task = start_image_task(run)
    assert isinstance(task.work, EncodeImageParams), "the start image is encoded"
    count, video = min(first.frames, frames), run.facts.video
    needs = {VIDEO: TaskId(first.task)}
    match begins:
        case FirstFrameMode.CONCATENATED:
            last = run.request.last_image
            needs |= {} if last is None else {LAST_IMAGE: input_image_id(last)}
            beginning = VideoBeginning(frames, count, last is not None)
            return StageTask(replace(task.work, video=beginning), needs)
        case FirstFrameMode.MARKED_CELL:
            assert video is not None, "a model of videos"
            cell = video.frames_per_cell
            return StageTask(replace(task.work, video=FirstFrames(1 + (count - 1) // cell * cell)), needs)
    raise unusable_field("image", counted(first.frames, "frame"), f"one image for model {run.model.name!r}")


@dataclass(frozen=True, slots=True)
class RecipeView:
    """The camera of a novel view of an object. The names are the fields of a request."""

    azimuth: float = 0.0
    elevation: float = 0.0
    camera_distance: float = 0.0
    image_elevation: float | None = None


def _recorded_view(source: RecipeSource) -> dict[str, Any]:
    views = source.sample.all_of(ViewCondition)
    found = (RecipeView(each.azimuth, each.elevation, each.distance, each.image_elevation) for each in views)
    return {"view": next(found, None)}


def _restored_view(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    if (view := recipe.view) is None:
        return {}
    last = "camera_distance" if view.image_elevation is None else "image_elevation"
    return {name: getattr(view, name) for name in ("azimuth", "elevation", last)}


def _view_lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.view is not None and not recipe.seconds:
        numbers = ((name.replace("_", " "), getattr(recipe.view, name)) for name in _VIEW)
        yield "view", ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)


def _recorded_numbers(source: RecipeSource) -> dict[str, Any]:
    image = source.sample.image_numbers
    return {name: getattr(image, name) for name in _NUMBERS}


def _restored_numbers(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    names = [name for name in _NUMBERS if name != "elevation" or recipe.view is None]
    return same_fields(recipe, *names)


def _number_lines(recipe: Recipe) -> Iterator[Line]:
    for name in _NUMBERS if recipe.is_video else ():
        if value := getattr(recipe, name):
            yield name.replace("_", " "), f"{value:g}"


VIEW = Feature(recipe=Section(_recorded_view, _restored_view, _view_lines))
VIDEO_NUMBERS = Feature(check_video_numbers, recipe=Section(_recorded_numbers, _restored_numbers, _number_lines))
