"""Builds the reference images of a run: the sizes at which they are read, and how a text encoder with vision reads
them.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.sampling_runs import SamplingRun, StageTask
from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    Line,
    RecipeSource,
    Section,
    find_input,
    image_line,
)
from modelpool.actors.graph.features.image_concat_graph import EDIT_PIXELS, reference_size, size_like_reference
from modelpool.actors.request.field_errors import missing_field, unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_fields import InputImage, TaskImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import takes_control_video
from modelpool.pool.families.option_support import supported_options
from modelpool.pool.families.parts.text_reading import IMAGE_NAME, image_names
from modelpool.pool.families.parts.written_image import MOST_RATIO, reference_sides
from modelpool.pool.families.transformer_families import TEXT_VISION
from modelpool.pool.models.components.text.vision_prompt import MOST_PROPORTION
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.run_options import NO_OPTIONS
from modelpool.pool.values.core.sampling_facts import ModelDefaults, ReferenceMode, SamplingFacts
from modelpool.pool.values.core.stage_params import EncodeImageParams, ModelRef, VisionEncodeParams
from modelpool.pool.values.core.task_inputs import IMAGE, numbered

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages

#: most pixels at which a text encoder reads numbered images, and the multiple of the sides of the images that it reads.
#: Source: the pipelines of diffusers for Qwen-Image's editing models
NUMBERED_PIXELS, EDIT_STEP = 384**2, 32
#: names of models that were trained for the option `kv_cache`, such as flux-2-klein-9b-kv
_CACHED_NAMES = r"(?i)klein.*[-_. ]kv(?![a-z0-9])"
#: options that guidance by a blank reference image excludes
_NOT_BY_REFERENCE = ("cfg_override", "cfg_zero", "perp_neg")


@dataclass(frozen=True, slots=True)
class ReferenceInputs:
    """The reference images of a run, in order, and how it reads them.

    encodes   their encoding to latents
    sizes     width and height of the latents' images
    embeds    their encoding by the vision encoder, for the text encoder; none if it reads none
    seen      sizes at which the text encoder reads them
    numbered  the prompt template numbers them
    """

    encodes: tuple[StageTask, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    embeds: tuple[StageTask, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    numbered: bool = False


NO_REFERENCES = ReferenceInputs()


def text_with_images(text: str, count: int, field: str = "prompt") -> str:
    """Return `text`, in which each of `count` reference images has a name, such as <img><|image_1|></img>; a text
    without names gets them in front. Raises UnusableField for a text that names only some of them, or others."""
    named = {int(number) for number in IMAGE_NAME.findall(text)}
    if not named and count:
        return f"{image_names(count)} {text}".strip()
    if named != set(range(1, count + 1)):
        found = ", ".join(f"<|image_{number}|>" for number in sorted(named))
        wanted = f"{image_names(count)}: the names of all reference images" if count else "no name of an image"
        raise unusable_field(field, found, f"{wanted}, as the request has {count}")
    return text


def reference_cfg(request: GenerateRequest, facts: SamplingFacts) -> float:
    """Return the guidance scale of the reference images; 0 for a run that is not guided by them."""
    if not (facts.guides_by_references and request.references):
        return 0.0
    usual = 0.0 if facts.defaults is None else facts.defaults.image_cfg
    return usual if request.image_cfg is None else request.image_cfg


def check_references(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for reference images, or options of them, that models of `facts` do not support."""
    count = len(request.references)
    if count and not facts.takes_reference:
        raise unsupported_field("reference", request.model, _why_none(facts))
    if not count and facts.needs_reference:
        raise missing_field("reference", f"model {request.model!r} splits an image into layers")
    if len({each.sha256 for each in request.references if isinstance(each, InputImage | TaskImage)}) < count:
        raise unusable_field("reference", "the same image twice", "different images")
    accepts_several = facts.several_references or (facts.reference_mode is not None and not facts.reference_covers)
    if count > 1 and not accepts_several:
        raise unusable_field("reference", counted(count, "image"), f"one: model {request.model!r} accepts only one")
    if facts.guides_by_references and request.image_cfg is not None and not count:
        raise UnusableField("image_cfg requires reference")
    if count and facts.blank_reference:
        _check_blank_reference(request, facts)
    if request.reference_as is None:
        return
    if not count or facts.reference_mode is None:
        if not count:
            raise UnusableField("reference_as requires reference")
        reason = "has no text encoder that reads reference images"
        raise unsupported_field("reference_as", request.model, reason, request.reference_as)
    reads_whole = facts.reference_covers or facts.writes_tokens
    if reads_whole and request.reference_as == ReferenceMode.NUMBERED.value:
        reason = "reads a whole image" if facts.reference_covers else "reads whole images"
        raise unsupported_field("reference_as", request.model, reason, request.reference_as)
    if count > 1 and request.reference_as == ReferenceMode.WHOLE.value and not reads_whole:
        expected = f"{ReferenceMode.NUMBERED.value!r} for several images"
        raise unusable_field("reference_as", request.reference_as, expected)


