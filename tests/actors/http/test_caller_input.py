"""What callers send is checked before it names a file, reaches the pool or takes memory."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, owner_folder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import ModelListing
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.test_shared_servers import SharedPool

PRIVATE = "private.png"


class RecordingPool(RefusingPool):
    """Remembers the requests that reach it."""

    def __init__(self) -> None:
        self.seen: list[GenerateRequest] = []

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        self.seen += requests
        return super().submit(self.seen)

    def recipes(self, requests: Iterable[GenerateRequest]) -> Any:
        self.seen += requests
        return super().recipes(self.seen)


def png(size: tuple[int, int] = (8, 8)) -> bytes:
    content = BytesIO()
    Image.new("RGB", size).save(content, "PNG")
    return content.getvalue()


def edited(pool: RefusingPool, folder: Path, **texts: str) -> Answer:
    """The answer to a form with one image file and these texts."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in {"prompt": "x", **texts}.items()]
    parts.append(b'name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n' + png())
    body = b"".join(b"--edge\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=edge"}
    app = application(pool, ServeSection(), folder)
    return asyncio.run(call(app, "POST", "/v1/images/edits", body, headers))


@pytest.mark.parametrize(
    "name", ["image", "mask", "reference", "last_image", "video", "video_mask", "face_video", "controls"]
)
def test_no_text_of_a_form_names_a_file_of_the_server(name: str, tmp_path: Path) -> None:
    """An existing image: a driver script may name it so."""
    path = tmp_path / PRIVATE
    path.write_bytes(png())
    pool = RecordingPool()
    answer = edited(pool, tmp_path, model="shapes", **{name: f"canny={path}" if name == "controls" else str(path)})
    assert (answer.status, pool.seen) == (400, [])
    assert name in answer.json["error"]["message"]
    assert "base64" in answer.json["error"]["message"] or "expected a file" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"model": "/weights/a.safetensors"}, {"model": "shapes", "negative": "embedding:/a.pt"}]
)
def test_an_edit_asks_the_pool_only_for_names_that_are_no_paths(fields: dict[str, str], tmp_path: Path) -> None:
    """The pool is asked whether the model reads reference images, which opens the file of the model."""
    pool = RecordingPool()
    answer = edited(pool, tmp_path, **fields)
    assert (answer.status, pool.seen) == (400, [])
    assert "not a path" in answer.json["error"]["message"]


