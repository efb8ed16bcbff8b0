"""`/livez` and `/readyz`: without a key, one question to the pool for many probes, and a reason if it is not ready."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.status_values import PoolStatus, WorkerStatus
from modelpool.actors.http.application import application
from modelpool.actors.http.native.health import Health, readiness_of
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.values.specs.spec import WorkerId
from tests.actors.http.asgi import RefusingPool, call
from tests.each_case import each_case

NOBODY = PoolStatus((), {}, {}, 0, 0, 0, 0, 0, 0)


def status_of(*states: str) -> PoolStatus:
    workers = tuple(WorkerStatus(WorkerId(f"gpu-{i}"), state, "", 1, 0, 0, (), None) for i, state in enumerate(states))
    return dataclasses.replace(NOBODY, workers=workers)


class StatusPool(RefusingPool):
    """Answers with one status, or fails, and counts the questions."""

    def __init__(self, answer: PoolStatus | Exception) -> None:
        self.answer = answer
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def status(self) -> PoolStatus:
        self.asked += 1
        assert self.may_answer.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@each_case(
    ("states", "why"),
    [
        (("starting", "idle"), ""),
        (("busy", "busy"), ""),
        (("given_up", "busy"), ""),
        (("starting",), "no worker is up yet"),
        ((), "no worker is up yet"),
        (("given_up", "given_up"), "no worker could be started"),
    ],
)
def test_a_pool_is_ready_when_a_worker_is_up(states: tuple[str, ...], why: str) -> None:
    found = readiness_of(status_of(*states))
    assert found.why.startswith(why), found
    assert bool(found.why) == bool(why), found


def test_probes_need_no_key_and_tell_nothing_but_counts(tmp_path: Path) -> None:
    pool = StatusPool(status_of("idle", "starting"))
    app = application(pool, ServeSection(keys={"ann": "a" * 20}), tmp_path)

    async def work() -> None:
        live, ready, other = [await call(app, "GET", path) for path in ("/livez", "/readyz", "/api/status")]
        assert (live.status, live.json) == (200, {"status": "live"})
        assert (ready.status, ready.json) == (200, {"status": "ready", "workers": 1, "wanted": 2})
        assert other.status == 401
        for path in ("/livez", "/readyz"):  # as some load balancers ask
            assert (await call(app, "HEAD", path)).status == 200, path
        pool.answer = PoolLost("the controller of the pool of ann is gone")
        await asyncio.sleep(1.1)
        lost = await call(app, "GET", "/readyz")
        assert (lost.status, lost.json["why"]) == (503, "the pool is gone")
        assert (await call(app, "GET", "/livez")).status == 200

    asyncio.run(work())


def test_many_probes_ask_the_pool_once() -> None:
    """Anybody may call them: a thread for each would take all threads of the server."""
    pool: Any = StatusPool(status_of("idle"))
    pool.may_answer.clear()

    async def work() -> None:
        health = Health(pool)
        probes = [asyncio.create_task(health.readiness()) for _ in range(500)]
        await asyncio.sleep(0.05)
        probes[0].cancel()  # its client has gone
        pool.may_answer.set()
        found = await asyncio.gather(*probes[1:])
        assert {each.why for each in found} == {""}
        assert pool.asked == 1

    asyncio.run(work())
