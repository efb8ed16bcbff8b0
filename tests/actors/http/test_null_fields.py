"""null (None) means that a field is not set: in every field of every interface, of job rows and in Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.a1111.a1111_extras import ExtrasCall, parse_extras
from modelpool.actors.http.a1111.a1111_requests import ControlUnit, ImageCall, Options, parse_call, requests_of
from modelpool.actors.http.application import application
from modelpool.actors.http.openai.openai_api import ImagesCall, ParsedCall
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.decoder_fields import Decoder
from modelpool.actors.request.field_table import OPTION_FIELDS, REQUEST_FIELDS
from modelpool.actors.request.image_fields import Hires, Region
from modelpool.actors.request.image_prompt_fields import ImagePrompt
from modelpool.actors.request.job_files.columns import NO_CHOICE
from modelpool.actors.request.lora_fields import LoraChoice
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import OTHER_FIELDS, GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import RUN_OPTIONS, limits_of
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH

NEEDED = {"model": "shapes", "prompt": "x"}
FACES = [[1.0, 2.0]]
#: parts of a request with what they need, and the field that has them
PARTS: tuple[tuple[str, type[BaseModel], dict[str, Any]], ...] = (
    ("loras", LoraChoice, {"name": "light"}),
    ("controls", Control, {"model": "canny"}),
    ("image_prompts", ImagePrompt, {"model": "plus", "faces": FACES}),
    ("regions", Region, {"prompt": "y", "box": [0, 0, 8, 8]}),
    ("hires", Hires, {}),
    ("upscale", Upscale, {"model": "4x"}),
    ("decoder", Decoder, {}),
    ("low_noise", LowNoiseRun, {}),
)


def request_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A name, fields with a null, and the same fields without it."""
    for name in (*REQUEST_FIELDS, *OTHER_FIELDS):
        if name not in NEEDED:
            yield name, {**NEEDED, name: None}, NEEDED
    for field, model, needed in PARTS:
        listed = field in ("loras", "controls", "image_prompts", "regions")
        # a control needs an image, which no test here reads
        image = {"image": "aGk="} if field == "controls" else {}
        for name in model.model_fields:
            if name not in needed:
                null, plain = ({**needed, name: None}, needed)
                yield (
                    f"{field}.{name}",
                    {**NEEDED, **image, field: [null] if listed else null},
                    {**NEEDED, **image, field: [plain] if listed else plain},
                )
    for name in OPTION_FIELDS:
        yield f"options {name}", {**NEEDED, "options": {name: None}}, {**NEEDED, "options": {}}
    for name, option in RUN_OPTIONS.items():
        yield f"options {name}", {**NEEDED, "options": {name: None}}, {**NEEDED, "options": {}}
        for setting in limits_of(option):
            null, plain = {"options": {name: {setting: None}}}, {"options": {name: {}}}
            yield f"options {name}.{setting}", {**NEEDED, **null}, {**NEEDED, **plain}


def outcome(fields: Mapping[str, Any]) -> Any:
    """The request, with the fields that are set; or the message of its refusal."""
    try:
        request = GenerateRequest(**fields)
    except UserError as problem:
        return str(problem)
    return request, request.model_fields_set - {"options"}


def test_every_field_of_a_request_and_its_parts_may_be_null(tmp_path: Path) -> None:
    """In Python, and in rows of job files, with paths of images."""
    from PIL import Image

    path = tmp_path / "start.png"
    Image.new("RGB", (64, 64)).save(path)
    wrong = []
    for name, null, plain in request_cases():
        null, plain = ({**each, "image": str(path)} if each.get("image") else each for each in (null, plain))
        for found, expected in ((null, plain), (NO_CHOICE.row(null), plain)):
            if outcome(found) != outcome(expected) or "found None" in str(outcome(found)):
                wrong.append((name, outcome(found), outcome(expected)))
    assert not wrong, wrong[:5]
    assert GenerateRequest(**NEEDED, loras=[("light", None)]).loras[0].strength == 1.0
    assert GenerateRequest(**NEEDED, loras={"light": None}).loras[0].strength == 1.0
    for name in NEEDED:
        with pytest.raises(UserError, match=f"{name}: missing"):
            GenerateRequest(**{**NEEDED, name: None})
    with pytest.raises(UserError, match="unknown field"):
        GenerateRequest(**NEEDED, nonsense=None)