def _check_blank_reference(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what does not go with a reference image of the size of the output, or with guidance by
    it: options that change guidance in steps, or read an empty text, would act on a part of it alone."""
    if request.hires is not None:
        raise UnusableField("hires: found a second pass next to reference, which has the size of the first one")
    options = request.options or NO_OPTIONS
    changing = [name for name in _NOT_BY_REFERENCE if getattr(options, name) is not None]
    if changing and reference_cfg(request, facts) not in (0.0, 1.0):
        raise UnusableField(f"options.{changing[0]}: found it next to image_cfg, expected one of them")


def _why_none(facts: SamplingFacts) -> str:
    """Return why models of `facts` accept no reference."""
    if facts.why_no_vision:
        part = "has a text encoder whose vision part (tensors visual.*) is not that of "
        part += TEXT_VISION[facts.model].part.value
        return f"{part}, which editing requires: {facts.why_no_vision}"
    if facts.model in TEXT_VISION:
        return "has a text encoder without the vision part (tensors visual.*), which editing requires"
    if facts.image_concat is not None:
        return "reads the image that it edits from the field image"
    return "reads no reference images"


def reference_mode(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, str]:
    """Return `reference_as` if `request` leaves it out: "numbered" for several images, else as the model was trained,
    as far as the model or its file name tells. Nothing if its text encoder reads no images."""
    facts = defaults.sampling
    if not request.references or facts.reference_mode is None or request.reference_as is not None:
        return {}
    mode = facts.reference_mode
    if mode is ReferenceMode.BY_NAME:
        numbered = TEXT_VISION[facts.model].numbered_names
        mode = ReferenceMode.NUMBERED if _is_called(numbered, request, model) else ReferenceMode.WHOLE
    if len(request.references) > 1 and not facts.writes_tokens:
        mode = ReferenceMode.NUMBERED
    return {"reference_as": mode.value}


def edit_model_warnings(request: GenerateRequest, facts: SamplingFacts, model: ModelRef) -> Iterator[str]:
    """Yield the warning for a request that uses `image` with an editing model of this family, which reads
    `reference`; editing models of other families read `image`. And for one without the option that its model is named
    after."""
    caches = "kv_cache" in supported_options(facts) and (request.options is None or request.options.kv_cache is None)
    if request.references and caches and _is_called(_CACHED_NAMES, request, model):
        yield (
            f"model {request.model!r} is named like one that reads reference images apart; pass options.kv_cache if it "
            "was trained so"
        )
    vision = TEXT_VISION.get(facts.model)
    if request.image is None or request.references or vision is None or not vision.edit_names:
        return
    if _is_called(vision.edit_names, request, model):
        yield (
            f"model {request.model!r} starts from image but does not read it as a reference; pass the image that an "
            "editing model works from as reference"
        )


def _is_called(names: str, request: GenerateRequest, model: ModelRef) -> bool:
    """Whether the pattern `names`, if there is one, matches the name of a model, in the request, in the catalog, or of
    its file."""
    assembly = model.assembly
    file = "" if assembly is None else PurePath(assembly.diffusion_model or assembly.checkpoint).name
    return names != "" and any(re.search(names, name) for name in (request.model, model.name, file))


def _own_size(size: tuple[int, int], most: int, pixels: int, step: int) -> tuple[int, int]:
    """Return the width and height at which an image of this size is read that is not enlarged: multiples of `step`, up
    to `most`, with at most `pixels` pixels; 0: any number."""
    scale = min(1.0, most / max(size), math.sqrt((pixels or math.inf) / math.prod(size)))
    width, height = (max(step, round(side * scale) // step * step) for side in size)
    return width, height


def read_references(run: SamplingRun, size: tuple[int, int]) -> ReferenceInputs:
    """Return how `run` reads its reference images for an output of `size`, before it is scaled up: each in its own
    proportions, with about as many pixels. Raises UnusableField for an image that is too long or too wide for the
    vision encoder. Nothing for a model that puts them before a control video (`control_video_graph`); one image for
    each text if the text encoder reads the first frame."""
    facts, request = run.facts, run.request
    if facts.vision_use is not None and not facts.vision_use.is_model_input:
        return ReferenceInputs(seen=((0, 0),))
    if not request.references or takes_control_video(facts):
        return NO_REFERENCES
    step, pixels = facts.side_multiple or SIZE_STEP, math.prod(size)
    images = [each for each in request.references if isinstance(each, InputImage | TaskImage)]
    own_sizes = [(each.width, each.height) for each in images]
    if facts.reference_covers:
        own_sizes = [size] * len(images)
    if facts.reference_mode is not None:
        step, pixels = max(step, EDIT_STEP), min(pixels, EDIT_PIXELS)
    sizes = tuple(reference_size(size, pixels, step) for size in own_sizes)
    if facts.reference_side:
        most, few = facts.reference_side, facts.reference_pixels
        sizes = tuple(_own_size(size, most, few, step) for size in own_sizes)
    if facts.writes_tokens:
        sizes = tuple(reference_sides(*size) for size in own_sizes)
    most = MOST_RATIO if facts.writes_tokens else MOST_PROPORTION
    numbers = request.reference_as == ReferenceMode.NUMBERED.value
    seen = sizes if request.reference_as else ()
    if numbers:
        seen = tuple(reference_size(size, min(pixels, NUMBERED_PIXELS), step) for size in own_sizes)
    for found, size in zip(own_sizes, seen, strict=False):
        if max(size) > most * min(size) or (facts.writes_tokens and max(found) > most * min(found)):
            which = f"an image of {found[0]}x{found[1]} pixels, read at {size[0]}x{size[1]}"
            expected = f"a ratio of its sides of at most {most}"
            raise unusable_field("reference", which, expected)
    ids = [input_image_id(each) for each in images]
    return ReferenceInputs(
        tuple(
            StageTask(EncodeImageParams(run.model, *size), {IMAGE: image})
            for image, size in zip(ids, sizes, strict=True)
        ),
        sizes,
        tuple(
            StageTask(VisionEncodeParams(run.model, 1, *size), {numbered(IMAGE, 0): image})
            for image, size in zip(ids, seen, strict=False)
        ),
        seen,
        numbers,
    )


def _recorded(source: RecipeSource) -> dict[str, Any]:
    references: Sequence[Any] = source.request.references
    found: dict[str, Any] = {"reference_as": source.request.reference_as or ""}
    if references:
        found |= {"reference_sha256": references[0].sha256, "reference_file": references[0].file}
        found["more_references"] = tuple(each.sha256 for each in references[1:])
        found["more_reference_files"] = tuple(each.file for each in references[1:])
    return found


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    found: dict[str, Any] = {"reference_as": images.reference_as or None}
    if images.reference_sha256:
        files = (images.reference_file, *images.more_reference_files)
        found["reference"] = [find_input("reference", file, find) for file in files]
    return found


def _lines(images: RecipeImages) -> Iterator[Line]:
    if images.reference_sha256:
        note = f", read {images.reference_as}" if images.reference_as else ""
        yield "reference", image_line(images.reference_file, images.reference_sha256, note)
    files = images.more_reference_files
    for place, sha256 in enumerate(images.more_references):
        yield "reference", image_line(files[place] if place < len(files) else "", sha256)


REFERENCES = Feature(check_references, reference_mode, images=Section(_recorded, _restored, _lines))
#: the size of an output that follows its references
REFERENCE_SIZE = Feature(defaults=size_like_reference)
