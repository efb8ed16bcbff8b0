"""The watch over the nodes: what it posts, and that neither a mute cluster nor a refused drain stops it."""

from __future__ import annotations

import asyncio
from math import inf

from modelpool.actors.control.cluster_view import NodeEnd, NodeView
from modelpool.actors.control.node_watch import NodeWatch
from modelpool.pool.values.specs.spec import NodeId
from modelpool.scheduler.model.messages import NodeDraining
from tests.actors.fake_fleet import ManualClock, settle
from tests.actors.fake_nodes import UNIX, FakeNodes

A, B = NodeId("a"), NodeId("b")


class Setting:
    """A watch with a poll every two seconds."""

    def __init__(self) -> None:
        self.nodes = FakeNodes(NodeView(A), NodeView(B))
        self.clock = ManualClock()
        self.posted: list[NodeDraining] = []
        self.watch = NodeWatch(
            self.nodes, self.posted.append, self.clock, 2.0, unix_time=lambda: UNIX + self.clock.now()
        )

    def deadlines(self) -> list[tuple[str, float]]:
        """Node and deadline of the new events."""
        found = [(event.node, round(event.deadline, 6)) for event in self.posted]
        self.posted.clear()
        return found


def test_drains_are_found_once_changed_and_withdrawn() -> None:
    async def scene() -> None:
        setting = Setting()
        goes_on = asyncio.ensure_future(setting.watch.keep_watching())
        await settle()
        assert setting.deadlines() == []
        setting.nodes.change(A, drain_deadline=UNIX + 30)
        await setting.clock.advance(2.0)
        assert setting.deadlines() == [("a", 30.0)]
        await setting.clock.advance(10.0)
        assert setting.deadlines() == []
        setting.nodes.change(A, drain_deadline=UNIX + 20)
        await setting.clock.advance(2.0)
        assert setting.deadlines() == [("a", 20.0)]
        setting.nodes.change(A, drain_deadline=None)
        await setting.clock.advance(2.0)
        assert setting.deadlines() == [("a", inf)]
        goes_on.cancel()

    asyncio.run(scene())


def test_a_cluster_that_does_not_answer_is_polled_again() -> None:
    async def scene() -> None:
        setting = Setting()
        goes_on = asyncio.ensure_future(setting.watch.keep_watching())
        await settle()
        setting.nodes.problem = TimeoutError()
        setting.nodes.change(A, drain_deadline=UNIX + 30)
        await setting.clock.advance(4.0)
        assert setting.deadlines() == []
        setting.nodes.problem = None
        await setting.clock.advance(2.0)
        assert setting.deadlines() == [("a", 30.0)]
        goes_on.cancel()

    asyncio.run(scene())


def test_a_notice_of_a_worker_is_posted_at_once_and_passed_to_the_cluster_once() -> None:
    async def scene() -> None:
        setting = Setting()
        await setting.watch.poll()
        await setting.watch.notice(A, UNIX + 60, "spot")
        await setting.watch.notice(A, UNIX + 50, "spot")
        assert setting.deadlines() == [("a", 60.0), ("a", 50.0)]
        assert setting.nodes.drained == [(A, UNIX + 60)]
        setting.nodes.change(A, drain_deadline=UNIX + 60)  # the cluster's later deadline does not replace the notice
        await setting.watch.poll()
        assert setting.deadlines() == []
        setting.nodes.change(A, drain_deadline=None)
        await setting.watch.notice(A, None, "")
        await setting.watch.poll()
        assert setting.deadlines() == [("a", 60.0), ("a", inf)]

    asyncio.run(scene())


def test_a_drain_that_the_cluster_refuses_is_a_notice_all_the_same() -> None:
    async def scene() -> None:
        setting = Setting()
        await setting.watch.poll()
        await setting.watch.notice(B, UNIX + 60, "spot")
        setting.nodes.problem = TimeoutError()
        await setting.watch.notice(A, UNIX + 70, "spot")
        assert setting.deadlines() == [("b", 60.0), ("a", 70.0)]

    asyncio.run(scene())


def test_a_dead_node_needs_no_withdrawal() -> None:
    async def scene() -> None:
        setting = Setting()
        await setting.watch.notice(A, UNIX + 60, "spot")
        setting.nodes.change(A, end=NodeEnd.PREEMPTED)
        assert setting.deadlines() == [("a", 60.0)]
        await setting.watch.poll()
        assert setting.deadlines() == []

    asyncio.run(scene())
