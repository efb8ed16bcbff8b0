"""The images interface of OpenAI: /v1/images/generations, /v1/images/edits and /v1/models."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field, field_validator

from modelpool.actors.http.service.answers import json_answer
from modelpool.actors.http.service.bodies import FormBody, form_body, json_object
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.caller_names import check_names
from modelpool.actors.http.service.encoded_images import BEST_QUALITY, FORMATS, format_of, image_size, image_text
from modelpool.actors.http.service.event_stream import EVENT_STREAM, event, with_pings
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Services, caller_of
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, warnings_of
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.image_decoding import UprightImage
from modelpool.actors.request.other_names import unknown_field
from modelpool.actors.request.requests import SPELLINGS, GenerateRequest
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import UserError, counted, missing_value, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

INTERFACE = "openai"
#: most images of one call
MAX_IMAGES = 10
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
#: fields of the API that a diffusion model has no use for
_IGNORED = ("quality", "style", "moderation", "safety_identifier", "input_fidelity", "user", "complexity")
#: another name of `n`
_COUNT = "num_images_per_prompt"
#: fields of a form that have files
_FILE_FIELDS = ("image", "image[]", "mask", "mask[]")
#: opacity of a pixel that is not transparent
_OPAQUE = 255
#: no token is counted
_USAGE = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}, "output_tokens": 0}


class ImagesCall(Strict):
    """The fields of the API that are used. Every other field must be one of a request, such as `steps` or `negative`
    (`extra_body` of the official client), or one of those that are ignored.
    """

    prompt: str
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    size: str | None = None
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = BEST_QUALITY
    background: Literal["auto", "opaque"] = "auto"
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0

    @field_validator("size")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value not in (None, "", "auto") and not _SIZE.fullmatch(value or ""):
            raise unusable_field("size", value, 'WIDTHxHEIGHT, such as 1024x1024, or "auto"')
        return value

    @property
    def sides(self) -> dict[str, int]:
        """Width and height as fields of a request; {} for the model's."""
        match = _SIZE.fullmatch(self.size or "")
        return {"width": int(match[1]), "height": int(match[2])} if match else {}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call, and the fields of a request that it has besides."""

    call: ImagesCall
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: warnings about its images, which are decoded later
    notes: list[str] = field(default_factory=list)

    def file_format(self, path: Path) -> str:
        """Return the format of an image in the answer, of which the pool has the file `path`: `output_format`, or the
        one that the field `format` of a request asks for."""
        return self.call.output_format if "output_format" in self.call.model_fields_set else format_of(path)

    def encoding(self, path: Path) -> tuple[str, int]:
        """Return the format and the quality in which the file is encoded for the answer; ("", 0): it is sent as it
        is."""
        wanted = self.file_format(path)
        is_chosen = "output_compression" in self.call.model_fields_set and wanted != "png"
        if wanted == format_of(path) and not (is_chosen and wanted in FORMATS):
            return "", 0
        return wanted, self.call.output_compression

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ParsedCall:
        """Parse a body. Raises UserError."""
        own = {name: value for name, value in body.items() if name in ImagesCall.model_fields and value is not None}
        others = {name: value for name, value in body.items() if name not in ImagesCall.model_fields}
        count = others.pop(_COUNT, None)
        if count is not None:
            if "n" in own:
                raise unusable_field(_COUNT, count, "it or n, which is the same field, not both")
            own["n"] = count
        known = {*REQUEST_FIELDS, *SPELLINGS} - set(_IGNORED)
        # a null does not replace the width of a size
        fields = {name: value for name, value in others.items() if name in known and value is not None}
        unknown = [name for name in others if name not in known and name not in _IGNORED]
        if unknown:
            raise unknown_field(
                "field of the images API or of a request", unknown[0], {*ImagesCall.model_fields, *known}
            )
        return cls(ImagesCall(**own), fields)

    def requests(self, model: str, images: Mapping[str, Any], listed: Set[str]) -> list[GenerateRequest]:
        """Return a request for each image, with seeds that count up. Raises UserError: for paths as names, too."""
        fields: dict[str, Any] = {"model": model, "prompt": self.call.prompt, **self.call.sides, **self.fields}
        first = fields.pop("seed", None)
        seed = secrets.randbits(32) if first is None else first
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise unusable_field("seed", seed, "a whole number")
        numbered = range(seed, seed + self.call.n)
        return [check_names(GenerateRequest(**fields, **images, seed=each), listed) for each in numbered]


def openai_router(services: Services) -> APIRouter:
    """Return the routes below /v1."""
    router = APIRouter(tags=["openai"])
    max_bytes = services.settings.upload_bound_bytes

    @router.get("/v1/models", summary="List the models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_json(each.name) for each in (await services.listings()).models]}

    @router.get("/v1/models/{name:path}", summary="Show a model")
    async def model(name: str) -> dict[str, Any]:
        if name not in {each.name for each in (await services.listings()).models}:
            raise HttpProblem(404, f"model {name!r} does not exist")
        return _model_json(name)

    @router.post("/v1/images/generations", summary="Generate images")
    async def generations(request: Request) -> Response:
        parsed = ParsedCall.of(await json_object(request, max_bytes))
        model_name, listed = await services.model_or_default(parsed.call.model), await services.listed_names()

        def build() -> Sequence[GenerateRequest]:
            fields = services.images_of_call(caller_of(request)).in_fields(parsed.fields)
            return ParsedCall(parsed.call, fields).requests(model_name, {}, listed)

        return await _answer(services, request, parsed, build, "image_generation")

    @router.post("/v1/images/edits", summary="Change images")
    async def edits(request: Request) -> Response:
        form = await form_body(request, max_bytes)
        parsed = ParsedCall.of(_values_of(form))
        model_name, listed = await services.model_or_default(parsed.call.model), await services.listed_names()

        def build() -> Sequence[GenerateRequest]:
            images = services.images_of_call(caller_of(request))
            call = ParsedCall(parsed.call, images.in_fields(parsed.fields), parsed.notes)
            return _edit_requests(services, call, model_name, form, listed, images)

        return await _answer(services, request, parsed, build, "image_edit")

    return router


def _values_of(form: FormBody) -> dict[str, Any]:
    """Return the texts of a form as the values that JSON would have: numbers and truth values are texts in a form."""
    values: dict[str, Any] = dict(form.texts)
    for name in form.files:
        if name not in _FILE_FIELDS:
            raise HttpProblem(400, f"{name}: unknown file; expected image, image[] or mask")
    for name in (*_FILE_FIELDS, "reference"):
        if name in values:
            raise HttpProblem(400, f"{name}: found a text, expected a file in image, image[] or mask")
    if "stream" in values:
        if values["stream"] not in ("true", "false"):
            raise HttpProblem(400, f"stream: found {values['stream']!r}, expected true or false")
        values["stream"] = values["stream"] == "true"
    if "seed" in values:
        if not values["seed"].isdecimal() or len(values["seed"]) > 20:
            raise HttpProblem(400, f"seed: found {values['seed'][:40]!r}, expected a whole number")
        values["seed"] = int(values["seed"])
    return values


def _edit_requests(
    services: Services, parsed: ParsedCall, model: str, form: FormBody, listed: Set[str], decoder: CallerImages
) -> Sequence[GenerateRequest]:
    """Return requests that change the images of a form. With a mask or a strength, they start from the only one.
    Without, a model that accepts reference images (Flux Kontext, Qwen-Image-Edit) reads them as these, and every other
    one starts from the only one. Raises UserError.
    """
    files = [*form.files.get("image", ()), *form.files.get("image[]", ())]
    if not files:
        raise missing_value("image", "at least one image file")
    decoded = [decoder.of_bytes("image", content) for _, content in files]
    images = [image.on_white() for image in decoded]
    masks = [*form.files.get("mask", ()), *form.files.get("mask[]", ())]
    if len(masks) > 1:
        raise unusable_field("mask", counted(len(masks), "mask"), "one mask")
    if masks:
        if len(images) > 1:
            found = f"{counted(len(images), 'image')} with a mask"
            raise unusable_field("image", found, "one image, which the mask belongs to")
        mask = _mask_of(decoder.of_bytes("mask", masks[0][1]))
        return parsed.requests(model, {"image": images[0], "mask": mask}, listed)
    if any(image.alpha is not None and any(image.alpha.histogram()[:_OPAQUE]) for image in decoded):
        areas = "transparent areas are read as white, and all of the image may change"
        parsed.notes.append(f"image: {areas}: areas to edit are transparent in mask")
    if parsed.fields.get("strength") is not None:  # only a start image has one
        if len(images) > 1:
            raise unusable_field("image", f"{counted(len(images), 'image')} with strength", "one image, to start from")
        return parsed.requests(model, {"image": images[0]}, listed)
    as_references = parsed.requests(model, {"reference": images if len(images) > 1 else images[0]}, listed)
    refused = services.pool.recipes([as_references[0]])[0]
    if not isinstance(refused, UserError):
        return as_references
    if len(images) > 1:
        raise refused
    return parsed.requests(model, {"image": images[0]}, listed)


def _mask_of(image: UprightImage) -> Image:
    """Return a mask that is white where `image` is transparent: that is what the API edits."""
    from PIL import ImageOps

    if image.alpha is None:
        raise unusable_field("mask", "an image without an alpha channel", "an image with transparent areas")
    return ImageOps.invert(image.alpha)


async def _answer(
    services: Services,
    request: Request,
    parsed: ParsedCall,
    build: Callable[[], Sequence[GenerateRequest]],
    kind: str,
) -> Response:
    """Generate, and answer at once with a stream of events, or at the end with all images."""
    call = parsed.call
    submission = await services.submit(caller_of(request), build, INTERFACE, call.n)
    if call.stream:
        return StreamingResponse(with_pings(_events(submission, parsed, kind)), media_type=EVENT_STREAM)
    await services.wait(request, submission)
    ends = sorted(submission.ends, key=lambda end: end.index)
    for end in ends:
        _check_succeeded(end)
    wanted = call.response_format or services.settings.openai_response_format
    data: list[dict[str, str]] = [{} for _ in ends]
    if wanted in ("url", "both"):
        base = str(request.base_url).rstrip("/")
        for image, end in zip(data, ends, strict=True):
            assert end.path is not None, "only images that succeeded have an address"
            image["url"] = base + services.signed_path(end, *parsed.encoding(end.path))
    if wanted in ("b64_json", "both"):
        texts = await asyncio.gather(*(asyncio.to_thread(_text_of, end, parsed) for end in ends))
        for image, text in zip(data, texts, strict=True):
            image["b64_json"] = text
    about = _about(parsed, await asyncio.to_thread(_size_of, ends[0]), ends)
    return await json_answer({"created": int(submission.created_at), "data": data, **about})


async def _events(submission: HttpSubmission, parsed: ParsedCall, kind: str) -> AsyncIterator[bytes]:
    """Yield what `_events_of` does, with previews made meanwhile if partial images are wanted."""
    with submission.previews_wanted() if parsed.call.partial_images else contextlib.nullcontext():
        async for text in _events_of(submission, parsed, kind):
            yield text


async def _events_of(submission: HttpSubmission, parsed: ParsedCall, kind: str) -> AsyncIterator[bytes]:
    """Yield one event for each image, as it is ready, or one error; before, up to as many partial images of each as are
    wanted: previews, which are small. They are spread over the steps, and a fast image has fewer."""
    cancel = True
    partials = _PartialImages(parsed.call)
    try:
        async for change in submission.changes():
            for preview in partials.due(submission.previews.values()):
                yield await partials.event(preview, kind)
            for end in change.ends:
                try:
                    _check_succeeded(end)
                    text = await asyncio.to_thread(_text_of, end, parsed)
                except HttpProblem as problem:
                    yield _error_event(shown_message(str(problem)))
                    return
                size = await asyncio.to_thread(_size_of, end)
                about = {**_about(parsed, size, [end]), "quality": "auto", "background": "opaque"}
                content = {"type": f"{kind}.completed", "b64_json": text, "created_at": int(time.time()), **about}
                yield event(f"{kind}.completed", content)
        cancel = False
        if submission.lost:
            yield _error_event(submission.lost)
    finally:
        if cancel:  # the client has gone, or gets nothing more
            await submission.cancel()


class _PartialImages:
    """The partial images of one call that were sent."""

    def __init__(self, call: ImagesCall) -> None:
        self._call = call
        #: of each image, how many
        self._sent: Counter[int] = Counter()

    def due(self, previews: Iterable[ImagePreview]) -> list[ImagePreview]:
        """Return the newest previews to send: the first of each image, and the next when their share of the steps is
        done."""
        count = self._call.partial_images
        found = [
            preview
            for preview in previews
            if self._sent[preview.index] < count and preview.step * count >= self._sent[preview.index] * preview.steps
        ]
        self._sent.update(preview.index for preview in found)
        return found

    async def event(self, preview: ImagePreview, kind: str) -> bytes:
        """Return the event of a preview, which is the next of its image."""
        content = await asyncio.to_thread(preview.as_format, self._call.output_format)
        about = {
            "b64_json": base64.b64encode(content).decode(),
            "partial_image_index": self._sent[preview.index] - 1,
            "created_at": int(time.time()),
            "size": self._call.size or "auto",
            "quality": "auto",
            "background": "opaque",
            "output_format": self._call.output_format,
        }
        return event(f"{kind}.partial_image", {"type": f"{kind}.partial_image", **about})


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return event("error", {"type": "error", "error": error})


def _check_succeeded(end: JobEnd) -> None:
    if end.path is None:
        status = 400 if end.kind == "bad_input" else 500
        raise HttpProblem(status, f"an image was not generated: {end.kind}: {end.message}")


def _text_of(end: JobEnd, parsed: ParsedCall) -> str:
    assert end.path is not None, "only images that succeeded are encoded"
    return image_text(end.path, *parsed.encoding(end.path))


def _size_of(end: JobEnd) -> str:
    """Return the size of an image as WIDTHxHEIGHT. Raises HttpProblem (410) if it is gone, and (409) if it is no image:
    other than what was asked for if that follows the model, a start image or an upscaler."""
    assert end.path is not None, "only images that succeeded have a size"
    return "x".join(map(str, image_size(end.path)))


def _about(parsed: ParsedCall, size: str, ends: Sequence[JobEnd]) -> dict[str, Any]:
    """Return what an answer says about its images, with the warnings about the call and of the pool."""
    warnings = [*parsed.notes, *warnings_of(ends)]
    paths = [end.path for end in ends if end.path is not None]
    named = parsed.file_format(paths[0]) if paths else parsed.call.output_format
    about = {"output_format": named, "size": size, "usage": {**_USAGE, "total_tokens": 0}}
    return {**about, "warnings": warnings} if warnings else about


def _model_json(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "modelpool"}
