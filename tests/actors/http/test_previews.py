"""Previews over HTTP: each interface shows the newest one, and none are made while nobody asks."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
import websockets
from PIL import Image

from modelpool import GenerateRequest, ImagePreview, ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.detached.job_service import JobService
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.actors.http.comfy.comfy_prompts import Socket
from modelpool.actors.http.service import submissions as submissions_module
from modelpool.actors.http.service.submissions import Submissions
from modelpool.actors.worker.gpu_worker import WorkerEngine
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import RunHooks
from tests.actors.http.conftest import CONFIG, served
from tests.actors.http.service.test_submissions import REQUEST, OrderedPool
from tests.actors.loop_connection import open_real_pool

STEPS = 10
#: of a step, at least: longer than it takes to ask
STEP_SECONDS = 0.05
BODY = {"model": "shapes", "prompt": "a red circle", "seed": 1, "steps": STEPS}
#: between offers of previews while a run waits until somebody has one, and how often a step offers its own at most
OFFER_SECONDS, OFFERS = 0.05, 200


class SlowEngine:
    """An engine with steps that take time, without computing. While `may_end` is clear, a step goes on, and offers its
    prediction for previews again."""

    def __init__(self, engine: WorkerEngine, may_end: threading.Event) -> None:
        self._engine, self._may_end = engine, may_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, task: Any, work: Any, inputs: Any, hooks: RunHooks, *others: Any, **named: Any) -> Any:
        def on_step(done: int, steps: int) -> None:
            time.sleep(STEP_SECONDS)
            hooks.on_step(done, steps)

        def preview(latents: Any) -> None:
            for _ in range(OFFERS):
                hooks.preview(latents)  # type: ignore[misc]
                if self._may_end.wait(OFFER_SECONDS):
                    break

        slow = replace(hooks, on_step=on_step, preview=None if hooks.preview is None else preview)
        return self._engine.run(task, work, inputs, slow, *others, **named)


@pytest.fixture(scope="module")
def ends() -> threading.Event:
    found = threading.Event()
    found.set()
    return found


@pytest.fixture
def may_end(ends: threading.Event) -> Iterator[threading.Event]:
    """Set, unless the test clears it for a run that does not end before it has asked."""
    yield ends
    ends.set()


@pytest.fixture(scope="module")
def slow_pool(ends: threading.Event) -> Iterator[ModelPool]:
    config = PoolConfig.load(CONFIG).override(device="cpu", workers=1)
    with open_real_pool(config, lambda engine: SlowEngine(engine, ends)) as pool:  # type: ignore[arg-type]
        # the first image of a model with previews finds the colours of its latents, which takes a moment
        request = GenerateRequest(model="shapes", prompt="", steps=1, preview="latent_rgb")
        assert pool.submit(request, output=False).wait(60).succeeded == 1
        yield pool


@pytest.fixture(scope="module")
def server(slow_pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(slow_pool, tmp_path_factory.mktemp("outputs")) as address:
        yield address


def opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def test_the_newest_preview_of_a_job_is_served_while_it_is_sampled_and_named_by_an_event(
    server: str, may_end: threading.Event
) -> None:
    may_end.clear()
    submission = requests.post(f"{server}/api/jobs", json=BODY, timeout=60).json()
    address = f"{server}/api/jobs/{submission['id']}"
    assert requests.get(f"{address}/preview", timeout=60).status_code == 204
    names, answers, kind = [], [], ""
    with requests.get(f"{address}/events?previews=true", stream=True, timeout=60) as stream:
        for line in stream.iter_lines(decode_unicode=True, chunk_size=1):
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: ") and kind == "preview":
                names.append(json.loads(line.removeprefix("data: ")))
                answers.append(requests.get(f"{server}{names[-1]['url']}", timeout=60))
                if answers[-1].status_code == 200:
                    may_end.set()
    assert may_end.is_set()
    assert names
    assert all(1 <= each["step"] <= each["steps"] == STEPS for each in names)
    shown = [answer for answer in answers if answer.status_code == 200]  # the others had ended by then
    assert shown
    assert {answer.headers["content-type"] for answer in shown} == {"image/webp"}
    assert {opened(answer.content).size for answer in shown} == {(64, 64)}
    assert requests.get(f"{address}/preview", timeout=60).status_code == 204


def test_a_detached_job_has_previews_while_somebody_asks(
    slow_pool: ModelPool, may_end: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions_module, "DETACHED_SECONDS", 0.05)
    may_end.clear()
    service = JobService(Journal(tmp_path / "journal.sqlite"), lambda: slow_pool._connection)

    class Direct:
        def call(self, question: Any, *args: Any) -> Any:
            return question(service, *args)

    pool = ModelPool(slow_pool._connection, lambda: None, None, jobs=Direct)
    try:
        with served(pool, tmp_path / "out") as address:
            submitted = requests.post(
                f"{address}/api/jobs", json={"requests": [BODY], "detached": True}, timeout=60
            ).json()
            preview, answers = f"{address}/api/jobs/{submitted['id']}/preview?index=0", []
            while requests.get(f"{address}/api/jobs/{submitted['id']}", timeout=60).json()["state"] == "active":
                answers.append(requests.get(preview, timeout=60))
                if answers[-1].status_code == 200:
                    may_end.set()
        shown = [answer for answer in answers if answer.status_code == 200]
        assert submitted["detached"]
        assert shown
        assert {opened(answer.content).size for answer in shown} == {(64, 64)}
        assert all(1 <= int(answer.headers["x-step"]) <= STEPS for answer in shown)
        assert pool.attach(submitted["id"]).previews() == (), "it has ended"
    finally:
        service.close()
        pool.close()


def test_a_stream_of_the_images_api_begins_with_partial_images(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    extra = {"seed": 3, "steps": STEPS}
    events: list[Any] = list(
        client.images.generate(
            prompt="a red circle", model="shapes", stream=True, partial_images=2, output_format="jpeg", extra_body=extra
        )
    )
    partial, last = events[:-1], events[-1]
    assert last.type == "image_generation.completed"
    assert 1 <= len(partial) <= 2
    assert [event.partial_image_index for event in partial] == list(range(len(partial)))
    assert {opened(base64.b64decode(event.b64_json)).format for event in partial} == {"JPEG"}


def test_progress_of_a1111_has_the_current_image(server: str, may_end: threading.Event) -> None:
    may_end.clear()
    call = {"prompt": "a red circle", "steps": STEPS, "width": 64, "height": 64}
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.append(requests.post(f"{server}/sdapi/v1/txt2img", json=call, timeout=120))
    )
    thread.start()
    found = []
    while thread.is_alive():
        found.append(requests.get(f"{server}/sdapi/v1/progress", timeout=60).json()["current_image"])
        if found[-1]:
            may_end.set()
        without = requests.get(f"{server}/sdapi/v1/progress?skip_current_image=true", timeout=60).json()
        assert without["current_image"] is None
        time.sleep(0.01)
    thread.join()
    images = [opened(base64.b64decode(each)) for each in found if each]
    assert images
    assert {(image.format, image.size) for image in images} == {("PNG", (64, 64))}
    assert ended[0].status_code == 200


def test_a_socket_of_comfyui_gets_previews_as_binary_frames(server: str, may_end: threading.Event) -> None:
    may_end.clear()

    async def frames() -> list[bytes]:
        async with websockets.connect(f"{server.replace('http', 'ws')}/ws?clientId=me") as socket:
            await socket.recv()
            body = {"prompt": WORKFLOW, "client_id": "me", "extra_data": {"preview_method": "auto"}}
            answer = await asyncio.to_thread(requests.post, f"{server}/prompt", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found = []
            while True:
                message = await asyncio.wait_for(socket.recv(), 60)
                if isinstance(message, bytes):
                    found.append(message)
                    may_end.set()
                elif json.loads(message)["type"] in ("execution_success", "execution_error"):
                    return found

    found = asyncio.run(frames())
    assert found
    assert {frame[:8] for frame in found} == {b"\0\0\0\1\0\0\0\1"}
    assert {opened(frame[8:]).format for frame in found} == {"JPEG"}


WORKFLOW = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "shapes.safetensors"}},
    "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a blue square"}},
    "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}},
    "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "5": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["1", 0],
            "positive": ["2", 0],
            "negative": ["3", 0],
            "latent_image": ["4", 0],
            "seed": 5,
            "steps": STEPS,
            "cfg": 5.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
        },
    },
    "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
    "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "x"}},
}


def test_of_previews_for_a_slow_socket_only_the_newest_waits() -> None:
    async def fill() -> None:
        socket = Socket("me", "ann")
        for number in range(5):
            socket.put_preview(b"%d" % number)
        assert socket.messages.qsize() == 1
        frame = socket.messages.get_nowait()
        assert frame is not None
        assert frame.take()[8:] == b"4"  # type: ignore[union-attr]
        socket.put_preview(b"5")
        assert socket.messages.qsize() == 1

    asyncio.run(fill())


def test_previews_are_wanted_while_somebody_asks_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions_module, "PREVIEW_LEASE_SECONDS", 0.05)
    monkeypatch.setattr(submissions_module, "_PREVIEW_CHECK_SECONDS", 0.01)

    async def work() -> None:
        pool = OrderedPool()
        submissions = Submissions(pool, Path("out"), 10)  # type: ignore[arg-type]
        submission = await submissions.submit([REQUEST], "ann", "native")
        wanted = pool.jobs[0].wanted
        assert wanted == []  # nobody has asked
        submission.ask_for_previews()
        with submission.previews_wanted():
            await asyncio.sleep(0.3)
            assert wanted == [0.5]
        while wanted == [0.5]:
            await asyncio.sleep(0.01)
        assert wanted == [0.5, None]
        submission.ask_for_previews()
        while len(wanted) < 4:
            await asyncio.sleep(0.01)
        assert wanted == [0.5, None, 0.5, None]
        await submissions.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_no_previews_are_made_while_nobody_asks(server: str, slow_pool: ModelPool) -> None:
    made = []
    line: Any = slow_pool._connection
    before, line.fleet.on_preview = line.fleet.on_preview, made.append
    try:
        submission = requests.post(f"{server}/api/jobs", json={**BODY, "steps": 4}, timeout=60).json()
        events = requests.get(f"{server}/api/jobs/{submission['id']}/events", timeout=60).text
        assert "event: end" in events
        assert "event: preview" not in events
    finally:
        line.fleet.on_preview = before
    assert made == []


def test_a_driver_gets_previews_as_they_are_made_and_with_the_image(slow_pool: ModelPool) -> None:
    """Not over HTTP, on the same pool: `on_preview` and `image.previews`."""
    seen: list[ImagePreview] = []
    request = GenerateRequest(model="shapes", prompt="a red circle", seed=9, steps=STEPS)
    jobs = slow_pool.submit(request, output=False, on_preview=seen.append, preview_seconds=0.0)
    (image,) = jobs.images()
    assert image.previews
    assert {(each.index, each.steps, each.pil.size) for each in image.previews} == {(0, STEPS, (64, 64))}
    assert [each.step for each in image.previews] == sorted({each.step for each in image.previews})
    assert jobs.preview(0) is None  # it was returned with the image
    assert slow_pool._previews.flush(60)
    assert set(seen) <= set(image.previews)
    assert seen[-1] == image.previews[-1]
    (plain,) = slow_pool.submit(request, output=False).images()
    assert plain.previews == ()
    assert np.array_equal(plain.pixels, image.pixels)
    with pytest.raises(UnusableField, match="preview_seconds: found -1"):
        slow_pool.submit(request, output=False, preview_seconds=-1)
