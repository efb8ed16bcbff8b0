"""Who may call, how often, from where and with how much: keys, rates, queues, origins and sizes of bodies."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.server import PACKAGES, check_packages, listen
from modelpool.actors.http.service.access import AccessControl, Caller
from modelpool.actors.http.service.gate import Gate
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import Answer, RefusingPool, call

KEY = "k" * 20
OTHER = "evil.test"
KEYS = {"ann": KEY, "bob": "sha256:" + hashlib.sha256(b"b" * 20).hexdigest()}


def answer_to(settings: ServeSection, folder: Path, *calls: Any, **named: Any) -> list[Answer]:
    async def all_calls() -> list[Answer]:
        app = application(RefusingPool(), settings, folder)
        return [await call(app, *each, **named) for each in calls]

    return asyncio.run(all_calls())


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("headers", "user"),
    [
        ({"authorization": f"Bearer {KEY}"}, "ann"),
        ({"authorization": f"bearer {'b' * 20}"}, "bob"),
        ({"authorization": basic(KEY)}, "ann"),
        ({"x-api-key": "b" * 20}, "bob"),
    ],
)
def test_a_key_names_its_user(headers: dict[str, str], user: str) -> None:
    access = AccessControl(ServeSection(keys=KEYS), lambda: 0.0)
    assert access.caller(headers) == Caller(user)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic !!", basic("wrong"), "Bearer \xe9"])
def test_calls_without_a_known_key_are_refused(header: str, tmp_path: Path) -> None:
    paths = ("/api/jobs", "/v1/models", "/sdapi/v1/samplers", "/object_info", "/docs", "/openapi.json", "/nowhere")
    answers = answer_to(
        ServeSection(keys=KEYS), tmp_path, *(("GET", path) for path in paths), headers={"authorization": header}
    )
    assert {answer.status for answer in answers} == {401}
    assert all("www-authenticate" in answer.headers for answer in answers)


class KeepingPool(RefusingPool):
    """Keeps the priorities that requests have when they reach the pool, and refuses them."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        kept = list(requests)
        self.priorities += [request.priority for request in kept]
        return super().submit(kept)


def test_the_priority_of_a_key_is_the_default_and_the_most_of_its_requests(tmp_path: Path) -> None:
    pool = KeepingPool()

    async def statuses(settings: ServeSection, key: str, *priorities: int | None) -> list[int]:
        app, found = application(pool, settings, tmp_path), []
        for priority in priorities:
            wanted = {"model": "shapes", "prompt": "x"} | ({} if priority is None else {"priority": priority})
            headers = {"authorization": f"Bearer {key}"}
            found.append((await call(app, "POST", "/api/jobs", json.dumps(wanted).encode(), headers)).status)
        return found

    settings = ServeSection(keys=KEYS, priorities={"ann": 5})
    assert asyncio.run(statuses(settings, KEY, None, 5, -3, 6)) == [400, 400, 400, 403]
    assert asyncio.run(statuses(settings, "b" * 20, None, 0, 1)) == [400, 400, 403]
    assert asyncio.run(statuses(ServeSection(keys=KEYS), KEY, 7)) == [400]
    assert pool.priorities == [5, 5, -3, 0, 0, 7]
    for wrong in ({"carl": 1}, {"ann": 1.5}, {"ann": True}, {"ann": 10**6}, 3):
        with pytest.raises(UserError, match="priorities"):
            ServeSection(keys=KEYS, priorities=wrong)


def test_a_deadline_lifts_no_job_above_others_of_the_priority_of_its_key(tmp_path: Path) -> None:
    pool = KeepingPool()

    async def answers(settings: ServeSection, key: str, *calls: tuple[str, dict[str, Any]]) -> list[Answer]:
        app, headers = application(pool, settings, tmp_path), {"authorization": f"Bearer {key}"}
        made = {"model": "shapes", "prompt": "x", "deadline": "10m"}
        return [await call(app, "POST", path, json.dumps(made | more).encode(), headers) for path, more in calls]

    settings, other = ServeSection(keys=KEYS, priorities={"ann": 5}), "b" * 20
    native, openai = "/api/jobs", "/v1/images/generations"
    at_own = [(native, {}), (native, {"priority": 5}), (openai, {"size": "64x64"}), (native, {"priority": 4})]
    found = asyncio.run(answers(settings, KEY, *at_own))
    assert [each.status for each in found] == [403, 403, 403, 400]
    for refused in found[:3]:
        message = refused.json["error"]["message"]
        assert message.startswith("deadline: found 600 s at priority 5, expected a priority below 5"), message
    found = asyncio.run(answers(settings, other, (native, {}), (native, {"priority": -1})))
    assert [each.status for each in found] == [403, 400]
    assert pool.priorities == [4, -1], "below the priority of the key, a deadline reaches the pool"
    assert [each.status for each in asyncio.run(answers(ServeSection(keys=KEYS), KEY, (native, {})))] == [400]


