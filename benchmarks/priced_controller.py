"""A controller, as an actor, that also measures itself against the calls that it makes: see `benchmarks.task_price`.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from modelpool.actors.control.pool_plan import PoolPlan
from modelpool.actors.graph.build_graph import build_stage_graph
from modelpool.actors.graph.orders import EncodeOrder
from modelpool.actors.ray.cluster import PLAIN, ControllerActor
from modelpool.actors.ray.ray_fleet import COMPUTE
from modelpool.actors.wire.messages import ClientId, RunRequest, StageSubmission, SubmissionId
from modelpool.actors.wire.packing import packed, unpacked
from modelpool.pool.specs.spec import JobId
from tests.actors.fakes import MODELS, FakeCatalog

POLL_SECONDS = 60.0


class PricedController(ControllerActor):
    """Measures in its own process, on its own event loop."""

    async def nothing(self) -> None:
        """A call that does nothing."""

    async def cpu_seconds(self) -> float:
        """Of this process so far, all threads."""
        return time.process_time()

    async def relay(self) -> None:
        """A call that is passed on to a worker."""
        await self._bare_call(0)

    async def bare_calls(self, count: int) -> list[float]:
        """Seconds of each of `count` calls of a worker that do nothing, one after the other."""
        return await seconds_of_each(count, lambda _: self._bare_call(0))

    async def run_calls(self, count: int) -> list[float]:
        """Seconds of each of `count` calls that run a task whose request is ready, one after the other."""
        request = one_request()
        return await seconds_of_each(count, lambda _: self._run_call(0, request))

    async def flood(self, count: int, runs: bool) -> float:
        """Calls a second, one at a time at each worker."""
        numbers, request = iter(range(count)), one_request()
        workers = range(len(self._fleet._handles))

        async def keep_busy(worker: int) -> None:
            for _ in numbers:
                await (self._run_call(worker, request) if runs else self._bare_call(worker))

        started = time.perf_counter()
        await asyncio.gather(*(keep_busy(worker) for worker in workers))
        return count / (time.perf_counter() - started)

    async def tasks(self, count: int, label: str) -> list[float]:
        """Seconds of each of `count` tasks from submission to its news, one after the other."""
        client, cursor = ClientId(f"inside {label}"), 0
        await self.enter(client)

        async def one(number: int) -> None:
            nonlocal cursor
            order = EncodeOrder(MODELS[0], (), f"{label} {number}")
            await self.submit_stage(StageSubmission(client, SubmissionId(f"{label}.{number}"), order, {}))
            ended = ()
            while not ended:
                news = await self.news(client, cursor, POLL_SECONDS)
                ended, cursor = news.ended, news.cursor

        seconds = await seconds_of_each(count, one)
        await self.leave(client)
        return seconds

    def _bare_call(self, worker: int) -> Awaitable[object]:
        handle = tuple(self._fleet._handles.values())[worker]
        return handle.ping.options(concurrency_group=COMPUTE).remote()

    async def _run_call(self, worker: int, request: RunRequest) -> None:
        report, _ = tuple(self._fleet._runs.values())[worker].remote(packed(request))
        unpacked(await report)


def start_priced_controller(plan: PoolPlan, namespace: str, name: str) -> ActorHandle[Any]:
    """It answers, and its workers are on the way."""
    options = {"num_cpus": 0, "namespace": namespace, "name": name, **PLAIN}
    controller: ActorHandle[Any] = ray.remote(PricedController).options(**options).remote(plan)
    ray.get(controller.open.remote())
    return controller


def one_request() -> RunRequest:
    """A run of the shortest stage, as a controller sends it."""
    cut = build_stage_graph(EncodeOrder(MODELS[0], (), "a text"), JobId("one"), FakeCatalog())
    (task,) = cut.job.tasks
    return RunRequest(task, cut.works[task.task_id], 1, 0)


async def seconds_of_each(count: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    """Seconds of each of `count` calls, one after the other."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - started)
    return seconds
