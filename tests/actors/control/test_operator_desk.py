"""Orders of operators at the controller: which place they name, what they warn of, what they are refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.actors.config.maintenance_section import MaintenanceSection
from modelpool.actors.control.cluster_view import NodeEnd, NodeView
from modelpool.actors.control.operator_desk import OperatorDesk
from modelpool.actors.control.operator_orders import OperatorOrder, Order, OrderTaken
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Cordoned, DisruptionsAllowed
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
async def test_a_restart_of_a_cordoned_worker_that_the_pool_no_longer_has_is_refused() -> None:
    """Cordons outlive the controller; the next pool may have fewer workers."""
    desk = await opened()
    desk.controller._dispatcher.post(Cordoned(desk.controller._dispatcher.now, NO_NODE, WorkerId("gpu-7")))
    with pytest.raises(UnusableField, match="restart: gpu-7 has no process that could be replaced"):
        await take(desk, Order.RESTART, "gpu-7")
    await take(desk, Order.UNCORDON, "gpu-7")
    assert not desk.state.worker_table.cordons


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