class Recording(RefusingPool):
    """Keeps the requests that reach it."""

    def __init__(self) -> None:
        self.seen: list[GenerateRequest] = []

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        self.seen += requests
        return super().submit(())


def seen(path: str, bodies: Iterable[Any], folder: Path) -> list[Any]:
    """What the pool receives of each body, without seeds; the answer for one that never reaches it."""

    async def all_calls() -> list[Any]:
        pool = Recording()
        app, found = application(pool, ServeSection(), folder), []
        for body in bodies:
            pool.seen.clear()
            answer = await call(app, "POST", path, json.dumps(body).encode())
            seeds = [request.model_copy(update={"seed": None}) for request in pool.seen]
            found.append(seeds or answer.json)
        return found

    return asyncio.run(all_calls())


def test_every_field_over_the_native_and_the_openai_interface_may_be_null(tmp_path: Path) -> None:
    native = [(name, null, plain) for name, null, plain in request_cases() if "image" not in null]
    openai = [
        *native,
        *((name, {**NEEDED, name: None}, NEEDED) for name in ImagesCall.model_fields if name not in NEEDED),
        ("model", {"prompt": "x", "model": None}, {"prompt": "x"}),
        ("user", {**NEEDED, "user": None}, NEEDED),
    ]
    jobs = {"requests": [NEEDED]}
    native += [(name, {**jobs, name: None}, jobs) for name in ("webhook", "detached")]
    native += [("requests", {**NEEDED, "requests": None}, NEEDED)]
    for path, cases in (("/api/jobs", native), ("/v1/images/generations", openai)):
        found = seen(path, (body for _, null, plain in cases for body in (null, plain)), tmp_path)
        differing = [cases[place // 2][0] for place in range(0, len(found), 2) if found[place] != found[place + 1]]
        assert not differing, path
    assert ParsedCall.of({**NEEDED, "n": None}).call.n == 1


def test_every_field_of_the_a1111_interface_may_be_null(tmp_path: Path) -> None:
    def made(body: Mapping[str, Any]) -> list[GenerateRequest]:
        return requests_of(parse_call({"seed": 1, **body}, False), "shapes", 1, CallerImages((), 1))

    wrong = [name for name in ImageCall.model_fields if name != "seed" and made({name: None}) != made({})]
    unit = {"model": "canny", "enabled": False}
    scripts: list[Any] = [None, {"args": None}, {"args": [None]}]
    scripts += [{"args": [{**unit, name: None}]} for name in ControlUnit.model_fields if name != "enabled"]
    wrong += [str(script) for script in scripts if made({"alwayson_scripts": {"ControlNet": script}}) != made({})]
    wrong += [name for name in ExtrasCall.model_fields if parse_extras({name: None}) != ExtrasCall()]
    for name in ("sd_model_checkpoint", "CLIP_stop_at_last_layers"):
        wrong += [] if Options("a", 2).changed({name: None}) == Options("a", 2) else [name]
    assert not wrong
    bodies = [{"seed": 1, "override_settings": {"sd_model_checkpoint": None}}, {"seed": 1}]
    null, plain = seen("/sdapi/v1/txt2img", bodies, tmp_path)
    assert null == plain


def test_every_field_of_the_comfyui_interface_may_be_null(tmp_path: Path) -> None:
    """Inputs of nodes are tested in test_comfy_inputs."""
    body = {"prompt": GRAPH}
    names = ("client_id", "prompt_id", "extra_data", "number", "front", "partial_execution_targets")
    bodies = [body, *({**body, name: None} for name in names), {**body, "extra_data": {"preview_method": None}}]
    found = seen("/prompt", bodies, tmp_path)
    assert all(each == found[0] for each in found)

    async def statuses() -> list[int]:
        app = application(RefusingPool(), ServeSection(), tmp_path)
        calls: list[tuple[str, Any]] = [
            ("/queue", {"clear": None, "delete": ["x"]}),
            ("/queue", {"clear": True, "delete": None}),
            ("/history", {"clear": None, "delete": ["x"]}),
            ("/interrupt", {"prompt_id": None}),
            ("/free", {"unload_models": None, "free_memory": None}),
            ("/settings", {"Comfy.Theme": None}),
        ]
        return [(await call(app, "POST", path, json.dumps(body).encode())).status for path, body in calls]

    assert asyncio.run(statuses()) == [200] * 6
