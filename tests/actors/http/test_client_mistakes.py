"""What a new client gets wrong is answered in the form of its interface, and names what the client wrote."""

from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.a1111.a1111_requests import parse_call, requests_of
from modelpool.actors.http.application import application
from modelpool.actors.http.comfy.comfy_graph import check_nodes
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.openai.openai_api import ParsedCall, _edit_requests
from modelpool.actors.http.service.bodies import FormBody
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.services import Services
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH
from tests.actors.http.comfy.test_comfy_graph import exported


def answers(folder: Path, *calls: tuple[Any, ...]) -> list[Answer]:
    async def all_calls() -> list[Answer]:
        app = application(RefusingPool(), ServeSection(), folder)
        return [
            await call(app, method, path, b"" if body is None else json.dumps(body).encode(), query=query)
            for method, path, body, query in calls
        ]

    return asyncio.run(all_calls())


def message(answer: Answer) -> str:
    """The message of an error, wherever its interface has it."""
    error = answer.json["error"]
    return answer.json["detail"] if error == "Error" else error["message"]


def test_unknown_addresses_have_the_form_of_their_interface(tmp_path: Path) -> None:
    paths = ("/v1/images/variations", "/sdapi/v1/interrogate", "/controlnet/detect", "/api/nowhere", "/nowhere")
    found = answers(tmp_path, *(("POST", path, {}, "") for path in paths))
    assert [each.status for each in found] == [404] * 5
    assert [message(each) for each in found] == [f"{path} does not exist" for path in paths]
    (wrong,) = answers(tmp_path, ("GET", "/v1/images/generations", None, ""))
    assert (wrong.status, message(wrong)) == (405, "/v1/images/generations cannot be called with GET")
    assert wrong.headers["allow"] == "POST"


def test_wrong_parameters_are_named_in_the_form_of_their_interface(tmp_path: Path) -> None:
    limit, filename, after = answers(
        tmp_path,
        ("GET", "/api/jobs", None, "limit=x"),
        ("GET", "/view", None, ""),
        ("GET", "/history", None, "max_items=x"),
    )
    assert [each.status for each in (limit, filename, after)] == [400] * 3
    assert message(limit).startswith("limit: found 'x', expected a whole number")
    assert message(filename) == "filename: missing; this parameter is required"
    assert message(after) == "max_items: found 'x', expected a whole number"


def test_openai_errors_name_their_parameter(tmp_path: Path) -> None:
    path = "/v1/images/generations"
    size, field, model = answers(
        tmp_path,
        ("POST", path, {"prompt": "x", "size": "64"}, ""),
        ("POST", path, {"prompt": "x", "stpes": 3}, ""),
        ("POST", path, {"prompt": "x", "model": "dall-e-3"}, ""),
    )
    assert [each.json["error"]["param"] for each in (size, field, model)] == ["size", None, "model"]
    assert "did you mean 'steps'?" in message(field)
    body = {"prompt": "x", "negative_prompt": "y", "guidance_scale": 3, "num_inference_steps": 4}
    (request,) = ParsedCall.of(body).requests("shapes", {}, frozenset())
    assert (request.negative, request.cfg, request.steps) == ("y", 3.0, 4)


def test_a_null_side_leaves_the_size_and_a_mask_in_brackets_is_read() -> None:
    (request,) = ParsedCall.of({"prompt": "x", "size": "64x72", "width": None}).requests("shapes", {}, frozenset())
    assert (request.width, request.height) == (64, 72)
    content = BytesIO()
    Image.new("RGBA", (64, 64)).save(content, "PNG")
    services, images = cast(Services, None), CallerImages((), 1 << 20)
    for name in ("mask", "mask[]"):
        form = FormBody({}, {"image": (("a", content.getvalue()),), name: (("m", content.getvalue()),)})
        call = ParsedCall.of({"prompt": "x"})
        (made,) = _edit_requests(services, call, "shapes", form, frozenset(), images)
        assert made.mask is not None, name
    form = FormBody({}, {"image": (("a", content.getvalue()),), "mask": (("m", b"1"), ("o", b"2"))})
    with pytest.raises(UserError, match="mask: found '2 masks', expected one mask"):
        _edit_requests(services, call, "shapes", form, frozenset(), images)


def test_true_is_no_number_and_fields_of_parts_are_named_with_their_part() -> None:
    for fields, named in (
        ({"hires": {"steps": 5000}}, "hires.steps: found 5000"),
        ({"hires": {"steps": True}}, "hires.steps: found True, expected a number"),
        ({"upscale": {}}, "upscale.model: missing"),
        ({"loras": [{"name": "a", "strength": True}]}, "loras.0.strength: found True"),
        ({"regions": [{"box": [0, 0, 8, 8]}]}, "regions.0.prompt: missing"),
    ):
        with pytest.raises(UserError) as refused:
            GenerateRequest(**{"model": "shapes", "prompt": "x", **fields})
        assert str(refused.value).startswith(named), str(refused.value)
    for wrong in ("steps", "batch_size", "cfg_scale", "resize_mode"):
        with pytest.raises(UserError, match=f"{wrong}: found True"):
            parse_call({wrong: True}, False)
    assert parse_call({"inpainting_mask_invert": True, "enable_hr": 1}, False).inpainting_mask_invert
    with pytest.raises(UserError, match="n: found True"):
        ParsedCall.of({"prompt": "x", "n": True})
    with pytest.raises(WorkflowRejected, match=r"node 1 \(EmptyLatentImage\)"):
        check_nodes({"1": {"class_type": "EmptyLatentImage", "inputs": []}})


