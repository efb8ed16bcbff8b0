"""When Ray's control service counts as lost, and what waits for it: nothing on the event loop of the controller."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from modelpool.actors.control.cluster_facts import ClusterFacts
from modelpool.actors.control.fleet import WorkerLost
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.actor_options import WorkerNeeds
from modelpool.actors.ray.control_service import INTERVAL_SECONDS, ControlService
from modelpool.actors.ray.ray_fleet import LEAST_START_SECONDS, RayFleet, start_limit_seconds
from modelpool.actors.ray.ray_losses import LossExaminer
from modelpool.actors.ray.ray_nodes import RayNodes
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.model.messages import LossCause


class Service:
    """A control service and a clock under the test's hand."""

    def __init__(self, patience_seconds: float = 30.0) -> None:
        self.now, self.is_up, self.asked = 0.0, True, 0
        self.is_connected = True
        self.seen = ControlService(
            "127.0.0.1:1", self.ask, lambda: self.now, patience_seconds, lambda address: self.is_connected
        )

    def ask(self) -> bool:
        self.asked += 1
        self.now += 0.0 if self.is_up else 2.0
        return self.is_up

    def problem_after(self, seconds: float) -> str:
        """The problem after that time, in which it was looked at all the time."""
        end = self.now + seconds
        problem = self.seen.problem()
        while self.now < end:
            self.now += 1.0
            problem = self.seen.problem()
        return problem


def test_a_service_that_answers_again_in_time_was_never_lost() -> None:
    service = Service()
    assert service.problem_after(60.0) == ""
    service.is_up = False
    assert service.problem_after(25.0) == ""
    service.is_up = True
    assert service.problem_after(10.0) == ""
    service.is_up = False
    assert service.problem_after(25.0) == ""
    problem = service.problem_after(8.0)
    assert problem.startswith("the control service of Ray (GCS) at 127.0.0.1:1 has not answered for 3")


def test_one_failed_check_is_no_loss_however_long_ago_it_was() -> None:
    """A driver that calls rarely: the silence counts from one check to the next."""
    service = Service()
    service.is_up = False
    service.seen.problem()
    service.is_up = True
    service.now += 3600.0
    assert service.seen.problem() == ""


def test_a_program_that_has_left_ray_asks_it_nothing() -> None:
    """The second connection of a program, after the first was closed: its next call started a whole Ray of its own on
    the machine, for nothing, and ended with "Can't find actor" of Ray. Here with the Ray of this process: none."""
    service = Service()
    service.is_connected = False
    real = ControlService("127.0.0.1:1", service.ask)
    for seen in (service.seen, real):
        told = r"this program has left the Ray at 127\.0\.0\.1:1: .*; close that one last"
        with pytest.raises(PoolLost, match=told), seen.call():
            pytest.fail("a call began")
        assert "has left the Ray" in seen.problem()
    assert service.asked == 0


def test_the_service_is_asked_at_most_once_per_interval() -> None:
    service = Service()
    for _ in range(1000):
        service.now += INTERVAL_SECONDS / 100
        service.seen.problem()
    assert service.asked <= 11


@pytest.fixture
def blocked() -> threading.Event:
    """Set at the end of a test; until then, calls of Ray wait for it."""
    return threading.Event()


def test_a_creation_that_blocks_leaves_the_loop_free_and_ends_as_a_start_that_failed(blocked, monkeypatch) -> None:
    """Without the control service, Ray's creation of an actor does not return."""
    monkeypatch.setattr("modelpool.actors.ray.ray_fleet.CREATE_SECONDS", 0.2)
    monkeypatch.setattr("modelpool.actors.ray.ray_nodes.read_cluster", blocked.wait)

    async def scene() -> None:
        nodes = RayNodes()
        fleet = RayFleet(
            lambda new: blocked.wait(), lambda group: WorkerNeeds(), LossExaminer(nodes), partial(nodes.recent, 0.1)
        )  # type: ignore[arg-type, return-value]
        start = asyncio.ensure_future(fleet.start(WorkerId("gpu-0"), 1))
        turns = 0
        while not start.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10
        with pytest.raises(WorkerLost, match="its control service may be gone") as lost:
            await start
        assert lost.value.cause is LossCause.NO_NODE
        assert fleet.ping(WorkerId("gpu-0"), 1) is None
        fleet.end(WorkerId("gpu-0"), 1)
        nodes.close()

    try:
        asyncio.run(scene())
    finally:
        blocked.set()


def test_reading_the_cluster_takes_a_limited_time_and_few_threads(blocked, monkeypatch) -> None:
    monkeypatch.setattr("modelpool.actors.ray.ray_nodes.CALL_SECONDS", 0.02)
    monkeypatch.setattr("modelpool.actors.ray.ray_nodes.read_cluster", blocked.wait)

    async def scene() -> None:
        nodes = RayNodes()
        facts = ClusterFacts(nodes, needs_gpus=True)
        before = threading.active_count()
        for _ in range(5):
            await facts.read_names([NodeId("one")])
        assert facts.names == {}
        assert await facts.gpu_use() is None
        assert threading.active_count() <= before + 2
        nodes.close()

    try:
        asyncio.run(scene())
    finally:
        blocked.set()


def test_the_limit_of_a_start_follows_from_the_longest_one() -> None:
    assert start_limit_seconds(None, 600.0) == 600.0
    assert start_limit_seconds(1.0, 600.0) == LEAST_START_SECONDS
    assert start_limit_seconds(10.0, 600.0) == 200.0
    assert start_limit_seconds(100.0, 600.0) == 600.0
    assert start_limit_seconds(1.0, 60.0) == 60.0
