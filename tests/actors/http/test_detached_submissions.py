"""Idempotency keys in a pool with a journal: submissions outlive the server, and keep their inputs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.detached import job_service
from modelpool.actors.control.detached.job_service import JobsProgress
from modelpool.actors.http.application import application
from tests.actors.control.detached.test_job_service import Service, opened
from tests.actors.fakes import ENDLESS
from tests.actors.http.asgi import Answer, call

KEYS = {"ann": "a" * 20, "bob": "b" * 20}


def test_a_key_means_the_same_submission_for_the_next_server(tmp_path: Path) -> None:
    """The image that the caller sent is a file then: it must last until the job runs."""
    with opened(tmp_path) as service:
        content = BytesIO()
        Image.new("RGB", (64, 64), "blue").save(content, "PNG")
        image = base64.b64encode(content.getvalue()).decode()
        request = {"model": "shapes", "prompt": "a red circle", "steps": 2, "image": image, "strength": 0.5}
        body = json.dumps([request, {**request, "prompt": "a blue square"}]).encode()
        settings = ServeSection(keys=KEYS)

        def headers(user: str) -> dict[str, str]:
            return {"authorization": f"Bearer {KEYS[user]}", "idempotency-key": "order 1"}

        async def submitted(user: str) -> dict[str, Any]:
            app = application(service.pool, settings, service.out)
            answer = await call(app, "POST", "/api/jobs", body, headers(user))
            assert answer.status == 201, answer.body
            return answer.json

        async def followed(submission_id: str, user: str) -> Any:
            app = application(service.pool, settings, service.out)
            answer = await call(app, "GET", f"/api/jobs/{submission_id}/events", b"", headers(user))
            if answer.status != 200:
                return answer.status
            last = answer.body.decode().strip().rpartition("data: ")[2]
            output = await call(app, "GET", f"/api/jobs/{submission_id}/outputs/1", b"", headers(user))
            return json.loads(last), output.body[:4]

        first = asyncio.run(submitted("ann"))
        assert first["detached"] is True
        again = asyncio.run(submitted("ann"))
        assert again["id"] == first["id"]
        other = asyncio.run(submitted("bob"))
        assert other["id"] != first["id"]
        ended, output = asyncio.run(followed(first["id"], "ann"))
        assert (ended["state"], ended["succeeded"], output) == ("ended", 2, b"\x89PNG")
        assert asyncio.run(followed(first["id"], "bob")) == 404
        assert len(service.pool.detached()) == 2
        assert len(list((service.out / "inputs").iterdir())) == 1


def test_the_history_of_a_journaled_job_is_found_in_every_state(tmp_path: Path, monkeypatch: Any) -> None:
    """The pool knows it by another id, NAME.EPOCH.NUMBER-INDEX, and not before it is sent: both gave 404."""
    for name in ("LEAST_WINDOW", "WINDOW", "CHUNK"):
        monkeypatch.setattr(job_service, name, 4)
    with opened(tmp_path) as service:
        asyncio.run(_read_histories(service))


async def _read_histories(service: Service) -> None:
    app = application(service.pool, ServeSection(keys=KEYS), service.out)

    async def answer(method: str, path: str, user: str = "ann", query: str = "", body: bytes = b"") -> Answer:
        return await call(app, method, path, body, {"authorization": f"Bearer {KEYS[user]}"}, query)

    async def submit(*prompts: str) -> str:
        requests = [{"model": "shapes", "prompt": prompt, "seed": seed} for seed, prompt in enumerate(prompts)]
        body = json.dumps({"requests": requests, "detached": True}).encode()
        return str((await answer("POST", "/api/jobs", body=body)).json["id"])

    async def history(submission: str, index: int) -> dict[str, Any]:
        """By the calls of both interfaces, which agree."""
        path = f"/api/jobs/{submission}"
        while True:
            why = await answer("GET", f"{path}/why", query=f"index={index}")
            page = await answer("GET", f"/api/job-history/{submission}-{index}")
            story = await answer("GET", f"{path}/story", query=f"index={index}")
            assert [each.status for each in (why, page, story)] == [200] * 3, (index, why.body)
            later = await answer("GET", f"/api/job-history/{submission}-{index}")
            if later.json["lines"] == page.json["lines"]:  # the job went on between the calls
                break
        assert [why.json["status"], why.json["job_id"]] == [page.json["status"], page.json["job_id"]]
        assert story.json["lines"] == page.json["lines"]
        return why.json

    async def until(is_true: Callable[[JobsProgress], bool], submission: str) -> None:
        jobs = service.pool.attach(submission)
        await asyncio.to_thread(service.until, lambda: is_true(jobs.progress()))

    done = await submit("a thing")
    await until(lambda now: now.record.succeeded == 1, done)
    found = await history(done, 0)
    assert (found["status"], len(found["tasks"])) == ("succeeded", 4)
    long = await submit(*(f"{ENDLESS} {number}" for number in range(5)))
    await until(lambda now: bool(now.running), long)
    # its two GPUs may take any two of the four that it has been sent
    sent = [await history(long, index) for index in range(4)]
    assert {(found["status"], len(found["tasks"])) for found in sent} == {("active", 4)}
    assert any(task["attempts"] for found in sent for task in found["tasks"])
    assert any(task["wait"] for found in sent for task in found["tasks"]), "what does not run says why"
    # what holds a submission is known by polls, and this one may have been held when it was polled last
    while "waits in the journal" not in (found := await history(long, 4))["note"]:
        await asyncio.sleep(0.01)
    assert (found["status"], found["tasks"]) == ("active", [])
    for path, user in ((f"{long}-0", "bob"), (f"{long}-9", "ann"), ("unknown-0", "ann")):
        assert (await answer("GET", f"/api/job-history/{path}", user)).status == 404, path
    await answer("DELETE", f"/api/jobs/{long}")
    while (await answer("GET", f"/api/jobs/{long}")).json["state"] != "ended":
        await asyncio.sleep(0.01)
    found = await history(long, 4)
    assert (found["status"], "no longer knows" in found["note"]) == ("cancelled", True)