def test_nothing_is_submitted_without_a_place_for_its_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is free again if the submission is refused."""
    host = "127.0.0.1:1"
    body = json.dumps({"requests": [{"model": "shapes", "prompt": "x"}], "webhook": f"http://{host}/end"}).encode()
    settings = ServeSection(url_hosts=(host,), webhook_secret="s" * 32)
    pool = RecordingPool()

    async def answers(places: int) -> list[int]:
        monkeypatch.setattr("modelpool.actors.http.service.webhooks.MOST_PENDING", places)
        app = application(pool, settings, tmp_path)
        headers: tuple[dict[str, str], ...] = ({}, {"idempotency-key": "order 1"}, {})
        return [(await call(app, "POST", "/api/jobs", body, each)).status for each in headers]

    assert (asyncio.run(answers(0)), pool.seen) == ([429] * 3, [])
    assert asyncio.run(answers(1)) == [400] * 3
    assert len(pool.seen) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "sub/dir"},
        {"model": "a.safetensors"},
        {"model": "x.json"},
        {"loras": ["sub/a"]},
        {"loras": ["a.safetensors:0.5"]},
        {"prompt": "embedding:a.pt:1.2"},
        {"upscale": "sub/a"},
        {"hires": {"scale": 2, "upscaler": "a.safetensors"}},
    ],
)
def test_a_name_that_may_be_a_relative_path_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    """A name in a form of a path is first looked for below the working directory of the pool."""
    pool = RecordingPool()
    body = json.dumps({"model": "shapes", "prompt": "x", **fields}).encode()
    answer = asyncio.run(call(application(pool, ServeSection(), tmp_path), "POST", "/api/jobs", body))
    assert (answer.status, pool.seen) == (400, [])
    assert "not a path" in answer.json["error"]["message"]


def test_a_listed_name_is_accepted_whatever_its_form(tmp_path: Path) -> None:
    class NestedPool(RecordingPool):
        def models(self) -> tuple[ModelListing, ...]:
            return (ModelListing("sd15/shapes", "shapes.safetensors", "SD 1.5", 1, 64, 64),)

    pool = NestedPool()
    body = json.dumps({"model": "sd15/shapes", "prompt": "x"}).encode()
    asyncio.run(call(application(pool, ServeSection(), tmp_path), "POST", "/api/jobs", body))
    assert [request.model for request in pool.seen] == ["sd15/shapes"]


def test_a_signature_with_other_characters_than_ascii_is_refused(tmp_path: Path) -> None:
    async def work() -> int:
        app = application(SharedPool(), ServeSection(), tmp_path)
        created = await call(app, "POST", "/api/jobs", json.dumps({"model": "shapes", "prompt": "x"}).encode())
        query = "until=99999999999&signature=%C3%A9"
        return (await call(app, "GET", f"/files/{created.json['id']}/0", query=query)).status

    assert asyncio.run(work()) == 403


def test_too_many_jobs_are_refused_before_their_images_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(CallerImages, "decode", lambda self, name, value: decoded.append(name))
    request = {"model": "shapes", "prompt": "x", "image": base64.b64encode(png()).decode()}
    app = application(RecordingPool(), ServeSection(queued_jobs=2), tmp_path)
    answer = asyncio.run(call(app, "POST", "/api/jobs", json.dumps([request] * 3).encode()))
    assert (answer.status, decoded) == (400, [])
    assert "expected up to 2" in answer.json["error"]["message"]


def test_the_images_of_one_call_have_a_bound_in_pixels(tmp_path: Path) -> None:
    """Over all requests of the call: a file of few bytes may have many pixels. Each call has its own."""
    image = base64.b64encode(png((2048, 2048))).decode()
    images = CallerImages((), 1 << 20, max_pixels=3 * 2048 * 2048)
    images.in_fields({"image": image, "controls": [{"image": image}]})
    images.in_fields({"mask": image})
    with pytest.raises(UserError, match=r"reference.*2048x2048.*12582912 pixels"):
        images.in_fields({"reference": [image]})
    pool = RecordingPool()
    small = base64.b64encode(png((64, 64))).decode()
    requests = [{"model": "shapes", "prompt": "x", "image": small} for _ in range(2)]

    async def answers(call_pixels: int) -> list[str]:
        app = application(pool, ServeSection(call_pixels=call_pixels), tmp_path)
        found = [await call(app, "POST", "/api/jobs", json.dumps(requests).encode()) for _ in range(2)]
        return [answer.json["error"]["message"] for answer in found]

    assert all("4096 pixels" in message for message in asyncio.run(answers(64 * 64)))
    assert pool.seen == []
    assert not any("pixels" in message for message in asyncio.run(answers(2 * 64 * 64)))


def test_users_have_folders_of_their_own(tmp_path: Path) -> None:
    """Equal work of two users is one file in one folder, and would carry the metadata of the first."""
    folders = [owner_folder(tmp_path, owner) for owner in ("", "ann", "bob", "a/../b", "a_.._b")]
    assert folders[0] == tmp_path
    assert len(set(folders)) == 5
    assert all(folder.parent == tmp_path / "users" for folder in folders[1:])


def test_a_submission_that_is_over_keeps_no_decoded_images() -> None:
    async def work() -> tuple[int, int]:
        pixels = np.zeros((8, 8, 3), np.uint8)
        requests = [GenerateRequest(model="shapes", prompt="x", image=pixels)]
        submission = HttpSubmission("a", "", "native", 1, requests.clear, False, requests=requests)
        before = len(submission.requests)
        submission.note([JobEnd(0, "a-0", "failed")], ())
        return before, len(submission.requests)

    assert asyncio.run(work()) == (1, 0)


def test_an_open_server_answers_under_every_name_if_that_is_wanted(tmp_path: Path) -> None:
    def status(any_host: bool) -> int:
        app = application(SharedPool(), ServeSection(), tmp_path, any_host=any_host)
        return asyncio.run(call(app, "GET", "/api/models", headers={"host": "node1:8000"})).status

    assert [status(False), status(True)] == [403, 200]


@pytest.mark.parametrize(("setting", "expected"), [(1, [1, 4]), ("adaptive", ["adaptive", 4])])
def test_requests_without_a_batch_size_have_that_of_the_configuration(
    setting: Any, expected: list[Any], tmp_path: Path
) -> None:
    pool = RecordingPool()
    requests = [{"model": "shapes", "prompt": "x"}, {"model": "shapes", "prompt": "x", "batch": 4}]
    app = application(pool, ServeSection(batch=setting), tmp_path)
    asyncio.run(call(app, "POST", "/api/jobs", json.dumps(requests).encode()))
    assert [request.batch for request in pool.seen] == expected
