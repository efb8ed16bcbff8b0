"""Builds the image prompts of a run: their adapters, and the encodings of the images that they read.

Pure functions of values and a catalog. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.graph_catalog import ImagePromptCatalog
from modelpool.actors.graph.common.input_ids import input_faces_id, input_image_id
from modelpool.actors.graph.common.sampling_runs import StageTask
from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    Line,
    RecipeSource,
    Section,
    find_input,
    image_line,
    span_text,
    without_unused_parts,
)
from modelpool.actors.graph.features.recorded import FILE_NAME, INFORMATIVE, LATER
from modelpool.actors.request.face_fields import InputFaces
from modelpool.actors.request.field_errors import missing_field
from modelpool.actors.request.image_prompt_fields import ImagePrompt
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.stage_params import FoundImagePrompt, ImagePromptRef, SampleParams, VisionEncodeParams
from modelpool.pool.values.core.task_inputs import (
    IMAGE,
    IMAGE_PROMPT,
    IMAGE_PROMPT_BLANK,
    IMAGE_PROMPT_FACE,
    IMAGE_PROMPT_MASK,
    numbered,
)
from modelpool.pool.values.specs.spec import TaskId

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages


def image_prompt_refs(request: GenerateRequest, catalog: ImagePromptCatalog) -> tuple[ImagePromptRef, ...]:
    """Return the image prompts of `request`. Raises UserError, as the catalog does, and UnusableField for images or
    faces that are missing or that the adapter does not read."""
    return tuple(_ref(each, _found(each, catalog)) for each in request.image_prompts)


def image_prompt_inputs(
    request: GenerateRequest, catalog: ImagePromptCatalog
) -> Iterator[tuple[str, TaskId | StageTask]]:
    """Yield name and value of the inputs of each image prompt of `request`: the states of its images, of no image, its
    faces, and its masks."""
    for number, prompt in enumerate(request.image_prompts):
        found = _found(prompt, catalog)
        if found.encoder is not None:
            ids = [input_image_id(image) for image in prompt.images]
            encode = VisionEncodeParams(found.encoder, len(ids), use=found.use)
            needs = {numbered(IMAGE, place): image for place, image in enumerate(ids)}
            yield numbered(IMAGE_PROMPT, number), StageTask(encode, needs)
            if found.ref.blank:
                blank = VisionEncodeParams(found.encoder, use=found.use, blank=True)
                yield numbered(IMAGE_PROMPT_BLANK, number), StageTask(blank, {})
        if found.ref.face_version:
            yield numbered(IMAGE_PROMPT_FACE, number), input_faces_id(prompt.faces)
        for place, mask in enumerate(prompt.masks):
            yield numbered(numbered(IMAGE_PROMPT_MASK, number), place), input_image_id(mask, is_mask=True)


def appended_tokens(refs: Sequence[ImagePromptRef]) -> int:
    """Return the number of tokens that `refs` append to the prompt."""
    return sum(ref.appended for ref in refs)


def _found(prompt: ImagePrompt, catalog: ImagePromptCatalog) -> FoundImagePrompt:
    return catalog.find(prompt.model, len(prompt.images), prompt.encoder)


def _ref(prompt: ImagePrompt, found: FoundImagePrompt) -> ImagePromptRef:
    ref = found.ref
    if found.encoder is not None and not prompt.images:
        raise missing_field("image_prompts.image", f"adapter {ref.name!r} reads images")
    if found.encoder is None and prompt.images:
        raise UnusableField(f"image_prompts.image: not supported by adapter {ref.name!r}, which reads faces only")
    if ref.face_version and prompt.faces is None:
        raise missing_field("image_prompts.faces", f"adapter {ref.name!r} reads the embeddings of faces")
    if prompt.faces is not None and not ref.face_version:
        raise UnusableField(f"image_prompts.faces: not supported by adapter {ref.name!r}, which reads no faces")
    if isinstance(prompt.faces, InputFaces):
        if prompt.faces.width != found.face_width:
            expected = f"{found.face_width} numbers for each face, as adapter {ref.name!r} reads"
            raise unusable_field("image_prompts.faces", counted(prompt.faces.width, "number"), expected)
        if len(prompt.images) > 1 and len(prompt.images) != prompt.faces.count:
            expected = f"{counted(len(prompt.images), 'face')}, one for each image, or one image"
            raise unusable_field("image_prompts.faces", counted(prompt.faces.count, "face"), expected)
    if ref.appended and (prompt.start, prompt.end) != (0.0, 1.0):
        expected = f"0 to 1: adapter {ref.name!r} appends to the prompt, which is the same in all steps"
        raise unusable_field("image_prompts.start, image_prompts.end", f"{prompt.start:g} to {prompt.end:g}", expected)
    if ref.appended and prompt.blocks:
        raise UnusableField(f"image_prompts.blocks: not supported by adapter {ref.name!r}, which appends to the prompt")
    if ref.appended and prompt.masks:
        raise UnusableField(f"image_prompts.mask: not supported by adapter {ref.name!r}, which appends to the prompt")
    return replace(
        ref,
        strength=prompt.strength,
        start=prompt.start,
        end=prompt.end,
        blocks=prompt.blocks,
        masks=len(prompt.masks),
        by_noise=prompt.shares_of == "noise" and (prompt.start, prompt.end) != (0, 1),
    )


@dataclass(frozen=True, slots=True)
class RecipeImagePrompt:
    """An image prompt as it was applied: the adapter, the vision encoder that read its images, and the images. `faces`
    are embeddings; their hash is empty if there are none."""

    name: str = field(metadata=FILE_NAME)
    sha256: str
    encoder: str = field(metadata=FILE_NAME)
    encoder_sha256: str
    strength: float
    start: float
    end: float
    image_sha256: tuple[str, ...] = ()
    image_files: tuple[str, ...] = field(default=(), metadata=INFORMATIVE)
    faces_sha256: str = ""
    faces_file: str = field(default="", metadata=INFORMATIVE)
    blocks: tuple[tuple[str, float], ...] = ()
    mask_sha256: tuple[str, ...] = field(default=(), metadata=LATER)
    mask_files: tuple[str, ...] = field(default=(), metadata={**LATER, **INFORMATIVE})
    noise: float = field(default=0.0, metadata=LATER)
    by_noise: bool = field(default=False, metadata=LATER)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    """Return the image prompts of the first sampling run, with the encoders and the files of their images."""
    request, graph = source.request, source.graph
    if not request.image_prompts:
        return {}
    found = []
    if not source.sample.image_prompts:  # the model reads the images itself
        return {"image_prompts": tuple(_recorded_own(each, source) for each in request.image_prompts)}
    task = next(task for task in graph.job.tasks if isinstance(graph.works[task.task_id], SampleParams))
    needs = dict(zip(task.input_names, task.needs, strict=True))
    for number, (prompt, ref) in enumerate(zip(request.image_prompts, source.sample.image_prompts, strict=True)):
        encode = graph.works.get(needs.get(numbered(IMAGE_PROMPT, number), task.task_id))
        encoder = encode.model if isinstance(encode, VisionEncodeParams) else None
        images: Sequence[Any] = prompt.images
        masks: Sequence[Any] = prompt.masks
        found.append(
            RecipeImagePrompt(
                *(ref.name, ref.sha256),
                *(("", "") if encoder is None else (encoder.name, encoder.sha256)),
                *(ref.strength, ref.start, ref.end),
                image_sha256=tuple(image.sha256 for image in images),
                image_files=tuple(image.file for image in images),
                faces_sha256="" if prompt.faces is None else prompt.faces.sha256,
                faces_file="" if prompt.faces is None else prompt.faces.file,
                blocks=ref.blocks,
                mask_sha256=tuple(mask.sha256 for mask in masks),
                mask_files=tuple(mask.file for mask in masks),
                by_noise=ref.by_noise,
            )
        )
    return {"image_prompts": tuple(found)}


def _recorded_own(prompt: ImagePrompt, source: RecipeSource) -> RecipeImagePrompt:
    """Record images that a model reads by itself, with its vision encoder or with one in another file."""
    images: Sequence[Any] = prompt.images
    model = source.sample.model
    encodes = (work for work in source.graph.works.values() if isinstance(work, VisionEncodeParams) and work.use)
    encoder = next((work.model for work in encodes if work.model.sha256 != model.sha256), None)
    return RecipeImagePrompt(
        *(model.name, model.sha256),
        *(("", "") if encoder is None else (encoder.name, encoder.sha256)),
        *(prompt.strength, 0.0, 1.0),
        image_sha256=tuple(image.sha256 for image in images),
        image_files=tuple(image.file for image in images),
        noise=prompt.noise,
    )


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    prompts = tuple(_restored_prompt(prompt, find) for prompt in images.image_prompts)
    return {"image_prompts": prompts} if prompts else {}


def _restored_prompt(prompt: RecipeImagePrompt, find: FindFile) -> dict[str, Any]:
    found: dict[str, Any] = {"model": prompt.name, "encoder": prompt.encoder, "strength": prompt.strength}
    found |= {"start": prompt.start, "end": prompt.end, "blocks": dict(prompt.blocks)}
    found |= {"noise": prompt.noise} if prompt.noise else {}
    found |= {"shares_of": "noise"} if prompt.by_noise else {}
    if prompt.image_files:
        found["image"] = [find_input("image_prompts.image", file, find) for file in prompt.image_files]
    if prompt.faces_sha256:
        found["faces"] = find_input("image_prompts.faces", prompt.faces_file, find)
    if prompt.mask_files:
        found["mask"] = [find_input("image_prompts.mask", file, find) for file in prompt.mask_files]
    return found


def _lines(images: RecipeImages) -> Iterator[Line]:
    for prompt in images.image_prompts:
        parts = [f"strength {prompt.strength:g}", *([f"noise {prompt.noise:g}"] if prompt.noise else [])]
        if span := span_text(prompt.start, prompt.end, "the noise" if prompt.by_noise else "the steps"):
            parts.append(span)
        parts += [f"{name} {factor:g}" for name, factor in prompt.blocks]
        parts += [f"encoder {prompt.encoder}"] if prompt.encoder else []
        inputs = [*_image_texts(prompt.image_files, prompt.image_sha256)]
        if prompt.faces_sha256:
            inputs.append(f"faces {prompt.faces_file or 'from memory'} (sha256 {prompt.faces_sha256})")
        inputs += [f"mask {each}" for each in _image_texts(prompt.mask_files, prompt.mask_sha256)]
        text = f"{', '.join(parts)}; {', '.join(inputs)}  (sha256 {prompt.sha256})"
        yield f"image prompt {prompt.name}", text


def _image_texts(files: Sequence[str], hashes: Sequence[str]) -> Iterator[str]:
    """Yield the text of each image; a recipe of another program may name fewer files."""
    for number, sha256 in enumerate(hashes):
        yield image_line(files[number] if number < len(files) else "", sha256)


IMAGE_PROMPTS = Feature(
    defaults=partial(without_unused_parts, "image_prompts"), images=Section(_recorded, _restored, _lines)
)
