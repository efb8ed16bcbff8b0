"""The native interface against a real pool: submit, follow, explain, download, cancel, idempotency, webhooks."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from modelpool import ModelPool
from modelpool.actors.control.detached.records import FILE_FIELDS
from modelpool.actors.http.service.webhooks import SIGNATURE_HEADER, signature_of
from modelpool.actors.request.field_table import REQUEST_FIELDS
from tests.actors.http.comfy.test_comfy_api import GRAPH
from tests.actors.http.comfy.test_comfy_graph import exported
from tests.actors.http.conftest import served

REQUEST = {"model": "shapes", "prompt": "a red circle", "steps": 2, "seed": 1}
SECRET = "s" * 32
WEIGHTS = Path(__file__).parents[4] / "examples" / "shapes" / "models" / "shapes.safetensors"


def submitted(server: str, body: Any, **headers: str) -> dict[str, Any]:
    answer = requests.post(f"{server}/api/jobs", json=body, headers=headers, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.json()


def events_of(server: str, submission: dict[str, Any], **headers: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a submission, until it ends."""
    url = f"{server}/api/jobs/{submission['id']}/events"
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        blocks = answer.text.strip().split("\n\n")
    found = []
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_jobs_are_followed_to_their_outputs(server: str) -> None:
    about = {"id": "second", "metadata": {"row": [2]}}
    submission = submitted(server, [REQUEST, {**REQUEST, "seed": 2, **about}])
    assert (submission["jobs"], submission["state"], submission["detached"]) == (2, "active", False)
    events = events_of(server, submission)
    ends = [data for kind, data in events if kind == "job"]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert [{name: end.get(name) for name in about} for end in ends if end["index"] == 1] == [about]
    assert all("id" not in end for end in ends if end["index"] == 0)
    for name in ("n", "num_images_per_prompt"):  # one request, several jobs, with seeds that count up
        several = requests.post(f"{server}/api/jobs", json=[{**REQUEST, name: 2}, {**REQUEST, "n": None}], timeout=60)
        assert (several.status_code, several.json()["jobs"]) == (201, 3)
    assert events[-1] == ("end", {**events[-1][1], "state": "ended", "succeeded": 2, "failed": 0})
    image = requests.get(server + ends[0]["url"], timeout=60)
    assert image.headers["content-type"] == "image/png"
    assert Image.open(BytesIO(image.content)).size == (64, 64)


def test_options_of_a_run_are_applied_or_refused_by_name(server: str) -> None:
    ends = []
    for options in ({}, {"freeu": True, "pag.scale": 2}, {"attention_scale": {"text": {"OUT": 0.5}}}):
        events = events_of(server, submitted(server, {**REQUEST, "options": options}))
        ends += [data for kind, data in events if kind == "job"]
    files = [requests.get(server + end["url"], timeout=60).content for end in ends]
    assert len({Image.open(BytesIO(file)).tobytes() for file in files}) == 3
    lacking = {**REQUEST, "options": {"attention_scale.text": "IN00*0"}}
    refused = requests.post(f"{server}/api/jobs", json=lacking, timeout=60)
    assert (refused.status_code, "found 'IN00', expected a block with attention" in refused.text) == (400, True)
    refused = requests.post(f"{server}/api/jobs", json={**REQUEST, "options": {"slg": True}}, timeout=60)
    assert (refused.status_code, "options.slg: not supported by model" in refused.text) == (400, True)


def test_a_lora_changes_over_the_steps_and_from_text_to_text(server: str) -> None:
    keyframes = {"name": "light", "keyframes": [[0, 0.2], [0.5, 1]], "interpolation": "linear"}
    submission = submitted(
        server, [{**REQUEST, "loras": [lora]} for lora in ("light:1", keyframes, "light:1:only=negative")]
    )
    ends = [data for kind, data in events_of(server, submission) if kind == "job"]
    files = [requests.get(server + end["url"], timeout=60).content for end in ends]
    assert len({Image.open(BytesIO(file)).tobytes() for file in files}) == 3
    refused = requests.post(f"{server}/api/jobs", json={**REQUEST, "loras": ["light:1:only=region0"]}, timeout=60)
    assert (refused.status_code, "loras.only: found 'region0'" in refused.text) == (400, True)


def test_a_reader_that_connects_again_continues_after_its_last_event(server: str) -> None:
    submission = submitted(server, [REQUEST, {**REQUEST, "seed": 2}])
    events_of(server, submission)
    again = events_of(server, submission, **{"Last-Event-ID": "1"})
    assert [kind for kind, _ in again] == ["job", "end"]


