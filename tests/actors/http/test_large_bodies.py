"""Bodies have a bound before they are built, and large ones are read in turns; a client that has gone costs nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.native import native_api
from modelpool.actors.http.native.native_api import MAX_CALL_LORAS
from modelpool.actors.http.service import unread_bodies
from modelpool.actors.http.service.access import Caller, CallState
from modelpool.actors.http.service.bodies import MAX_BODY_VALUES, MEMORY_BYTES
from modelpool.actors.http.service.services import ClientGone, Services
from modelpool.actors.http.service.turns import Turns
from modelpool.actors.request import json_text
from modelpool.actors.request.json_text import MAX_VALUES, NotJson, parse_json
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.conftest import served


def answers(tmp_path: Path, *calls: tuple[str, bytes], **settings: Any) -> list[tuple[int, str]]:
    """Status and text of the answers to calls that are made at the same time."""
    app = application(RefusingPool(), ServeSection(**settings), tmp_path)

    async def run() -> list[tuple[int, str]]:
        found = await asyncio.gather(*(call(app, "POST", path, body) for path, body in calls))
        return [(each.status, each.body.decode()) for each in found]

    return asyncio.run(run())


def test_values_are_counted_before_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 MB of [{},{},...] took 48 s and 1.6 GB."""
    monkeypatch.setattr(json_text.json, "loads", lambda *_, **__: pytest.fail("the values are built"))
    bodies = {
        "objects": b"[" + b"{}," * MAX_BODY_VALUES + b"{},{}]",
        "numbers": b"[" + b"1," * 20_000_000 + b"1]",
        "in an object": b'{"requests": [' + b'"",' * (MAX_BODY_VALUES + 1) + b'""]}',
    }
    for name, body in bodies.items():
        ((status, text),) = answers(tmp_path, ("/api/jobs", body))
        assert (status, f"found more than {MAX_BODY_VALUES} values" in text) == (400, True), name
    with pytest.raises(NotJson, match=f"more than {MAX_VALUES} values"):
        parse_json(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")


def test_large_bodies_are_answered_as_small_ones(tmp_path: Path) -> None:
    image = "A" * (3 * MEMORY_BYTES)
    body = json.dumps({"model": "shapes", "prompt": "x", "image": image}).encode()
    found = answers(tmp_path, *[("/api/jobs", body)] * 5, ("/api/jobs", b"[]"))
    assert {status for status, _ in found} == {400}
    assert all("image" in text for _, text in found[:5])
    assert max(len(text) for _, text in found) < 2000, "messages do not repeat what was sent"


def test_bodies_without_images_are_small(tmp_path: Path) -> None:
    body = json.dumps({"a": "x" * (2 << 20)}).encode()
    for path in ("/prompt", "/queue", "/history", "/interrupt", "/sdapi/v1/options"):
        ((status, text),) = answers(tmp_path, (path, body))
        assert (status, "found more than 1048576 bytes" in text) == (400, True), path


def test_prompts_of_callers_have_a_bound(tmp_path: Path) -> None:
    cases = {
        "/api/jobs": {"model": "shapes", "prompt": "x" * 101},
        "/v1/images/generations": {"model": "shapes", "prompt": "x" * 101},
        "/sdapi/v1/txt2img": {"prompt": "x" * 101},
    }
    for path, body in cases.items():
        ((status, text),) = answers(tmp_path, (path, json.dumps(body).encode()), prompt_characters=100)
        assert (status, "prompt: found '101 characters', expected up to 100" in text) == (400, True), (path, text)


def test_loras_of_a_call_have_a_bound(tmp_path: Path) -> None:
    body = json.dumps([{"model": "shapes", "prompt": "x", "loras": ["light"] * 100}] * (MAX_CALL_LORAS // 100 + 1))
    ((status, text),) = answers(tmp_path, ("/api/jobs", body.encode()))
    assert (status, f"up to {MAX_CALL_LORAS}" in text) == (400, True)


@pytest.mark.parametrize(
    "text", [b'["\\ud800"]', b'{"\\ud800": 1}', b'[["a", "\\udc00"]]', b"[1e999]", b"[NaN]", b'{"a": [-1e999]}']
)
def test_what_is_no_value_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        parse_json(text)


@pytest.mark.parametrize("text", [b'["\\ud83d\\ude00", "\\n"]', b"[1e300, -0.0]", b"[" * 32 + b"]" * 32])
def test_what_is_a_value_is_read(text: bytes) -> None:
    assert parse_json(text) == json.loads(text)


def test_nobody_takes_all_turns() -> None:
    async def run() -> list[str]:
        turns, begun = Turns(3, 2), []
        release = asyncio.Event()

        async def work(owner: str) -> None:
            async with turns.turn(owner):
                begun.append(owner)
                await release.wait()

        tasks = [asyncio.create_task(work(owner)) for owner in ("ann", "ann", "ann", "ann", "bob", "cid")]
        await asyncio.sleep(0.01)
        assert begun == ["ann", "ann", "bob"]
        tasks[2].cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn("ann"), turns.turn("ann"), turns.turn("bob"):
            return begun

    assert sorted(asyncio.run(run())) == ["ann", "ann", "ann", "bob", "cid"]


def test_requests_of_a_client_that_has_gone_are_not_built(tmp_path: Path) -> None:
    async def run() -> None:
        services = Services(RefusingPool(), ServeSection(), tmp_path, b"secret")
        caller = Caller(call=CallState(is_gone=True))
        built: list[GenerateRequest] = []
        with pytest.raises(ClientGone):
            await services.submit(caller, lambda: built, "native", 1)

    asyncio.run(run())


def test_clients_that_close_read_why_a_large_body_is_refused(tmp_path: Path) -> None:
    """urllib closes each connection and sends the whole body before it reads: the connection was reset."""
    refused = {
        "a workflow": ("/prompt", 400),
        "a call that reads no body": ("/sdapi/v1/interrupt", 200),
        "no such path": ("/nothing", 404),
    }
    refused["a body above every bound"] = ("/api/jobs", 413)
    with served(RefusingPool(), tmp_path) as address:
        for name, (path, status) in refused.items():
            size = 200_000_000 if status == 413 else 20_000_000
            body = b'{"prompt": "' + b"A" * size + b'"}'
            call = urllib.request.Request(address + path, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(call, timeout=30) as answer:
                    found, text = answer.status, b""
            except urllib.error.HTTPError as problem:
                found, text = problem.code, problem.read()
            assert found == status, name
            assert found == 200 or json.loads(text), name


def test_the_rest_of_a_body_that_never_comes_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_bodies, "MOST_SKIPPED_SECONDS", 0.1)
    head = "POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\nA"
    with served(RefusingPool(), tmp_path) as address:
        parts = urlsplit(address)
        with socket.create_connection((parts.hostname, parts.port), 30) as connection:
            connection.sendall(head.encode())
            received = b""
            while part := connection.recv(65536):
                received += part
    assert received.startswith(b"HTTP/1.1 404")


def test_too_many_requests_are_counted_before_any_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 empty requests kept the event loop for most of a second, and were then too many."""
    looked_at: list[object] = []
    original = native_api.as_object
    monkeypatch.setattr(native_api, "as_object", lambda *given: (looked_at.append(given), original(*given))[1])
    for body in (b"[" + b"{}," * 200_000 + b"{}]", b'{"requests": [' + b"{}," * 200_000 + b"{}]}"):
        ((status, text),) = answers(tmp_path, ("/api/jobs", body))
        assert (status, "found 200001, expected up to 10000 at a time" in text) == (400, True)
    assert len(looked_at) <= 2
