"""The official client of OpenAI against a real pool."""

from __future__ import annotations

import base64
import http.client
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
from PIL import Image

from examples.shapes.checker import matches, read_image
from modelpool import ModelPool
from modelpool.actors.http.openai.openai_api import ImagesCall, ParsedCall, _about, _check_succeeded
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.submissions import JobEnd
from tests.actors.http.conftest import served


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def opened(text: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(text)))


def test_images_show_what_their_prompt_says(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt="a red circle", model="shapes", n=2, size="64x64", extra_body={"steps": 8, "seed": 1}
    )
    images = [opened(image.b64_json) for image in answer.data]
    assert [image.size for image in images] == [(64, 64)] * 2
    assert images[0].tobytes() != images[1].tobytes()
    assert all(matches(read_image(np.asarray(image)), "a red circle") for image in images)


def test_a_url_needs_no_key_and_a_changed_one_is_refused(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt="a red circle", response_format="url", size="64x64", extra_body={"steps": 2, "seed": 1}
    )
    url = answer.data[0].url
    assert Image.open(BytesIO(requests.get(url, timeout=60).content)).size == (64, 64)
    assert requests.get(url[:-1] + ("0" if url[-1] != "0" else "1"), timeout=60).status_code == 403


def test_an_address_serves_the_format_that_the_answer_names(client: openai.OpenAI) -> None:
    """It served a PNG for every format; and a WebP file of the field `format` was a PNG with its losses in base64."""
    for fields, extra, named in (
        ({}, {}, "png"),
        ({"output_format": "jpeg", "output_compression": 50}, {}, "jpeg"),
        ({"output_format": "webp"}, {}, "webp"),
        ({}, {"format": "webp", "quality": 60}, "webp"),
        ({}, {"format": "jpg"}, "jpeg"),
        ({"output_format": "png"}, {"format": "webp"}, "png"),
    ):
        answer = client.images.generate(
            prompt="a red circle", size="64x64", extra_body={"steps": 2, "seed": 1, **extra}, **fields
        )
        url, text = answer.data[0].url, answer.data[0].b64_json
        served_file = requests.get(url, timeout=60)
        assert answer.output_format == named
        assert served_file.headers["content-type"] == f"image/{named}"
        assert served_file.content == base64.b64decode(text)
        assert Image.open(BytesIO(served_file.content)).format == named.upper()
        other = url.replace("quality=50", "quality=51").replace("file_format=webp", "file_format=png")
        assert other == url or requests.get(other, timeout=60).status_code == 403


def test_an_edit_of_a_transparent_image_without_a_mask_is_told(client: openai.OpenAI) -> None:
    """DALL-E 2 edits its transparent areas alone; here, all of it changed without a word."""
    for alpha, is_told in ((255, False), (0, True)):
        content = BytesIO()
        Image.new("RGBA", (64, 64), (200, 30, 30, alpha)).save(content, "PNG")
        answer = client.images.edit(
            image=("a.png", content.getvalue()), prompt="a red circle", size="64x64", extra_body={"steps": "2"}
        )
        assert ("transparent in mask" in str(getattr(answer, "warnings", ""))) == is_told


def test_a_stream_has_one_completed_event_for_each_image(client: openai.OpenAI) -> None:
    stream = client.images.generate(
        prompt="a red circle", stream=True, n=2, size="64x64", output_format="jpeg", extra_body={"steps": 2}
    )
    events = list(stream)
    assert [event.type for event in events] == ["image_generation.completed"] * 2
    assert all(opened(event.b64_json).format == "JPEG" for event in events)


def test_an_answer_has_the_warnings_about_its_images() -> None:
    call = ImagesCall(prompt="a red circle")
    plain, warned = (JobEnd(0, "job", "succeeded", facts={"warnings": each}) for each in ((), ("half of a LoRA",)))
    assert "warnings" not in _about(ParsedCall(call), "64x64", [plain])
    assert _about(ParsedCall(call), "64x64", [plain, warned, warned])["warnings"] == ["half of a LoRA"]


