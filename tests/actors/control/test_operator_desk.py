"""Orders of operators at the controller: which place they name, what they warn of, what they are refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.actors.config.maintenance_section import MaintenanceSection
from modelpool.actors.control.cluster_view import NodeEnd, NodeView
from modelpool.actors.control.operator_desk import OperatorDesk
from modelpool.actors.control.operator_orders import OperatorOrder, Order, OrderTaken
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import DisruptionsAllowed, WorkersWanted
from tests.actors.fake_fleet import Desk, dialogue, settle
from tests.actors.fake_nodes import FakeNodes

A, B = NodeId("a1" + "0" * 10), NodeId("a2" + "0" * 10)


def nodes() -> FakeNodes:
    return FakeNodes(NodeView(A, "box", "10.0.0.1"), NodeView(B, "10.0.0.2", "10.0.0.2"))


async def opened(config: SchedulerConfig | None = None, known: FakeNodes | None = None) -> Desk:
    """A pool with a worker on each node."""
    desk = Desk(workers=0, config=config, nodes=known or nodes())
    desk.controller._worker_ids = ("gpu-0", "gpu-1")  # type: ignore[assignment]
    desk.fleet.node = A
    await desk.open()
    return desk


async def take(desk: Desk, order: Order, place: str, **more: object) -> OrderTaken:
    taken = await desk.controller.operate(OperatorOrder(order, place, **more))  # type: ignore[arg-type]
    await settle()
    return taken


@dialogue
async def test_nodes_are_named_in_every_usual_way() -> None:
    desk = await opened()
    for name in ("box", "10.0.0.1", A, "a1"):
        taken = await take(desk, Order.CORDON, name)
        assert (taken.place, taken.is_node, set(taken.workers)) == ("box", True, {"gpu-0", "gpu-1"}), name
        assert desk.state.worker_table.cordons.nodes.keys() == {A}
        assert (await desk.controller.status()).cordoned_nodes == {"box": "cordoned"}
        await take(desk, Order.UNCORDON, name)
        assert not desk.state.worker_table.cordons.nodes
    taken = await take(desk, Order.CORDON, "gpu-1")
    assert (taken.place, taken.is_node, taken.warnings) == ("gpu-1", False, ())
    assert {worker.id: worker.order for worker in (await desk.controller.status()).workers} == {
        "gpu-0": "", "gpu-1": "cordoned",
    }  # fmt: skip


@dialogue
async def test_unknown_places_are_refused_with_the_known_ones() -> None:
    desk = await opened()
    nodes_text = r"a node \(10\.0\.0\.2-a20000 10\.0\.0\.2, box 10\.0\.0\.1\)"
    for order, place, message in (
        (Order.CORDON, "nowhere", rf"cordon: found 'nowhere', expected {nodes_text} or a worker \(gpu-0, gpu-1\)"),
        (Order.DRAIN, "gpu-0", rf"drain: found 'gpu-0', expected {nodes_text}"),
        (Order.RESTART, "box", r"restart: found 'box', expected a worker \(gpu-0, gpu-1\)"),
        (Order.UNCORDON, "", r"uncordon: found '', expected a node"),
        (Order.CORDON, "a", r"the name of one node: this may be 10\.0\.0\.2-a20000, box"),
    ):
        with pytest.raises(UnusableField, match=message):
            await take(desk, order, place)
    assert not desk.state.worker_table.cordons


@dialogue
async def test_what_an_operator_should_know_is_said() -> None:
    desk = await opened()
    assert (await take(desk, Order.UNCORDON, "box")).warnings == ("box was not cordoned",)
    (warning,) = (await take(desk, Order.CORDON, "box")).warnings
    assert warning.startswith("no other worker takes tasks")
    assert (await take(desk, Order.CORDON, "10.0.0.2")).warnings[-1] == (
        "no worker of this pool is on node 10.0.0.2-a20000"
    )
    (also,) = (await take(desk, Order.UNCORDON, "gpu-0")).warnings[1:]
    assert also.startswith("the node of gpu-0 is cordoned too")
    await take(desk, Order.DRAIN, "box")
    assert {worker.state for worker in (await desk.controller.status()).workers} == {"drained"}
    with pytest.raises(UnusableField, match="gpu-0 has no process that could be replaced; it is ended: its node is dr"):
        await take(desk, Order.RESTART, "gpu-0")


@dialogue
async def test_a_restart_of_a_worker_that_is_gone_or_leaves_is_refused_by_name() -> None:
    """The cordon of a worker outlives it: its name is known, and there is nothing to restart."""
    desk = await opened()
    await take(desk, Order.CORDON, "gpu-1")
    desk.controller._dispatcher.post(WorkersWanted(desk.clock.now(), (WorkerId("gpu-0"),)))
    assert "gpu-1" not in desk.state.worker_table.workers
    with pytest.raises(UnusableField, match=r"restart: found 'gpu-1', expected a worker \(gpu-0\)"):
        await take(desk, Order.RESTART, "gpu-1")
    await take(desk, Order.UNCORDON, "gpu-1")
    assert not desk.state.worker_table.cordons
    await desk.submit(GenerateRequest(model="shapes", prompt="a circle", seed=1))
    desk.controller._dispatcher.post(WorkersWanted(desk.clock.now(), ()))
    assert not desk.state.worker_table.workers[WorkerId("gpu-0")].wanted, "it still runs"
    with pytest.raises(UnusableField, match="restart: gpu-0 has no process that could be replaced; it leaves the pool"):
        await take(desk, Order.RESTART, "gpu-0")


def test_maintenance_windows_that_cannot_be_read_are_an_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    """The node of the controller has no database of time zones, say. The watch of the windows ended without a word, and
    the pool was disrupted at any time."""
    lost_windows()
    assert caplog.text.count("nodes are not given up: the maintenance windows cannot be read") == 1


@dialogue
async def lost_windows() -> None:
    desk = await opened()
    fails = [True]

    def obstacle(unix_seconds: float) -> str:
        if fails[0]:
            raise KeyError("no time zone Europe/Berlin")
        return ""

    desk.controller._desk._obstacle = obstacle
    await desk.clock.advance(60.0)
    cordons = desk.state.worker_table.cordons
    assert "the maintenance windows cannot be read" in cordons.obstacle
    assert "Europe/Berlin" in cordons.obstacle
    with pytest.raises(UnusableField, match=r"restart: the maintenance windows cannot be read.*--force"):
        await take(desk, Order.RESTART, "gpu-0")
    fails[0] = False
    await desk.clock.advance(20.0)
    assert cordons.obstacle == ""


@dialogue
async def test_disruption_limits_are_overridden_by_force_only() -> None:
    desk = await opened(SchedulerConfig(max_unavailable_nodes=1))
    await take(desk, Order.DRAIN, "10.0.0.2")
    await take(desk, Order.DRAIN, "10.0.0.2")  # the same one again
    with pytest.raises(UnusableField, match=r"drain: 1 of at most 1 nodes are unavailable .*; --force does it all the"):
        await take(desk, Order.DRAIN, "box")
    assert A not in desk.state.worker_table.cordons.nodes
    await take(desk, Order.CORDON, "box")  # what runs there continues
    taken = await take(desk, Order.DRAIN, "box", is_forced=True)
    assert taken.warnings[0].startswith("forced: 1 of at most 1 nodes are unavailable")
    assert desk.state.unavailable_nodes() == {A, B}


@dialogue
async def test_maintenance_windows_hold_orders_and_reach_the_core() -> None:
    desk = await opened()
    now = [1_800_000_000.0]  # Friday 2027-01-15 08:00 UTC
    closed = MaintenanceSection(windows=("sat 00:00-06:00",))
    desk.controller._desk = OperatorDesk(
        desk.state, desk.controller._dispatcher, nodes(), closed.obstacle, lambda: now[0]
    )
    with pytest.raises(UnusableField, match=r"it is outside of the maintenance windows: sat 00:00-06:00 \(UTC"):
        await take(desk, Order.RESTART, "gpu-0")
    await take(desk, Order.CORDON, "gpu-0")
    await take(desk, Order.RESTART, "gpu-1", is_forced=True)
    now[0] += 20 * 3600.0
    assert closed.obstacle(now[0]) == ""
    await take(desk, Order.DRAIN, "box")
    desk.controller._dispatcher.post(DisruptionsAllowed(desk.controller._dispatcher.now, "it is Monday"))
    assert desk.state.worker_table.cordons.obstacle == "it is Monday"


@dialogue
async def test_a_node_that_leaves_takes_its_cordon_with_it() -> None:
    known = nodes()
    desk = await opened(known=known)
    await take(desk, Order.DRAIN, "box")
    assert {worker.state for worker in (await desk.controller.status()).workers} == {"drained"}
    known.change(A, end=NodeEnd.EXPECTED)
    await desk.clock.advance(2.5)
    assert not desk.state.worker_table.cordons.nodes
    assert "drained" not in {worker.state for worker in (await desk.controller.status()).workers}


@dialogue
async def test_without_a_cluster_that_answers_the_nodes_of_workers_are_known() -> None:
    known = nodes()
    desk = await opened(known=known)
    known.problem = RuntimeError("gone")
    taken = await take(desk, Order.CORDON, "a1")
    assert taken.place == A[:6] or taken.place.endswith(A[:6])
    assert replace(taken, place="").workers == ("gpu-0", "gpu-1")


def test_a_bug_that_ends_a_background_task_of_the_controller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for these tasks: the nodes of the cluster were watched no longer, without a word."""
    lost_watch()
    assert "a background task of the controller has ended: NodeWatch.keep_watching" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@dialogue
async def lost_watch() -> None:
    desk = await opened()
    assert desk.controller._node_watch is not None
    desk.controller._node_watch._on_view = lambda view: 1 / 0
    await desk.clock.advance(5.0)