def test_a_job_is_explained_and_listed(server: str) -> None:
    submission = submitted(server, REQUEST)
    events_of(server, submission)
    path = f"{server}/api/jobs/{submission['id']}"
    why = requests.get(f"{path}/why", timeout=60).json()
    assert why["status"] == "succeeded"
    assert requests.get(f"{path}/story", timeout=60).json()["lines"]
    listed = requests.get(f"{server}/api/jobs", timeout=60).json()["submissions"]
    assert listed[0]["id"] == submission["id"]
    assert requests.get(path, timeout=60).json()["ends"][0]["state"] == "succeeded"
    assert requests.get(f"{path}/why?index=9", timeout=60).status_code == 404
    assert requests.get(f"{server}/api/jobs/none", timeout=60).status_code == 404


def test_a_cancelled_job_ends_as_cancelled(server: str) -> None:
    submission = submitted(server, {**REQUEST, "steps": 999, "width": 128, "height": 128})
    requests.delete(f"{server}/api/jobs/{submission['id']}", timeout=60)
    (end,) = [data for kind, data in events_of(server, submission) if kind == "job"]
    assert end["state"] == "cancelled"
    assert requests.get(f"{server}/api/jobs/{submission['id']}/outputs/0", timeout=60).status_code == 404


def test_a_key_is_used_once(server: str) -> None:
    """Concurrent calls under one key are one submission; another body under the key is refused."""
    found: list[dict[str, Any]] = []
    headers = {"Idempotency-Key": "order 1"}
    callers = [threading.Thread(target=lambda: found.append(submitted(server, REQUEST, **headers))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(found) == 4
    assert len({each["id"] for each in found}) == 1
    other = requests.post(f"{server}/api/jobs", json={**REQUEST, "seed": 9}, headers=headers, timeout=60)
    assert other.status_code == 409


def test_images_are_sent_as_base64(server: str) -> None:
    content = BytesIO()
    Image.new("RGB", (64, 64), "blue").save(content, "PNG")
    image = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
    submission = submitted(server, {**REQUEST, "image": image, "strength": 0.5})
    assert events_of(server, submission)[-1][1]["succeeded"] == 1


@pytest.mark.parametrize("name", FILE_FIELDS)
def test_no_file_of_the_server_is_read_for_a_caller(server: str, name: str, tmp_path: Path) -> None:
    """An existing image: the request would be accepted in a driver script."""
    path = str(tmp_path / "private.png")
    Image.new("RGB", (64, 64)).save(path)
    value: Any = {
        "controls": [{"model": "canny", "image": path}],
        "image_prompts": [{"model": "plus", "image": [path]}],
        "regions": [{"prompt": "x", "mask": path}],
        "reference": [path],
        "video": [path],
    }.get(name, path)
    for fields in ({name: value}, {"options": {name: value}}):
        answer = requests.post(f"{server}/api/jobs", json={**REQUEST, **fields}, timeout=60)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "base64" in message or "option" in message, message
    short = requests.post(f"{server}/api/jobs", json={**REQUEST, "controls": [f"canny={path}"]}, timeout=60)
    assert short.status_code == 400
    assert "base64" in short.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": str(WEIGHTS)},
        {"model": "../shapes"},
        {"model": "folder/shapes.safetensors"},
        {"loras": [f"{WEIGHTS}:0.5"]},
        {"controls": [{"model": str(WEIGHTS)}], "image": None},
        {"prompt": f"a circle (embedding:{WEIGHTS}:1.2)"},
        {"decoder": "~/stage_b"},
    ],
)
def test_no_weights_are_named_by_their_path(server: str, fields: dict[str, Any]) -> None:
    """An existing checkpoint: a driver script may name it so."""
    body = {**REQUEST, **fields}
    if "controls" in fields:
        content = BytesIO()
        Image.new("RGB", (8, 8)).save(content, "PNG")
        body["controls"] = [{**fields["controls"][0], "image": base64.b64encode(content.getvalue()).decode()}]
    answer = requests.post(f"{server}/api/jobs", json=body, timeout=60)
    assert (answer.status_code, "not a path" in answer.text) == (400, True), answer.text


