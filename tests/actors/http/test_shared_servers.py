"""Several callers of one server: what one of them has or chooses does not change what another one sees."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.metrics.families import counter
from modelpool.actors.control.status import FailedJob, PoolStatus, RunStatus, WorkerStatus
from modelpool.actors.http.application import application
from modelpool.pool.values.specs.spec import WorkerId
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH
from tests.actors.http.service.test_submissions import OrderedJobs, OrderedPool

KEYS = {"ann": "a" * 20, "bob": "b" * 20}


class SharedPool(OrderedPool, RefusingPool):
    """A pool with jobs that end when a test says so."""


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


def test_users_do_not_see_what_others_run_and_fail(tmp_path: Path) -> None:
    """Totals are of all users; without keys, everything is shown."""
    failed = (FailedJob("s0-0", "of ann", 1.0), FailedJob("s1-0", "of bob", 1.0))
    by_user = {"ann": {"denoise": 1}, "bob": {"denoise": 2}}
    run = RunStatus("s1-0", "bob", "denoise", 1, 0, 0, 1.0, False)
    worker = WorkerStatus(WorkerId("w0"), "busy", "", 1, 1, 1, (), "denoise", run=run)
    seconds: dict[tuple[str, ...], float] = {("ann",): 1.0, ("bob",): 2.0}

    class BusyPool(SharedPool):
        def status(self) -> PoolStatus:
            return replace(
                super().status(),
                workers=(worker,),
                waiting={"denoise": 3},
                failures=failed,
                waiting_by_user=by_user,
                seconds_by_user={"ann": 1.0, "bob": 2.0},
            )

        def metrics(self) -> Any:
            used = counter("modelpool_user_gpu_seconds_total", "Used.", seconds, "user")
            return (used, counter("modelpool_all_total", "All.", {(): 3.0}))

    body = json.dumps({"model": "shapes", "prompt": "x"}).encode()

    async def seen(settings: ServeSection, *users: str) -> list[tuple[Any, str]]:
        app = application(BusyPool(), settings, tmp_path)
        headers = [headers_of(user) for user in users]
        for each in headers:
            assert (await call(app, "POST", "/api/jobs", body, each)).status == 201
        return [
            (
                (await call(app, "GET", "/api/status", b"", each)).json,
                (await call(app, "GET", "/metrics", b"", each)).body.decode(),
            )
            for each in headers
        ]

    shared = asyncio.run(seen(ServeSection(keys=KEYS), "ann", "bob"))
    for (status, metrics), user, other in zip(shared, ("ann", "bob"), ("bob", "ann"), strict=True):
        assert [job["message"] for job in status["failures"]] == [f"of {user}"]
        assert list(status["waiting_by_user"]) == list(status["seconds_by_user"]) == [user]
        assert status["waiting"] == {"denoise": 3}
        assert status["workers"][0]["run"]["job_id"] == ("s1-0" if user == "bob" else "")
        assert (f'"{user}"' in metrics, f'"{other}"' in metrics) == (True, False)
        assert "modelpool_all_total" in metrics
    ((status, metrics), *_) = asyncio.run(seen(ServeSection(), "ann"))
    assert len(status["failures"]) == len(status["waiting_by_user"]) == 2
    assert '"ann"' in metrics
    assert '"bob"' in metrics
