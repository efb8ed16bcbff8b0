"""A1111's extras and the lists of files: the client webuiapi against a real pool with an upscaler and a ControlNet."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
import webuiapi
from PIL import Image
from safetensors.torch import save_file

from modelpool import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.a1111.a1111_extras import (
    enlarging,
    finished,
    parse_extras,
    several_images,
    single_image,
    unread_extras,
)
from modelpool.actors.http.application import application
from modelpool.actors.outputs.results.outcomes import JobFailed
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.inference.upscalers.build_upscaler import plan_upscaler
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.conftest import CONFIG, served
from tests.actors.loop_connection import open_pool, open_real_pool
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    (made / "upscale_models").mkdir()
    save_file(tiny_state("compact_2x"), made / "upscale_models" / "RealESRGAN_x2plus.safetensors")
    save_file({key: value * 0.5 for key, value in tiny_state("compact_2x").items()}, made / "upscale_models" / "b.sft")
    for kind, name, tensors in (
        ("controlnet", "canny", {"input_hint_block.0.weight": torch.zeros(1)}),
        ("embeddings", "style", {"emb_params": torch.zeros(1, 8)}),
    ):
        (made / kind).mkdir()
        save_file(tensors, made / kind / f"{name}.safetensors")
    return made


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ModelPool]:
    with open_real_pool(PoolConfig.load(CONFIG).override(device="cpu", workers=1, models=[folder])) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(pool, tmp_path_factory.mktemp("outputs")) as found:
        yield found


@pytest.fixture
def client(address: str) -> webuiapi.WebUIApi:
    return webuiapi.WebUIApi(baseurl=f"{address}/sdapi/v1")


def picture(width: int = 10, height: int = 8) -> Image.Image:
    values = np.arange(width * height * 3).reshape(height, width, 3) * 37 % 256
    return Image.fromarray(values.astype(np.uint8))


def enlarged(image: Image.Image) -> np.ndarray:
    """What the network makes of an image, computed without the pool."""
    state = tiny_state("compact_2x")
    network = plan_upscaler({key: tuple(value.shape) for key, value in state.items()}).build(state)
    with torch.no_grad():
        floats = network(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255)[0]
    return floats.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def test_a_program_enlarges_an_image_without_generating_one(pool: ModelPool) -> None:
    made = pool.upscale(picture(), "RealESRGAN_x2plus", user="ann", priority=3).result(60)
    assert isinstance(made, ImagePixels)
    np.testing.assert_array_equal(made.pixels_HWC, enlarged(picture()))
    smaller = pool.upscale(np.array(picture()), {"model": "RealESRGAN_x2plus", "scale": 1.5}).result(60)
    assert smaller.pixels_HWC.shape == (12, 15, 3)
    for image, upscale, named in (
        (picture(), "nothing", "nothing"),
        (picture(), None, "upscale"),
        (None, "b", "image"),
        (picture(), "b:0.5", "scale"),
    ):
        with pytest.raises(UserError, match=named):
            pool.upscale(image, upscale)
    assert not pool._reader._listeners, "a result that has arrived is not followed any more"


def test_webuiapi_enlarges_one_image_and_several(client: webuiapi.WebUIApi) -> None:
    result = client.extra_single_image(picture(), upscaler_1="R-ESRGAN 2x+", upscaling_resize=2)
    np.testing.assert_array_equal(np.array(result.image), enlarged(picture()))
    several = client.extra_batch_images([picture(), picture(6, 4)], upscaler_1="R-ESRGAN 2x+", upscaling_resize=3)
    assert [image.size for image in several.images] == [(30, 24), (18, 12)]
    to_size = {"resize_mode": 1, "upscaling_resize_w": 16, "upscaling_resize_h": 16}
    cropped = client.extra_single_image(picture(), upscaler_1="R-ESRGAN 2x+", **to_size)
    assert cropped.image.size == (16, 16)
    whole = np.array(enlarged(picture()))[:, 2:18]
    np.testing.assert_array_equal(np.array(cropped.image), whole)
    blended = client.extra_single_image(
        picture(), upscaler_1="R-ESRGAN 2x+", upscaler_2="b", extras_upscaler_2_visibility=0.5
    )
    second = client.extra_single_image(picture(), upscaler_1="b")
    between = Image.blend(result.image, second.image, 0.5)
    np.testing.assert_array_equal(np.array(blended.image), np.array(between))
    assert np.array(blended.image).tobytes() != np.array(result.image).tobytes()
    plain = client.extra_single_image(picture(), upscaler_1="Nearest", upscaling_resize=2)
    np.testing.assert_array_equal(np.array(plain.image), np.array(picture()).repeat(2, 0).repeat(2, 1))
    same = client.extra_single_image(picture(), upscaling_resize=4)
    np.testing.assert_array_equal(np.array(same.image), np.array(picture()))


def test_lists_name_upscalers_controlnets_and_embeddings(client: webuiapi.WebUIApi, address: str) -> None:
    names = [each["name"] for each in client.get_upscalers()]
    assert names == ["None", "Lanczos", "Nearest", "RealESRGAN_x2plus", "b"]
    assert client.controlnet_model_list() == ["canny"]
    assert client.controlnet_module_list() == ["none"]
    assert client.controlnet_version() == 2
    kinds = requests.get(f"{address}/controlnet/control_types", timeout=60).json()["control_types"]
    assert kinds["All"]["model_list"] == ["None", "canny"]
    described = requests.get(f"{address}/object_info", timeout=60).json()

    def shown(node: str, name: str) -> Any:
        return described[node]["input"]["required"][name][0]

    assert shown("ControlNetLoader", "control_net_name") == ["canny"]
    assert shown("UpscaleModelLoader", "model_name") == ["RealESRGAN_x2plus", "b"]
    assert shown("StyleModelLoader", "style_model_name") == []
    assert requests.get(f"{address}/embeddings", timeout=60).json() == ["style"]


def encoded(image: Image.Image) -> str:
    content = BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def test_what_cannot_be_enlarged_is_refused_by_name(address: str) -> None:
    image = encoded(picture())
    one, several = "extra-single-image", "extra-batch-images"
    for path, body, named in (
        (one, {}, "image: missing"),
        (one, {"image": "/etc/passwd"}, "image"),
        (one, {"image": image, "upscaler_1": "nothing"}, "nothing"),
        (one, {"image": image, "upscaler_1": "../x.pth"}, "not a path"),
        (one, {"image": image, "upscaling_resize": 100}, "upscaling_resize"),
        (one, {"image": image, "upscaling_resize": "big"}, "upscaling_resize"),
        (one, {"image": image, "resize_mode": 2}, "resize_mode"),
        (one, {"image": image, "resize_mode": 1, "upscaling_resize_w": 16384, "upscaler_1": "b"}, "upscaling_resize"),
        (one, {"image": image, "gfpgan_visibility": 1}, "gfpgan_visibility"),
        (several, {"image": image}, "imageList"),
        (several, {"imageList": []}, "imageList"),
        (several, {"imageList": [image]}, r"imageList[0]"),
        (several, {"imageList": [{"data": image}] * 101}, "imageList"),
    ):
        answer = requests.post(f"{address}/sdapi/v1/{path}", json=body, timeout=60)
        assert (answer.status_code, named in answer.json()["detail"]) == (400, True), (path, named, answer.text)


def test_sizes_and_upscalers_follow_from_the_fields() -> None:
    def plan(**body: Any) -> Any:
        made = enlarging(parse_extras(body), 100, 50)
        return made.size, [each if isinstance(each, str) else (each.model, each.scale) for each in made.upscalers]

    assert plan() == ((100, 50), []), "without an upscaler nothing is enlarged"
    assert plan(upscaler_1="R-ESRGAN 4x+", upscaling_resize=1.5) == ((150, 75), [("RealESRGAN_x4plus", 1.5)])
    assert plan(upscaler_1="x", upscaler_2="y") == ((200, 100), [("x", 2.0)])
    both = {"upscaler_1": "x", "upscaler_2": "y", "extras_upscaler_2_visibility": 0.25}
    assert plan(**both) == ((200, 100), [("x", 2.0), ("y", 2.0)])
    assert plan(upscaler_2="y", extras_upscaler_2_visibility=1) == ((100, 50), [])
    to_size = {"upscaler_1": "x", "resize_mode": 1, "upscaling_resize_w": 150, "upscaling_resize_h": 150}
    assert plan(**to_size) == ((300, 150), [("x", 3.0)])
    smaller = {**to_size, "upscaling_resize_w": 10, "upscaling_resize_h": 10}
    assert plan(**smaller) == ((20, 10), ["x"]), "an upscaler does not make an image smaller"
    call = parse_extras({**to_size, "upscaling_crop": False})
    assert enlarging(call, 100, 50).crop is None
    assert finished(call, enlarging(call, 100, 50), [picture(300, 150)]).size == (300, 150)
    assert single_image({"image": "x"}) == ("x",)
    assert several_images({"imageList": [{"data": "x", "name": "y"}]}) == ("x",)


class WaitingStage:
    """A stage that ends when it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._ended: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        raise AssertionError("nobody waits for it any more")

    def watch(self, ended: Any) -> None:
        self._ended.append(ended)

    def cancel(self) -> None:
        self.cancelled.set()


