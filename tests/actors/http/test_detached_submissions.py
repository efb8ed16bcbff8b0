"""Idempotency keys in a pool with a journal: submissions outlive the server, and keep their inputs."""

from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from modelpool.actors.http.application import application
from modelpool.actors.settings.serve_section import ServeSection
from tests.actors.detached.test_job_service import opened
from tests.actors.http.asgi import call

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