def test_no_url_is_fetched_unless_its_host_is_permitted(real_pool: ModelPool, tmp_path: Path) -> None:
    content = BytesIO()
    Image.new("RGB", (64, 64)).save(content, "PNG")
    with listener([(200, content.getvalue()), (302, b"")]) as (host, heard):
        body = {**REQUEST, "image": f"http://{host}/image.png", "strength": 0.5}
        with served(real_pool, tmp_path, url_hosts=()) as closed:
            answer = requests.post(f"{closed}/api/jobs", json=body, timeout=60)
            assert answer.status_code == 400
            assert "url_hosts" in answer.json()["error"]["message"]
            assert heard == []
        with served(real_pool, tmp_path, url_hosts=(host,)) as opened:
            submitted(opened, body)
            assert len(heard) == 1
            redirected = requests.post(f"{opened}/api/jobs", json=body, timeout=60)
            assert "302" in redirected.json()["error"]["message"]
            assert len(heard) == 2


def test_the_end_is_delivered_signed_and_again_after_a_failure(real_pool: ModelPool, tmp_path: Path) -> None:
    with (
        listener([(500, b""), (200, b"")]) as (host, heard),
        served(real_pool, tmp_path, url_hosts=(host,), webhook_secret=SECRET) as server,
    ):
        submission = submitted(server, {"requests": [REQUEST], "webhook": f"http://{host}/done"})
        while len(heard) < 2:
            time.sleep(0.01)
    headers, content = heard[1]
    at = int(headers[SIGNATURE_HEADER].split(",")[0].removeprefix("t="))
    assert hmac.compare_digest(headers[SIGNATURE_HEADER], signature_of(SECRET, at, content))
    assert json.loads(content)["submission"]["id"] == submission["id"]
    assert json.loads(content)["submission"]["succeeded"] == 1


def test_a_webhook_of_another_host_is_refused(server: str) -> None:
    body = {"requests": [REQUEST], "webhook": "http://127.0.0.1:1/done"}
    answer = requests.post(f"{server}/api/jobs", json=body, timeout=60)
    assert (answer.status_code, "url_hosts" in answer.text) == (400, True)


def test_the_description_has_every_field_of_a_request(server: str) -> None:
    schema = requests.get(f"{server}/openapi.json", timeout=60).json()
    fields = schema["components"]["schemas"]["GenerateRequest"]["properties"]
    assert set(fields) == set(REQUEST_FIELDS)
    assert fields["steps"]["description"] == REQUEST_FIELDS["steps"].meaning
    assert "/v1/images/generations" in schema["paths"]
    assert requests.get(f"{server}/docs", timeout=60).status_code == 200


def test_the_state_of_the_pool_and_its_models_are_described(server: str) -> None:
    assert requests.get(f"{server}/api/choices", timeout=60).json()["models"][0]["name"] == "shapes"
    assert requests.get(f"{server}/api/status", timeout=60).json()["workers"]
    metrics = requests.get(f"{server}/metrics", timeout=60)
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "modelpool_" in metrics.text


@contextmanager
def listener(answers: list[tuple[int, bytes]]) -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]]]]:
    """A server on loopback that gives `answers` in turn; its host, and the headers and bodies that it heard."""
    heard: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answers[len(heard)]
            heard.append((dict(self.headers), body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_may_be_written_as_clients_of_other_programs_do(server: str) -> None:
    """A size in one word, one LoRA without a list, names of diffusers; n outputs with seeds that count up."""
    body = {"model": "shapes", "prompt": "x", "num_inference_steps": 2, "guidance_scale": 3, "negative_prompt": None}
    body |= {"size": "64x72", "loras": "light:0.5", "n": 3, "seed": 7}
    submission = submitted(server, body)
    ends = [data for kind, data in events_of(server, submission) if kind == "job"]
    assert (submission["jobs"], sorted(end["seed"] for end in ends)) == (3, [7, 8, 9])
    image = Image.open(BytesIO(requests.get(server + ends[0]["url"], timeout=60).content))
    assert image.size == (64, 72)
    assert "<lora:light:0.5>" in image.text["parameters"]  # type: ignore[attr-defined]
    for wrong, said in (
        ({"n": 0}, "n: found 0, expected a whole number from 1"),
        ({"n": "many"}, "n: found 'many'"),
        ({"n": 20000}, "n: found 20000"),
        ({"generator": 3}, "did you mean 'seed'?"),
        ({"size": "big"}, "size: found 'big', expected WIDTHxHEIGHT"),
    ):
        answer = requests.post(f"{server}/api/jobs", json={"model": "shapes", "prompt": "x", **wrong}, timeout=60)
        assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_a_workflow_is_sent_to_its_own_interface(server: str) -> None:
    for body in (GRAPH, {"prompt": GRAPH}, exported(GRAPH), {"prompt": exported(GRAPH)}):
        answer = requests.post(f"{server}/api/jobs", json=body, timeout=60)
        assert (answer.status_code, "to /prompt" in answer.text) == (400, True), answer.text