def test_an_edit_changes_the_transparent_area_only(client: openai.OpenAI) -> None:
    """The shapes model reads no reference images: it starts from the image. The mask marks the regenerated area."""
    image = Image.new("RGB", (64, 64), "blue")
    mask = Image.new("RGBA", (64, 64), "black")
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))
    answer = client.images.edit(
        image=("image.png", png(image)),
        mask=("mask.png", png(mask)),
        prompt="a red circle",
        model="shapes",
        extra_body={"steps": 4, "seed": 3},
    )
    pixels = opened(answer.data[0].b64_json).convert("RGB")
    assert pixels.crop((32, 0, 64, 64)).tobytes() == image.crop((32, 0, 64, 64)).tobytes()
    assert pixels.crop((0, 0, 32, 64)).tobytes() != image.crop((0, 0, 32, 64)).tobytes()


def test_an_edit_with_a_strength_starts_from_its_image(client: openai.OpenAI) -> None:
    """As a generation does that has the image as a field."""
    image = png(Image.new("RGB", (64, 64), "blue"))
    fields: dict[str, Any] = {"steps": 8, "seed": 3, "strength": 0.4}
    edited = client.images.edit(image=("image.png", image), prompt="a red circle", extra_body=fields)
    fields["image"] = base64.b64encode(image).decode()
    generated = client.images.generate(prompt="a red circle", extra_body=fields)
    first, second = (opened(answer.data[0].b64_json) for answer in (edited, generated))
    assert first.tobytes() == second.tobytes()
    two = [("image.png", image), ("other.png", image)]
    with pytest.raises(openai.BadRequestError, match="2 images with strength"):
        client.images.edit(image=two, prompt="a red circle", extra_body={"strength": 0.5})


@pytest.mark.parametrize(
    ("setting", "keys"), [("both", {"url", "b64_json"}), ("url", {"url"}), ("b64_json", {"b64_json"})]
)
def test_what_a_call_without_a_response_format_gets(
    setting: str, keys: set[str], real_pool: ModelPool, tmp_path: Path
) -> None:
    """Clients read `url` (DALL-E) or `b64_json` (gpt-image), and few ask for it; one that asks gets that alone. The
    size is the size of the image, also if none was named."""
    with served(real_pool, tmp_path, openai_response_format=setting) as address:
        asked: tuple[tuple[dict[str, str], set[str]], ...] = (
            ({}, keys),
            ({"response_format": "url"}, {"url"}),
            ({"response_format": "b64_json"}, {"b64_json"}),
        )
        for extra, expected in asked:
            body = {"prompt": "a red circle", "steps": 2, "seed": 1, "response_format": None, **extra}
            answer = requests.post(f"{address}/v1/images/generations", json=body, timeout=60).json()
            (image,) = answer["data"]
            assert (set(image), answer["size"]) == (expected, "64x64")
            if "url" in image:
                assert Image.open(BytesIO(requests.get(image["url"], timeout=60).content)).size == (64, 64)
        if setting == "both":
            body = {"prompt": "a red circle", "num_images_per_prompt": 2, "steps": 2, "size": "64x96", "seed": 1}
            answer = requests.post(f"{address}/v1/images/generations", json=body, timeout=60).json()
            assert (len(answer["data"]), answer["size"]) == (2, "64x96")


def test_models_are_listed_and_an_unknown_one_is_refused_in_the_form_of_the_api(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert client.models.retrieve("shapes").owned_by == "modelpool"
    with pytest.raises(openai.BadRequestError, match="shaps") as refused:
        client.images.generate(prompt="a red circle", model="shaps")
    assert refused.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("shaps")
    with pytest.raises(openai.BadRequestError, match="size"):
        client.images.generate(prompt="a red circle", size="big")


def png(image: Image.Image) -> bytes:
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_the_jobs_of_a_client_that_goes_are_cancelled(server: str, stream: bool) -> None:
    def latest() -> Any:
        found = requests.get(f"{server}/api/jobs?limit=1", timeout=60).json()["submissions"]
        return found[0] if found else {"id": ""}

    body = {"prompt": f"a red circle {stream}", "size": "128x128", "steps": 999, "stream": stream}
    before = latest()["id"]
    connection = http.client.HTTPConnection(server.removeprefix("http://"))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/images/generations", json.dumps(body), headers)
    while latest()["id"] == before:
        pass
    connection.close()
    while latest()["state"] == "active":
        pass
    assert (latest()["interface"], latest()["cancelled"]) == ("openai", 1)


def test_an_error_counts_no_images() -> None:
    """It counted them from 1, and `index` counts from 0 everywhere."""
    for index in (0, 1):
        with pytest.raises(HttpProblem, match=r"^an image was not generated: oom: no memory$"):
            _check_succeeded(JobEnd(index, "s-0", "failed", kind="oom", message="no memory"))
