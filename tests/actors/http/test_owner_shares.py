"""What users hold at a time over HTTP comes back, however it ends, and takes nothing from other users."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.http_attacks import graph
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.comfy import comfy_prompts
from modelpool.actors.http.native import native_api
from modelpool.actors.http.service.bodies import MOST_BODIES_OF_OWNER
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.submissions import HttpSubmission
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.fake_page_pool import SLOW, open_page_pool

KEYS = {"ann": "a" * 20, "bob": "b" * 20}
#: pixels of an image that a request has in these tests
PIXELS = 64 * 64
Ask = Callable[..., Awaitable[Answer]]


def png() -> str:
    content = BytesIO()
    Image.new("RGB", (64, 64), "blue").save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def asked(app: Any) -> Ask:
    """Calls of `app` by a user."""

    async def ask(user: str, method: str, path: str, value: Any = None, **headers: str) -> Answer:
        body = b"" if value is None else json.dumps(value).encode()
        named = {"authorization": f"Bearer {KEYS[user]}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return await call(app, method, path, body, named)

    return ask


def test_held_pixels_come_back_however_a_submission_ends(tmp_path: Path) -> None:
    """A random sequence of submissions, ends, cancellations and mistakes of two users: each may hold two images."""
    chance = random.Random(1)
    with open_page_pool(6, output=tmp_path / "pool") as pool:
        app = application(pool, ServeSection(keys=KEYS, held_pixels=2 * PIXELS), tmp_path)
        ask = asked(app)

        async def run() -> None:
            waiting: dict[str, list[str]] = {"ann": [], "bob": []}
            for number in range(60):
                user = chance.choice(("ann", "bob"))
                kind = chance.choice(("slow", "slow", "fast", "wrong", "cancel"))
                if kind == "cancel":
                    if waiting[user]:
                        done = waiting[user].pop()
                        assert (await ask(user, "DELETE", f"/api/jobs/{done}")).status < 300
                        while (await ask(user, "GET", f"/api/jobs/{done}")).json["state"] != "ended":
                            await asyncio.sleep(0.01)
                    continue
                prompt = f"{SLOW if kind == 'slow' else 'a thing'} {number}"
                request = {"model": "shapes" if kind != "wrong" else "unknown", "prompt": prompt, "image": png()}
                answer = await ask(user, "POST", "/api/jobs", {**request, "strength": 0.5, "steps": 2})
                if len(waiting[user]) == 2:
                    assert answer.status == 429, (number, kind, answer.body)
                    assert "held" in answer.body.decode() or "pixels" in answer.body.decode()
                elif kind == "wrong":
                    assert answer.status == 400, answer.body
                else:
                    assert answer.status == 201, (number, kind, waiting, answer.body)
                    submission = answer.json["id"]
                    if kind == "slow":
                        waiting[user].append(submission)
                    while (
                        kind == "fast" and (await ask(user, "GET", f"/api/jobs/{submission}")).json["state"] != "ended"
                    ):
                        await asyncio.sleep(0.01)
            for user, submissions in waiting.items():
                for each in submissions:
                    await ask(user, "DELETE", f"/api/jobs/{each}")

        asyncio.run(asyncio.wait_for(run(), 120))


def test_large_bodies_that_arrive_have_a_share_for_each_user(tmp_path: Path) -> None:
    """One user sends as many large bodies as are permitted, and stops in the middle: another one is not refused."""
    limits = LimitLog()
    most = 2 << 20
    app = application(RefusingPool(), ServeSection(keys=KEYS, upload_bytes=most), tmp_path, limits=limits)
    body = json.dumps({"model": "shapes", "prompt": "x", "image": "A" * (most - 100)}).encode()

    async def run() -> None:
        goes_on = asyncio.Event()

        async def stopped(user: str) -> int:
            """A call with a body that stops before its last byte until `goes_on`."""
            parts = [body[:-1], body[-1:]]
            sent: list[dict[str, Any]] = []

            async def receive() -> dict[str, Any]:
                if len(parts) == 1:
                    await goes_on.wait()
                if not parts:
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            names = {"host": "127.0.0.1", "content-type": "application/json", "authorization": f"Bearer {KEYS[user]}"}
            headers = [(name.encode(), value.encode()) for name, value in names.items()]
            scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/api/jobs"}
            scope |= {"raw_path": b"/api/jobs", "query_string": b"", "root_path": "", "headers": headers}  # type: ignore[dict-item]
            await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)
            return int(sent[0]["status"])

        held = [asyncio.create_task(stopped("ann")) for _ in range(MOST_BODIES_OF_OWNER)]
        await asyncio.sleep(0.1)
        refused = await asked(app)("ann", "POST", "/api/jobs", json.loads(body))
        assert (refused.status, limits.count("arriving_bytes")) == (429, 1)
        assert (await asked(app)("bob", "POST", "/api/jobs", json.loads(body))).status == 400, "it was read"
        goes_on.set()
        assert set(await asyncio.gather(*held)) == {400}
        assert (await asked(app)("ann", "POST", "/api/jobs", json.loads(body))).status == 400, "the share came back"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_kept_submissions_keys_and_workflows_of_one_user_displace_none_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_api, "MOST_KEYS", 3)
    monkeypatch.setattr(comfy_prompts, "MOST_KEPT", 4)
    with open_page_pool(output=tmp_path / "pool") as pool:
        ask = asked(application(pool, ServeSection(keys=KEYS, kept_submissions=4), tmp_path))

        async def submitted(user: str, key: str) -> str:
            request = {"model": "shapes", "prompt": "a thing", "steps": 1, "seed": 1}
            answer = await ask(user, "POST", "/api/jobs", request, idempotency_key=key)
            assert answer.status == 201, answer.body
            found = str(answer.json["id"])
            while (state := await ask(user, "GET", f"/api/jobs/{found}")).status == 200:
                if state.json["state"] == "ended":
                    break
                await asyncio.sleep(0.01)
            return found

        async def run() -> None:
            bobs = await submitted("bob", "one")
            anns = [await submitted("ann", f"{number}") for number in range(8)]
            assert await submitted("bob", "one") == bobs, "the same key of another user is another key"
            assert await submitted("ann", "7") == anns[7]
            assert await submitted("ann", "0") != anns[0], "the oldest keys of a user are forgotten"
            found = {each: (await ask("ann", "GET", f"/api/jobs/{each}")).status for each in anns}
            assert [found[each] for each in anns[:4]] == [404] * 4
            assert (await ask("bob", "GET", f"/api/jobs/{bobs}")).status == 200
            for user, count in (("bob", 1), ("ann", 8)):
                for number in range(count):
                    nodes = json.loads(json.dumps(graph()))
                    nodes["6"]["inputs"]["seed"] = number
                    answer = await ask(user, "POST", "/prompt", {"prompt": nodes})
                    assert answer.status == 200, answer.body
                    prompt_id = answer.json["prompt_id"]
                    while not (await ask(user, "GET", f"/history/{prompt_id}")).json:
                        await asyncio.sleep(0.01)
            assert len((await ask("bob", "GET", "/history")).json) == 1
            assert len((await ask("ann", "GET", "/history")).json) == 3

        asyncio.run(asyncio.wait_for(run(), 60))


def test_idempotency_keys_keep_no_submission_that_the_server_has_forgotten(tmp_path: Path) -> None:
    """Each key kept its submission with all ends: 2000 of a user, whatever `kept_submissions` says."""
    with open_page_pool(output=tmp_path / "pool") as pool:
        ask = asked(application(pool, ServeSection(keys=KEYS, kept_submissions=2), tmp_path))

        async def run() -> None:
            request = {"model": "shapes", "prompt": "a thing", "steps": 1, "seed": 1}
            made = []
            for number in range(6):
                answer = await ask("ann", "POST", "/api/jobs", request, idempotency_key=str(number))
                made.append(answer.json["id"])
                while (await ask("ann", "GET", f"/api/jobs/{made[-1]}")).json["state"] != "ended":
                    await asyncio.sleep(0.01)
            gc.collect()
            alive = {each.id for each in gc.get_objects() if isinstance(each, HttpSubmission)}
            assert alive & set(made) == set(made[-2:])
            again = await ask("ann", "POST", "/api/jobs", request, idempotency_key="5")
            assert (again.status, again.json["id"], again.json["succeeded"]) == (201, made[5], 1)
            again = await ask("ann", "POST", "/api/jobs", request, idempotency_key="0")
            assert again.status == 410, again.body
            assert f"submission {made[0]} has ended" in again.body.decode()

        asyncio.run(asyncio.wait_for(run(), 60))
