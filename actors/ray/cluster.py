"""Turns plain classes into Ray actors, and sets their resources.

Imports Ray at once: import this module after a session is open. Rules
1. Ray restarts and retries nothing (`max_restarts=0`, `max_task_retries=0`): the scheduler core decides that.
2. Workers belong to the controller and end with it; the controller belongs to the driver that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from modelpool.actors.control.catalog_service import CatalogService
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.pool_plan import PoolPlan
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.ray.ray_fleet import COMPUTE, CONTROL, WATCH, RayFleet
from modelpool.actors.wire.messages import StepDone
from modelpool.actors.wire.packing import packed, packed_result, result_of, unpacked
from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import Result
from modelpool.pool.specs.spec import NodeId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.tables.config import CORE_GC_OBJECTS

#: rule 1; and no record of each call in Ray's task list, which costs a fifth of a call: the event log has one
PLAIN: Mapping[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}

_PR_SET_PDEATHSIG = 1


class SystemClock:
    """Real time."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class ControllerActor(Controller):
    """A controller with Ray's fleet. All methods are coroutines: a plain one would block the whole actor."""

    def __init__(self, plan: PoolPlan) -> None:
        open_catalog = plan.open_catalog
        if plan.cache is not None:
            # known to this pool's processes only: whoever has it can read the files of its nodes
            plan = replace(plan, cache=replace(plan.cache, token=secrets.token_hex(32)))
            open_catalog = partial(open_catalog, cache=plan.cache, host=ray.util.get_node_ip_address())
        gc.set_threshold(CORE_GC_OBJECTS)
        me = ray.get_runtime_context().current_actor
        super().__init__(
            state=SchedulerState(plan.scheduler),
            fleet=RayFleet(lambda worker_id, incarnation: _create_worker(plan, worker_id, incarnation, me)),
            clock=SystemClock(),
            catalog=CatalogService(open_catalog),
            worker_ids=plan.worker_ids,
            budget_bytes=plan.budget_bytes,
            recorder=Recorder(plan.record, plan.scheduler),
        )


class GpuWorkerActor(GpuWorker):
    """A worker that reports its steps to a controller, and that does not outlive the node's raylet."""

    def __init__(self, worker_id: WorkerId, incarnation: int, plan: PoolPlan, controller: ActorHandle[Any]) -> None:
        _die_with_raylet()

        def on_step(step: StepDone) -> None:
            controller.step_done.remote(step)

        node = NodeId(ray.get_runtime_context().get_node_id())
        host = "" if plan.cache is None else ray.util.get_node_ip_address()
        super().__init__(worker_id, incarnation, plan.open_engine, on_step, node=node, cache=plan.cache, host=host)

    def run_packed(self, request: bytes, *inputs: Result | bytes) -> tuple[bytes, Result | bytes | None]:
        """As `run`, with request, inputs, report and result packed; see `RayFleet.run`."""
        report, result = self.run(unpacked(request), *map(result_of, inputs))
        return packed(report), packed_result(result, report.result_bytes)

    def run_batch_packed(self, requests: bytes, *inputs: Result | bytes) -> tuple[bytes | Result | None, ...]:
        """As `run_together`, packed; see `RayFleet.run_together`."""
        reports, results = self.run_batch(unpacked(requests), *map(result_of, inputs))
        sized = zip(reports, results, strict=True)
        return packed(reports), *(packed_result(result, report.result_bytes) for report, result in sized)


def start_controller(plan: PoolPlan, namespace: str, name: str) -> ActorHandle[Any]:
    """Start a controller and wait until it answers; its workers are still starting. Raises UserError if the name is
    taken, and if it cannot write its event log.
    """
    options = {"num_cpus": 0, "namespace": namespace, "name": name, **PLAIN}
    try:
        controller: ActorHandle[Any] = ray.remote(ControllerActor).options(**options).remote(plan)
    except ValueError as taken:
        raise UserError(f"this Ray cluster already has a pool called {name!r}; choose another name") from taken
    try:
        ray.get(controller.open.remote())
    except RayTaskError as raised:
        raise raised.cause from None
    return controller


def find_controller(namespace: str, name: str) -> ActorHandle[Any]:
    """Return the controller that another driver started. Raises UserError if there is none."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError as missing:
        raise UserError(
            f"no pool called {name!r} is running in namespace {namespace!r} of this Ray cluster"
        ) from missing


def _create_worker(
    plan: PoolPlan, worker_id: WorkerId, incarnation: int, controller: ActorHandle[Any]
) -> ActorHandle[Any]:
    actor_class = ray.remote(
        num_gpus=plan.gpus_per_worker,
        num_cpus=_cpu_slots(plan),
        **PLAIN,
        concurrency_groups={COMPUTE: 1, CONTROL: 2, WATCH: 1},
    )(GpuWorkerActor)
    worker: ActorHandle[Any] = actor_class.remote(worker_id, incarnation, plan, controller)
    return worker


def _cpu_slots(plan: PoolPlan) -> int:
    """Return Ray's CPU slots for one worker. Without a GPU: one on a cluster, so that Ray spreads the workers; none
    on a single node, where a second pool would otherwise wait for slots forever.
    """
    several_nodes = sum(bool(node["Alive"]) for node in ray.nodes()) > 1
    return 1 if several_nodes and not plan.gpus_per_worker else 0


def _die_with_raylet() -> None:
    """Have the kernel end this process with its raylet, which does not always manage to do it itself."""
    parent = Path(f"/proc/{os.getppid()}/comm")
    if parent.exists() and parent.read_text().strip() == "raylet":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
