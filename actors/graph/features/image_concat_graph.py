"""Builds the image input of models that read an image as additional channels (instruct-pix2pix, upscaling): checks,
options and sizes.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.sampling_runs import SamplingRun
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section, same_fields
from modelpool.actors.request.field_errors import missing_field, unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.image_fields import InputImage, TaskImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import Guidance, ImageConcat, ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ModelRef

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages

#: pixels of the images of models with a text encoder that reads the reference. Source: the pipelines of diffusers
#: for Qwen-Image's editing models
EDIT_PIXELS = 1024**2


@dataclass(frozen=True, slots=True)
class ImageConcatInput:
    """Settings with which a run reads the image of an image-concat model.

    is_shown     the model reads one, and no noise is added to it: no step of the schedule is skipped
    is_pixels    it reads pixels, not a latent
    image_cfg, noise_level, enlarges  as in `SampleParams` and `SamplingFacts`
    """

    is_shown: bool = False
    is_pixels: bool = False
    image_cfg: float = 0.0
    noise_level: int = 0
    enlarges: int = 1


def check_image_concat(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for image fields that models of `facts` do not support."""
    if request.image_cfg is not None and not _is_guided_by_image(facts):
        reason = "is not guided by text and image"
        raise unsupported_field("image_cfg", request.model, reason, request.image_cfg)
    if request.noise_level is not None and facts.image_concat is not ImageConcat.PIXELS:
        reason = "is not an upscaling model that adds noise to its image"
        raise unsupported_field("noise_level", request.model, reason, request.noise_level)
    if facts.image_labels is not None:
        for name in ("mask", "strength"):
            if getattr(request, name) is not None:
                raise unsupported_field(name, request.model, "makes a new image that resembles the given one")
    if facts.image_concat is None or facts.image_concat.is_inpaint:
        return
    others = {"mask": request.mask, "strength": request.strength, "hires": request.hires}
    if facts.image_concat in (ImageConcat.PIXELS, ImageConcat.INSTEAD) or facts.takes_view:
        others["controls"] = request.controls or None
    if facts.image_concat is ImageConcat.INSTEAD and request.prompt.strip():
        expected = f"an empty text: model {request.model!r} reads an image alone"
        raise unusable_field("prompt", request.prompt, expected)
    if facts.takes_view:
        others |= {"regions": request.regions or None, "image_prompts": request.image_prompts or None}
    for name, value in others.items():
        if value is not None:
            raise unsupported_field(name, request.model, "reads the complete image unchanged")


def image_concat_input(run: SamplingRun) -> ImageConcatInput:
    """Return how `run` reads its image. Raises UnusableField if the model requires one and it is missing."""
    request, model, facts = run.request, run.model.name, run.facts
    if facts.image_concat is None or facts.image_concat.is_inpaint:
        return ImageConcatInput()
    if request.image is None or request.mask is not None:
        raise missing_field("image", f"model {model!r} edits or enlarges an image")
    if max(request.width or 0, request.height or 0) * facts.enlarges > MAX_SIDE:
        largest = MAX_SIDE // facts.enlarges
        expected = f"up to {largest} pixels on a side, as model {model!r} enlarges it {facts.enlarges} times"
        raise unusable_field("image", f"an image of {request.width}x{request.height} pixels", expected)
    defaults = facts.defaults
    return ImageConcatInput(
        is_shown=True,
        is_pixels=facts.image_concat.is_pixels,
        image_cfg=_or_usual(request.image_cfg, 0.0 if defaults is None else defaults.image_cfg),
        noise_level=int(_or_usual(request.noise_level, 0 if defaults is None else defaults.noise_level)),
        enlarges=facts.enlarges,
    )


def image_size(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, float]:
    """Return the sizes that `request` leaves out, from its input image, in multiples of the model's step; the image is
    scaled to cover them where it is read. Models that read the image as channels or as first frame run all steps."""
    facts = defaults.sampling
    if request.image is None:
        return {}
    if facts.image_labels is not None:  # the vision encoder reads it at a size of its own
        return {"strength": 1.0}
    step = facts.side_multiple or SIZE_STEP
    sizes = {"width": request.image.width, "height": request.image.height}
    found: dict[str, float] = {
        name: max(step, side // step * step) for name, side in sizes.items() if getattr(request, name) is None
    }
    if facts.video is not None or (facts.image_concat is not None and not facts.image_concat.is_inpaint):
        found["strength"] = 1.0
    return found


def size_like_reference(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, int]:
    """Return the sizes that `request` leaves out, in the proportions of its last reference, with about as many pixels
    as the model's default size. Layers cover it. Videos keep their default size, into which references are fitted."""
    if (
        not request.references
        or (defaults.sampling.video is not None and not defaults.sampling.makes_layers)
        or (request.width is not None and request.height is not None)
    ):
        return {}
    reference = request.references[-1]
    assert isinstance(reference, InputImage | TaskImage), f"the client brings images to the pool, found {reference!r}"
    found, step = (reference.width, reference.height), defaults.sampling.side_multiple or SIZE_STEP
    if request.height is not None:
        return {"width": _stepped(request.height * found[0] / found[1], step)}
    if request.width is not None:
        return {"height": _stepped(request.width * found[1] / found[0], step)}
    most = defaults.width * defaults.height if defaults.sampling.reference_mode is None else EDIT_PIXELS
    width, height = reference_size(found, min(defaults.width * defaults.height, most), step)
    return {"width": width, "height": height}


def reference_size(found: tuple[int, int], pixels: int, step: int) -> tuple[int, int]:
    """Return the width and height at which a reference image of size `found` is read: its proportions, multiples of
    `step`, and about `pixels` pixels."""
    scale = math.sqrt(pixels / (found[0] * found[1]))
    return _stepped(found[0] * scale, step), _stepped(found[1] * scale, step)


def _stepped(pixels: float, step: int) -> int:
    return min(max(step, round(pixels / step) * step), MAX_SIDE // step * step)


def _or_usual(value: float | None, defaults: float) -> float:
    return defaults if value is None else value


def _is_guided_by_image(facts: SamplingFacts) -> bool:
    if facts.blank_reference:
        return True
    return facts.defaults is not None and facts.defaults.guidance is Guidance.TEXT_AND_IMAGE


def _recorded(source: RecipeSource) -> dict[str, Any]:
    sample = source.sample
    return {"image_cfg": sample.guidance.image_cfg, "noise_level": sample.image_numbers.noise_level}


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    return same_fields(images, "image_cfg", "noise_level")


def _lines(images: RecipeImages) -> Iterator[Line]:
    if images.image_cfg:
        yield "image guidance", f"{images.image_cfg:g}"
    if images.noise_level:
        yield "noise level", str(images.noise_level)


IMAGE_CONCAT = Feature(check_image_concat, image_size, images=Section(_recorded, _restored, _lines))
