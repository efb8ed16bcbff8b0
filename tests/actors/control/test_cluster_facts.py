"""Names of nodes, and the sentence about what a pool waits for."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control.cluster_facts import ClusterFacts, GpuUse, names_of, short_name, waiting_text
from modelpool.actors.control.cluster_view import NodeEnd, NodeView
from modelpool.pool.values.specs.spec import NodeId
from tests.actors.fake_nodes import UNIX, FakeNodes


def test_a_set_name_is_shown_alone_and_an_address_with_the_start_of_the_id() -> None:
    nodes = [
        NodeView(NodeId("aaaa11112222"), "10.0.0.1", "10.0.0.1", is_head=True),
        NodeView(NodeId("bbbb11112222"), "gpu-box", "10.0.0.2"),
        NodeView(NodeId("cccc11112222"), "twin", "10.0.0.3"),
        NodeView(NodeId("dddd11112222"), "twin", "10.0.0.4"),
        NodeView(NodeId("eeee11112222"), "", "10.0.0.5"),
    ]
    assert list(names_of(nodes).values()) == [
        "10.0.0.1-aaaa11", "gpu-box", "twin-cccc11", "twin-dddd11", "10.0.0.5-eeee11",
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 2**24 - 1), st.sampled_from(["", "a", "b", "10.0.0.1"])), unique_by=lambda n: n[0]
    )
)
def test_different_nodes_have_different_names(found: list[tuple[int, str]]) -> None:
    nodes = [NodeView(NodeId(f"{number:06x}ffff"), name, "10.0.0.1") for number, name in found]
    assert len(set(names_of(nodes).values())) == len(nodes)


def test_a_node_without_a_name_has_the_start_of_its_id() -> None:
    names = {NodeId("aaaabbbbcccc"): "box"}
    assert short_name(NodeId("aaaabbbbcccc"), names) == "box"
    assert short_name(NodeId("ddddeeeeffff"), names) == "ddddee"
    assert short_name(NodeId(""), names) == ""


def test_the_sentence_names_the_users_of_the_gpus() -> None:
    cases = [
        (2, GpuUse(4, 0, {"x": 4}), "waiting for 2 GPUs: 0 of 4 are free; pool 'x' uses 4"),
        (1, GpuUse(4, 1, {"x": 1, "me": 1}), "waiting for 1 GPU: 1 of 4 is free; this pool uses 1, pool 'x' uses 1, "
         "other programs use 1"),
        (3, GpuUse(0, 0), "waiting for 3 GPUs: the cluster has none yet"),
        (1, GpuUse(2, 2), "waiting for 1 GPU: 2 of 2 are free"),
    ]  # fmt: skip
    for waiting, use, text in cases:
        assert waiting_text(waiting, use, "me") == text


def test_the_use_of_gpus_is_that_of_nodes_that_stay() -> None:
    gpus = {"total": (("GPU", 2.0),), "free": (("GPU", 1.0),)}
    nodes = FakeNodes(
        NodeView(NodeId("a"), **gpus),
        NodeView(NodeId("b"), drain_deadline=UNIX, **gpus),
        NodeView(NodeId("c"), end=NodeEnd.IDLE, **gpus),
    )
    nodes.pools = {"mine": 1}
    assert asyncio.run(ClusterFacts(nodes, needs_gpus=True).gpu_use()) == GpuUse(2, 1, {"mine": 1})
    assert asyncio.run(ClusterFacts(nodes).gpu_use()) is None


def test_a_cluster_that_does_not_answer_leaves_names_and_use_unknown() -> None:
    """`ray.nodes` raised, and with it the status of the pool."""
    nodes = FakeNodes(NodeView(NodeId("a"), "box"), NodeView(NodeId("b"), "other"))
    facts = ClusterFacts(nodes, needs_gpus=True)

    async def scene() -> GpuUse | None:
        await facts.read_names((NodeId("a"),))
        nodes.problem = TimeoutError()
        await facts.read_names((NodeId("c"),))
        return await facts.gpu_use()

    assert asyncio.run(scene()) is None
    assert facts.names == {NodeId("a"): "box", NodeId("b"): "other"}


def test_a_name_that_users_have_read_stays() -> None:
    nodes = FakeNodes(NodeView(NodeId("aaaaaaaa"), "box"))
    facts = ClusterFacts(nodes)

    async def scene() -> None:
        await facts.read_names((NodeId("aaaaaaaa"),))
        nodes.nodes[NodeId("bbbbbbbb")] = NodeView(NodeId("bbbbbbbb"), "box")
        await facts.read_names((NodeId("bbbbbbbb"),))

    asyncio.run(scene())
    assert facts.names == {NodeId("aaaaaaaa"): "box", NodeId("bbbbbbbb"): "box-bbbbbb"}
