"""What follows from the nodes of a cluster: notices become events once, and obstacles to starts are named."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control.cluster_view import (
    AutoscalerView,
    ClusterView,
    DrainNotice,
    NodeEnd,
    NodeLaunch,
    NodeView,
    ResourceDemand,
    drain_events,
    drain_notices,
    group_of,
    launch_failure,
    start_obstacle,
)
from modelpool.pool.values.specs.spec import NodeId
from modelpool.scheduler.model.node_groups import NodeGroup

NODES = [NodeId(name) for name in "abc"]
UNIX = 1_800_000_000.0

L4 = NodeView(
    NodeId("n1"),
    name="one",
    group="l4",
    labels=(("modelpool-group", "l4"),),
    total=(("CPU", 4.0), ("GPU", 2.0), ("accelerator_type:L4", 1.0)),
    free=(("CPU", 4.0), ("GPU", 1.0)),
)
HEAD = NodeView(NodeId("h"), name="head", is_head=True, total=(("CPU", 4.0),), free=(("CPU", 4.0),))


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NODES), st.one_of(st.just(0.0), st.floats(UNIX, UNIX + 1e6)), max_size=3),
        max_size=6,
    )
)
def test_the_core_always_knows_the_current_deadlines_and_hears_of_none_twice(polls) -> None:
    known: dict[NodeId, float] = {}
    for turn, deadlines in enumerate(polls):
        now = 100.0 + turn
        notices = [DrainNotice(node, deadline, "r") for node, deadline in deadlines.items()]
        for _ in range(2):
            events = drain_events(known, notices, now, UNIX + turn)
            for event in events:
                assert event.at == now
                if event.deadline == inf:
                    del known[event.node]
                else:
                    known[event.node] = event.deadline
        assert events == ()
        assert known.keys() == deadlines.keys()
        for node, deadline in deadlines.items():
            if deadline:
                assert abs(known[node] - (100.0 + deadline - UNIX)) <= 1.0
            else:
                assert known[node] <= now or known[node] <= 100.0 + 1e6


def test_the_earlier_of_two_notices_counts() -> None:
    notices = [DrainNotice(NODES[0], UNIX + 60, "late"), DrainNotice(NODES[0], UNIX + 8, "early")]
    (event,) = drain_events({}, notices, 5.0, UNIX)
    assert (event.deadline, event.reason) == (13.0, "early")


def test_only_living_nodes_drain() -> None:
    draining = replace(L4, drain_deadline=UNIX)
    view = ClusterView((HEAD, draining, replace(draining, end=NodeEnd.PREEMPTED)))
    assert drain_notices(view) == (DrainNotice(L4.node_id, UNIX, "Ray drains its node"),)


def test_a_draining_head_is_the_head() -> None:
    """It was found by a resource that Ray may not show for a node that is drained."""
    draining = replace(HEAD, total=(), free=(), drain_deadline=UNIX)
    assert ClusterView((L4, draining)).head == draining
    assert ClusterView((L4, replace(draining, end=NodeEnd.PREEMPTED))).head is None


def test_obstacles_to_a_start_are_named() -> None:
    gpu, none, label = {"GPU": 1.0}, dict[str, str](), {"modelpool-group": "h100"}
    view = ClusterView((HEAD, L4))
    cases = [
        (view, gpu, none, ""),
        (view, {"GPU": 2.0}, none, "the 1 node for it is in use"),
        (ClusterView((HEAD,)), gpu, none, "no node has 1 GPU"),
        (view, gpu, label, "no node has the labels modelpool-group=h100"),
        (view, {"GPU": 4.0}, dict(L4.labels), "no node with these labels has 4 GPU"),
        (ClusterView((HEAD, replace(L4, drain_deadline=0.0))), gpu, none, "all nodes for it are draining"),
        (ClusterView((HEAD, replace(L4, end=NodeEnd.IDLE))), gpu, none, "no node has 1 GPU"),
    ]
    for shown, resources, labels, obstacle in cases:
        assert start_obstacle(shown, resources, labels) == obstacle


def test_what_the_autoscaler_does_is_part_of_the_obstacle() -> None:
    launching = AutoscalerView(pending=(NodeLaunch("h100", 2), NodeLaunch("l4", 1)))
    failed = AutoscalerView(failed=(NodeLaunch("h100", 1, at=9.0, failure="no capacity in zone a"),))
    label = {"modelpool-group": "h100"}
    assert start_obstacle(ClusterView((HEAD,), autoscaler=launching), {}, label, "h100") == (
        "no node has the labels modelpool-group=h100; the autoscaler is launching 2 nodes"
    )
    assert start_obstacle(ClusterView((HEAD,), autoscaler=failed), {}, label, "h100").endswith(
        "; the last launch failed: no capacity in zone a"
    )


def test_a_stock_out_is_a_failure_after_the_request_whose_launch_is_only_repeated() -> None:
    failure = NodeLaunch("h100", 1, at=50.0, failure="no capacity")
    bundle, labels = {"GPU": 1.0}, {"modelpool-group": "h100"}

    def found(autoscaler: AutoscalerView | None, group: str = "h100", since: float = 40.0) -> str:
        return launch_failure(ClusterView((HEAD,), autoscaler=autoscaler), group, bundle, labels, since)

    assert found(AutoscalerView(failed=(failure,))) == "the autoscaler could not launch it: no capacity"
    assert found(None) == ""
    assert found(AutoscalerView(failed=(failure,)), since=60.0) == ""
    assert found(AutoscalerView(failed=(failure,)), group="l4") == ""
    assert found(AutoscalerView(failed=(failure,), pending=(NodeLaunch("h100", 1),))) == ""  # a node is starting
    assert found(AutoscalerView(failed=(failure,), pending=(NodeLaunch("h100", 1, at=49.0),))) == ""
    for repeated_at in (50.0, 51.0):
        repeated = AutoscalerView(failed=(failure,), pending=(NodeLaunch("h100", 1, at=repeated_at),))
        assert found(repeated) == "the autoscaler could not launch it: no capacity"


def test_a_demand_that_no_node_type_satisfies_is_refused() -> None:
    demand = ResourceDemand((("GPU", 1.0),), (("modelpool-group", "b300"),))
    view = ClusterView((HEAD,), autoscaler=AutoscalerView(infeasible=(demand,)))
    refused = launch_failure(view, "b300", {"GPU": 1.0}, {"modelpool-group": "b300"}, 0.0)
    assert refused == "no node type of the autoscaler has these resources and labels"
    assert launch_failure(view, "l4", {"GPU": 1.0}, {"modelpool-group": "l4"}, 0.0) == ""


def test_a_node_belongs_to_the_most_specific_group_that_it_fits() -> None:
    anything = NodeGroup(name="any")
    typed = NodeGroup(name="typed", gpu_type="L4")
    labelled = NodeGroup(name="labelled", labels=(("modelpool-group", "l4"),))
    larger = NodeGroup(name="larger", labels=(("modelpool-group", "l4"),), gpus_per_node=8)
    other = NodeGroup(name="other", gpu_type="H100")
    assert group_of(L4, (anything, typed, labelled, larger, other)) == "labelled"
    assert group_of(L4, (larger, other)) == ""
    assert group_of(L4, (NodeGroup(name="l4"), labelled)) == "l4"  # the autoscaler's own name for it
    assert group_of(HEAD, (anything,)) == ""


def test_a_node_names_its_accelerator() -> None:
    assert (L4.gpu_count, L4.gpu_type) == (2, "L4")
    assert (HEAD.gpu_count, HEAD.gpu_type) == (0, "")
    assert replace(HEAD, labels=(("ray.io/accelerator-type", "A100"),)).gpu_type == "A100"
