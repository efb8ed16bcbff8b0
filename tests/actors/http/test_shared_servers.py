"""Several callers of one server: what one of them has or chooses does not change what another one sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from modelpool.actors.http.application import application
from modelpool.actors.settings.serve_section import ServeSection
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.test_comfy_api import GRAPH
from tests.actors.http.test_submissions import OrderedJobs, OrderedPool

KEYS = {"ann": "a" * 20, "bob": "b" * 20}


class SharedPool(OrderedPool, RefusingPool):
    """A pool whose jobs end when a test says so."""


def headers_of(user: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[user]}"}


def test_two_users_may_choose_the_same_id_for_their_workflows(tmp_path: Path) -> None:
    body = json.dumps({"prompt": GRAPH, "prompt_id": "mine"}).encode()

    async def work() -> None:
        app = application(SharedPool(), ServeSection(keys=KEYS), tmp_path)

        async def queued(user: str) -> int:
            return (await call(app, "POST", "/prompt", body, headers_of(user))).status

        async def waiting(user: str) -> list[str]:
            queue = (await call(app, "GET", "/queue", b"", headers_of(user))).json
            return [entry[1] for entry in queue["queue_pending"]]

        assert [await queued(user) for user in ("ann", "bob")] == [200, 200]
        assert [await waiting(user) for user in ("ann", "bob")] == [["mine"], ["mine"]]

    asyncio.run(work())


def test_an_id_is_used_once_by_calls_at_the_same_time(tmp_path: Path) -> None:
    body = json.dumps({"prompt": GRAPH, "prompt_id": "mine"}).encode()
    pool = SharedPool()

    async def work() -> list[int]:
        app = application(pool, ServeSection(), tmp_path)
        answers = await asyncio.gather(*(call(app, "POST", "/prompt", body) for _ in range(3)))
        return sorted(answer.status for answer in answers)

    assert asyncio.run(work()) == [200, 400, 400]
    assert len(pool.jobs) == 1


def test_a_stream_ends_with_an_error_if_the_pool_is_lost(tmp_path: Path) -> None:
    """Without it, a client takes the images so far for all of them."""

    class LostPool(SharedPool):
        def submit(self, requests: Any, **_: Any) -> OrderedJobs:
            jobs = super().submit(requests)
            jobs.lose()
            return jobs

    body = json.dumps({"prompt": "x", "stream": True}).encode()
    app = application(LostPool(), ServeSection(), tmp_path)
    answer = asyncio.run(call(app, "POST", "/v1/images/generations", body))
    assert answer.body.startswith(b"event: error\n"), answer.body
    assert b"the pool is gone" in answer.body
