"""Workers that wait for a node: the demand that Ray sees, its end, and the start timeout."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import ray

from modelpool.actors.control.cluster_view import ResourceDemand
from modelpool.actors.control.fleet import WorkerLost
from modelpool.actors.control.succession import WorkerOrigin
from modelpool.actors.ray.actor_options import COMPUTE, CONTROL, WATCH, WorkerNeeds
from modelpool.actors.ray.ray_fleet import RayFleet
from modelpool.actors.ray.ray_losses import LossExaminer
from modelpool.actors.ray.ray_nodes import RayNodes
from modelpool.actors.ray.survivors import Succession, detached_options, left_workers
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.model.messages import LossCause

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

FAR = WorkerNeeds(gpus=1.0, labels=(("modelpool-group", "far"),))
DEMAND = ResourceDemand((("GPU", 1.0),), (("modelpool-group", "far"),))


class Pending:
    """The methods of a worker that a start calls; no node for it exists."""

    def ping(self, epoch: int) -> None: ...
    def beat(self, epoch: int) -> bool: ...
    def start(self, epoch: int) -> None: ...
    def run_packed(self, request: bytes) -> None: ...


def create(new: WorkerOrigin) -> Any:
    groups = {COMPUTE: 1, CONTROL: 2, WATCH: 1}
    return ray.remote(**FAR.options, max_restarts=0, concurrency_groups=groups)(Pending).remote()


def create_detached(new: WorkerOrigin) -> Any:
    groups = {COMPUTE: 1, CONTROL: 2, WATCH: 1}
    options = {**FAR.options, **detached_options("modelpool", "mine", new)}
    return ray.remote(**options, max_restarts=0, concurrency_groups=groups)(Pending).remote()


def fleet(nodes: RayNodes, timeout_seconds: float, succession: Succession | None = None) -> RayFleet:
    return RayFleet(
        create if succession is None else create_detached,
        lambda group: FAR,
        LossExaminer(nodes),
        partial(nodes.recent, 0.1),
        lambda g: timeout_seconds,
        succession=succession,
    )


async def demand_is(nodes: RayNodes, *expected: ResourceDemand) -> None:
    """Wait until Ray sees exactly this demand."""
    while (await nodes.poll()).waiting != expected:
        await asyncio.sleep(0.1)


def test_a_pending_worker_is_demand_until_it_is_ended() -> None:
    async def scene() -> None:
        nodes = RayNodes()
        starting = fleet(nodes, 3600.0)
        start = asyncio.ensure_future(starting.start(WorkerId("far-0"), 1, "far"))
        await demand_is(nodes, DEMAND)
        start.cancel()
        starting.end(WorkerId("far-0"), 1)
        await demand_is(nodes)
        nodes.close()

    asyncio.run(scene())


def test_a_worker_that_waits_for_a_node_is_no_demand_of_a_pool_whose_controllers_are_gone() -> None:
    """It outlives its controller for the next one, and has no process yet that a lease could end."""

    async def scene() -> None:
        nodes = RayNodes()
        succession = Succession("modelpool", "mine", 7, 1.0, None, {"far": "now"}.get, lambda: None)
        starting = fleet(nodes, 3600.0, succession)
        start = asyncio.ensure_future(starting.start(WorkerId("far-0"), 1, "far"))
        await demand_is(nodes, DEMAND)
        while starting._demand.actor is None:
            await asyncio.sleep(0.1)
        start.cancel()  # and with it everything that the controller does
        await demand_is(nodes)
        assert left_workers("modelpool", "mine") == []
        nodes.close()

    asyncio.run(scene())


def test_a_start_that_waits_too_long_says_what_ray_reports() -> None:
    async def scene() -> None:
        nodes = RayNodes()
        starting = fleet(nodes, 1.0)
        with pytest.raises(WorkerLost) as failed:
            await starting.start(WorkerId("far-0"), 1, "far")
        assert failed.value.cause is LossCause.NO_NODE
        assert str(failed.value) == (
            "no node of group far came up within 1 s; Ray reports: no node has the labels modelpool-group=far"
        )
        starting.end(WorkerId("far-0"), 1)
        await demand_is(nodes)
        nodes.close()

    asyncio.run(scene())