def test_a_request_for_another_user_is_refused(tmp_path: Path) -> None:
    body = json.dumps({"model": "shapes", "prompt": "x", "user": "bob"}).encode()
    headers = {"authorization": f"Bearer {KEY}"}
    (answer,) = answer_to(ServeSection(keys=KEYS), tmp_path, ("POST", "/api/jobs", body), headers=headers)
    assert (answer.status, "'bob'" in answer.json["error"]["message"]) == (403, True)


def test_calls_beyond_the_rate_are_refused_until_time_has_passed() -> None:
    now = 0.0
    access = AccessControl(ServeSection(keys=KEYS, requests_per_minute=3), lambda: now)
    for _ in range(3):
        access.admit_call(Caller("ann"))
    with pytest.raises(HttpProblem) as refused:
        access.admit_call(Caller("ann"))
    assert (refused.value.status, int(refused.value.headers["Retry-After"]) >= 20) == (429, True)
    access.admit_call(Caller("bob"))
    now = float(refused.value.headers["Retry-After"])
    access.admit_call(Caller("ann"))


def test_jobs_beyond_the_queue_are_refused() -> None:
    access = AccessControl(ServeSection(queued_jobs=10), lambda: 0.0)
    access.admit_jobs(unfinished=6, new=4)
    with pytest.raises(HttpProblem) as refused:
        access.admit_jobs(unfinished=7, new=4)
    assert refused.value.status == 429
    assert "Retry-After" in refused.value.headers
    with pytest.raises(HttpProblem) as refused:
        access.admit_jobs(unfinished=0, new=11)
    assert refused.value.status == 400, "waiting does not help"


def test_large_bodies_are_refused_before_they_are_read_and_while_they_are(tmp_path: Path) -> None:
    settings = ServeSection(upload_bytes="1KiB")
    body = json.dumps({"prompt": "x" * 2000}).encode()
    for path in ("/api/jobs", "/v1/images/generations", "/sdapi/v1/txt2img", "/prompt"):
        known = ("POST", path, b"", {"content-length": "2000"})
        assert [answer.status for answer in answer_to(settings, tmp_path, ("POST", path, body), known)] == [413, 413]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": OTHER}, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        ({"host": "127.0.0.1:8000", "origin": f"http://{OTHER}"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_do_not_reach_a_server_without_keys(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    """A browser sends the origin of the page, and the name by which the page called the server."""
    (answer,) = answer_to(ServeSection(), tmp_path, ("GET", "/api/models"), headers=headers)
    assert answer.status == status


def test_other_machines_need_a_key() -> None:
    with pytest.raises(UserError, match=r"serve\.keys"):
        listen(ServeSection(host="0.0.0.0", port=0))
    with pytest.raises(UserError, match=r"serve\.keys"):
        listen(ServeSection(host="::", port=0))
    ServeSection(host="0.0.0.0", keys=KEYS).check_exposure()
    listen(ServeSection(port=0)).close()


def test_a_port_that_is_taken_is_named() -> None:
    with listen(ServeSection(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            listen(ServeSection(port=port))


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": {"ann": "short"}},
        {"keys": {"ann": "sha256:12"}},
        {"keys": {" ann": KEY}},
        {"port": True},
        {"port": 70000},
        {"upload_bytes": "lots"},
        {"url_hosts": [f"http://{OTHER}"]},
        {"webhook_secret": "short"},
        {"nothing": 1},
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ServeSection(**fields)


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(f'[serve]\nwebhook_secret = "{"s" * 20}"\n[serve.keys]\nann = "{KEY}"\n')
    config = PoolConfig.load(path)
    assert config.serve.keys == {"ann": KEY}
    for text in (config.describe(), config.describe(changes_only=True), repr(config)):
        assert KEY not in text
        assert "s" * 20 not in text
    assert "ann" in config.describe(changes_only=True)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr("modelpool.actors.http.server.PACKAGES", (*PACKAGES, "no_such_package"))
    with pytest.raises(UserError, match=r"no_such_package; install them: .*(setup serve|pip install)"):
        check_packages()


def test_a_call_that_the_end_of_the_server_cancels_is_answered() -> None:
    """uvicorn wrote a traceback for each."""

    async def run() -> Answer:
        async def never(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        settings = ServeSection()
        gate = Gate(never, AccessControl(settings, lambda: 0.0), settings, False, LimitLog())
        calling = asyncio.create_task(call(gate, "GET", "/api/jobs"))
        await asyncio.sleep(0)
        calling.cancel()
        return await calling

    answer = asyncio.run(run())
    assert (answer.status, "the server ends" in answer.body.decode()) == (503, True)