class WaitingPool(RefusingPool):
    """Enlarges without end; keeps for whom, and how urgently."""

    def __init__(self) -> None:
        self.stages: list[WaitingStage] = []
        self.terms: list[tuple[Any, Any]] = []

    def file_names(self) -> FileNames:
        return replace(super().file_names(), upscalers=("sub/4x",))

    def upscale(self, image: Any, upscale: Any, **terms: Any) -> Any:
        self.terms.append((terms["user"], terms["priority"]))
        self.stages.append(WaitingStage())
        return self.stages[-1]


def test_enlarging_counts_as_jobs_of_its_user_and_ends_with_the_client(tmp_path: Path) -> None:
    pool = WaitingPool()
    settings = ServeSection(keys={"ann": "k" * 20}, priorities={"ann": -2}, queued_jobs=2)
    headers = {"authorization": f"Bearer {'k' * 20}"}
    both = {"imageList": [{"data": encoded(picture())}] * 2, "upscaler_1": "sub/4x"}

    async def calls() -> tuple[int, int]:
        app = application(pool, settings, tmp_path)

        def extras(body: Any) -> Any:
            return call(app, "POST", "/sdapi/v1/extra-batch-images", json.dumps(body).encode(), headers)

        first = asyncio.ensure_future(extras(both))
        while len(pool.stages) < 2:
            await asyncio.sleep(0.01)
        one_more = await extras({**both, "imageList": both["imageList"][:1]})
        too_many = await extras({**both, "imageList": both["imageList"] * 2})
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return one_more.status, too_many.status

    assert asyncio.run(calls()) == (429, 400)
    assert pool.terms == [("ann", -2)] * 2
    assert all(stage.cancelled.is_set() for stage in pool.stages)


def test_a_cancelled_stage_says_so() -> None:
    with open_pool(workers=0) as pool:
        made = pool.upscale(picture(), "double")
        ended = threading.Event()
        made.watch(ended.set)
        made.cancel()
        assert ended.wait(30)
        with pytest.raises(JobFailed) as failed:
            made.result(30)
        assert failed.value.failure.cancelled
        again = threading.Event()
        made.watch(again.set)
        assert again.is_set(), "it has ended already"
        made.cancel()


def test_an_unknown_field_is_told_with_the_image() -> None:
    """It was ignored without a word; those that clients send with every call are no news."""
    usual = {
        "image": "x",
        "show_extras_results": True,
        "gfpgan_visibility": 0,
        "codeformer_weight": 0,
        "upscaler_1": "4x",
    }
    assert unread_extras(usual) == []
    (message,) = unread_extras({**usual, "upscaling_resise": 4})
    assert message.startswith("unknown field 'upscaling_resise'; did you mean 'upscaling_resize'?")