def test_a1111_crops_a_masked_image_as_resize_mode_says_and_reads_every_name_of_a_unit_s_mask() -> None:
    content = BytesIO()
    whole = np.zeros((64, 128, 3), np.uint8)
    whole[:, 32:96] = 255
    Image.fromarray(whole).save(content, "PNG")
    text = base64.b64encode(content.getvalue()).decode()
    body = {"init_images": [text], "mask": text, "mask_blur": 0, "width": 64, "height": 64}
    for mode, shares in ((0, 0.5), (1, 1.0)):
        (made,) = requests_of(parse_call({**body, "resize_mode": mode}, True), "shapes", 1, CallerImages((), 1 << 20))
        for pixels in (made.image.pixels, made.mask.pixels):
            assert abs(pixels.mean() / 255 - shares) < 0.02, mode
    for unit in ({"mask_image": text}, {"mask": text}, {"image": {"image": text, "mask": text}}):
        scripts = {"controlnet": {"args": [{"model": "canny", "image": text, **unit}]}}
        call = parse_call({"alwayson_scripts": scripts}, False)
        (made,) = requests_of(call, "shapes", 1, CallerImages((), 1 << 20))
        assert made.controls[0].mask is not None, unit
    scripts = {"controlnet": {"args": [{"model": "canny", "image": text, "guidance": 0.5}]}}
    (made,) = requests_of(parse_call({"alwayson_scripts": scripts}, False), "shapes", 1, CallerImages((), 1 << 20))
    assert made.controls[0].end == 0.5


def test_a1111_errors_name_the_fields_of_a1111() -> None:
    for body, named in (
        ({"cfg_scale": 0}, "cfg_scale: found 0"),
        ({"enable_hr": True, "hr_scale": 100}, "hr_scale: found 100"),
        ({"enable_hr": True, "denoising_strength": 7}, "denoising_strength: found 7"),
        ({"enable_hr": True, "hr_resize_x": 128, "hr_resize_y": 64}, "hr_resize_x, hr_resize_y: found '128x64'"),
    ):
        with pytest.raises(UserError) as refused:
            requests_of(parse_call({"width": 64, "height": 64, **body}, False), "shapes", 1, CallerImages((), 1))
        assert str(refused.value).startswith(named), str(refused.value)
    for sizes in ({"hr_resize_x": 96}, {"hr_resize_y": 96}, {"hr_resize_x": 96, "hr_resize_y": 96}):
        body = {"width": 64, "height": 64, "enable_hr": True, **sizes}
        made = requests_of(parse_call(body, False), "shapes", 1, CallerImages((), 1))[0]
        assert made.hires is not None
        assert made.hires.scale == 1.5


def test_a_list_of_requests_names_the_wrong_one(tmp_path: Path) -> None:
    fine = {"model": "shapes", "prompt": "x"}
    wrong = {**fine, "steps": -1}
    alone, second = answers(tmp_path, ("POST", "/api/jobs", wrong, ""), ("POST", "/api/jobs", [fine, wrong], ""))
    assert message(alone) == "steps: found -1, expected a whole number from 1 to 999"
    assert message(second) == f"requests[1]: {message(alone)}"


def test_workflows_in_another_form_are_refused_with_a_hint(tmp_path: Path) -> None:
    part, bare, editor = answers(
        tmp_path,
        ("POST", "/prompt", {"prompt": {"nodes": []}}, ""),
        ("POST", "/prompt", GRAPH, ""),
        ("POST", "/prompt", exported(GRAPH), ""),
    )
    assert "export it with File > Export (API)" in message(part)
    for each in (bare, editor):
        assert message(each) == 'prompt: missing; expected {"prompt": WORKFLOW}, found the workflow itself'


def test_comfyui_lists_models_by_folder(tmp_path: Path) -> None:
    folders, models, upscalers, unknown, native = answers(
        tmp_path,
        *(("GET", f"/models{folder}", None, "") for folder in ("", "/checkpoints", "/upscale_models", "/nowhere")),
        ("GET", "/api/choices", None, ""),
    )
    assert {"checkpoints", "loras", "controlnet"} <= set(folders.json)
    assert (models.json, upscalers.json) == (["shapes"], ["4x"])
    assert (unknown.status, "upscale_models" in message(unknown)) == (404, True)
    assert (native.json["controlnets"], native.json["upscalers"]) == (["canny", "sub/depth"], ["4x"])
