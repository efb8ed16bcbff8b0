"""`/livez` and `/readyz`: whether this server answers, and whether its pool can run jobs. Both need no key, for probes
of Kubernetes, load balancers and process managers, and tell nothing but counts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelpool.actors.http.service.gate import LIVE_PATH, READY_PATH
from modelpool.actors.outputs.results.outcomes import PoolLost

if TYPE_CHECKING:
    from modelpool.actors.control.status_values import PoolStatus
    from modelpool.actors.http.service.ports import HttpPool

#: calls without a key: they cost the pool one question in this time, however many there are
FRESH_SECONDS = 1.0
#: a pool that takes longer to answer is not ready
ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a pool can run jobs; if not, `why`. `workers` are up, of `wanted`."""

    why: str
    workers: int = 0
    wanted: int = 0


def readiness_of(status: PoolStatus) -> Readiness:
    """Return whether a pool can run jobs. One without workers that may start some is ready: jobs have them started."""
    wanted = len(status.workers)
    up = sum(worker.state in ("idle", "busy") for worker in status.workers)
    out_of_use = sum(worker.order in ("cordoned", "draining", "drained") for worker in status.workers)
    if wanted and out_of_use == wanted and status.scaling is None:
        return Readiness("every worker is cordoned or drained by the operator", up, wanted)
    given_up = sum(worker.state == "given_up" for worker in status.workers)
    if up or (status.scaling is not None and given_up == 0):
        return Readiness("", up, wanted)
    if wanted and given_up == wanted:
        return Readiness("no worker could be started; `modelpool status` has the reasons", up, wanted)
    return Readiness("no worker is up yet", up, wanted)


class Health:
    """Asks the pool at most once in FRESH_SECONDS. Belongs to one event loop."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._asking: asyncio.Task[Readiness] | None = None
        self._asked_at = -FRESH_SECONDS

    async def readiness(self) -> Readiness:
        """Return whether the pool can run jobs, as it was at most FRESH_SECONDS ago."""
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and now - self._asked_at >= FRESH_SECONDS):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        try:
            # callers that go, and a pool that does not answer, leave the question to the next ones
            return await asyncio.wait_for(asyncio.shield(self._asking), ANSWER_SECONDS)
        except TimeoutError:
            return Readiness("the pool does not answer")

    async def _ask(self) -> Readiness:
        try:
            return readiness_of(await asyncio.to_thread(self._pool.status))
        except PoolLost:
            return Readiness("the pool is gone")


def health_router(pool: HttpPool) -> APIRouter:
    """Return the calls for probes."""
    router = APIRouter(tags=["health"])
    health = Health(pool)

    @router.head(LIVE_PATH, include_in_schema=False)
    @router.get(LIVE_PATH, summary="Whether this server answers; needs no key")
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @router.head(READY_PATH, include_in_schema=False)
    @router.get(READY_PATH, summary="Whether the pool can run jobs; needs no key, 503 if it cannot")
    async def ready() -> JSONResponse:
        found = await health.readiness()
        body = {"status": "not ready" if found.why else "ready", "workers": found.workers, "wanted": found.wanted}
        return JSONResponse(body | ({"why": found.why} if found.why else {}), 503 if found.why else 200)

    return router
