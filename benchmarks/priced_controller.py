"""A controller actor that also measures itself and its calls, for `benchmarks.task_price`.

Imports Ray immediately: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from modelpool.actors.config.config import ModelsSection
from modelpool.actors.control.pool_plan import PoolPlan
from modelpool.actors.graph.build_graph import build_stage_graph
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.ray.actor_options import COMPUTE
from modelpool.actors.ray.cluster import PLAIN, ControllerActor
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import CallId, ClientId, RunRequest, StageSubmission, SubmissionId
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.actors.fakes import MODELS, FakeCatalog

POLL_SECONDS = 60.0
#: functions that a profile shows
PROFILED = 60


class PricedController(ControllerActor):
    """A controller with measurements in its process, on its event loop."""

    async def nothing(self) -> None:
        """Do nothing."""

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process so far, for all threads."""
        return time.process_time()

    async def profile(self) -> None:
        """Begin to profile the event loop's thread; `profiled` ends it."""
        self._profile = cProfile.Profile(time.thread_time)
        self._profile.enable()

    async def profiled(self) -> str:
        """Return the functions with most CPU time of their own since `profile`, as text."""
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(PROFILED)
        return text.getvalue()

    async def relay(self) -> None:
        """Make an empty call to a worker."""
        await self._bare_call(0)

    async def bare_calls(self, count: int) -> list[float]:
        """Return the seconds of each of `count` sequential empty calls to a worker."""
        return await seconds_of_each(count, lambda _: self._bare_call(0))

    async def run_calls(self, count: int) -> list[float]:
        """Return the seconds of each of `count` sequential calls that run a task with a prepared request."""
        request = one_request()
        return await seconds_of_each(count, lambda _: self._run_call(0, request))

    async def flood(self, count: int, runs: bool) -> float:
        """Return calls per second, with one call at a time per worker."""
        numbers, request = iter(range(count)), one_request()
        workers = range(len(self._fleet._workers))

        async def keep_busy(worker: int) -> None:
            for _ in numbers:
                await (self._run_call(worker, request) if runs else self._bare_call(worker))

        started = time.perf_counter()
        await asyncio.gather(*(keep_busy(worker) for worker in workers))
        return count / (time.perf_counter() - started)

    async def tasks(self, count: int, label: str) -> list[float]:
        """Return the seconds of each of `count` sequential tasks, from submission to the client event."""
        client, cursor = ClientId(f"inside {label}"), 0
        await self.enter(client)

        async def one(number: int) -> None:
            nonlocal cursor
            stage = _encoding(f"{label} {number}")
            await self.submit_stage(StageSubmission(client, SubmissionId(f"{label}.{number}"), stage, {}))
            ended = ()
            while not ended:
                news = await self.events(client, cursor, POLL_SECONDS)
                ended, cursor = news.ended, news.cursor

        seconds = await seconds_of_each(count, one)
        await self.leave(client)
        return seconds

    def _bare_call(self, worker: int) -> Awaitable[object]:
        handle = tuple(self._fleet._workers.values())[worker].handle
        return handle.ping.options(concurrency_group=COMPUTE).remote()

    async def _run_call(self, worker: int, request: RunRequest) -> None:
        await self._fleet.run(*tuple(self._fleet._workers)[worker], CallId(request.run), ((request, ()),)).reports


def start_priced_controller(plan: PoolPlan, namespace: str, name: str) -> ActorHandle[Any]:
    """Start a controller; return when it answers. Its workers may still be starting."""
    options = {"num_cpus": 0, "namespace": namespace, "name": name, **PLAIN}
    controller: ActorHandle[Any] = (
        ray.remote(PricedController).options(**options).remote(plan, name, ModelsSection(), None, namespace)
    )
    ray.get(controller.open.remote())
    return controller


def one_request() -> RunRequest:
    """Return a request to run the shortest stage, as a controller sends it."""
    cut = build_stage_graph(_encoding("a text"), JobId("one"), FakeCatalog())
    (task,) = cut.job.tasks
    return RunRequest(task, cut.works[task.task_id], 1, 0)


def _encoding(text: str) -> StageRequest:
    return StageRequest(Stage.ENCODE, GenerateRequest(model=MODELS[0], prompt=text))


async def seconds_of_each(count: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    """Return the seconds of each of `count` sequential calls."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - started)
    return seconds
