"""Conversions of Ray's messages, and the self-test of the names that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.core.generated import autoscaler_pb2, common_pb2, gcs_pb2

from modelpool.actors.control.cluster_view import ClusterView, NodeEnd, NodeLaunch, NodeView, ResourceDemand
from modelpool.actors.control.losses import Death
from modelpool.actors.ray import ray_nodes
from modelpool.actors.ray.cluster import controller_node
from modelpool.actors.ray.ray_nodes import (
    ActorReport,
    accelerator_types,
    actor_report,
    cluster_view,
    pools_of,
    self_test,
)
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import NodeId

NOW = 1_800_000_000.0
HEAD, GPU_NODE, DEAD, OLD = (bytes([n]) * 28 for n in (1, 2, 3, 4))


def info(node_id: bytes, **fields: Any) -> gcs_pb2.GcsNodeInfo:
    return gcs_pb2.GcsNodeInfo(node_id=node_id, node_manager_address="10.0.0.1", node_manager_port=7, **fields)


def status() -> autoscaler_pb2.GetClusterStatusReply:
    """One node that is used, one request that waits, and an autoscaler with news of all kinds."""
    reply = autoscaler_pb2.GetClusterStatusReply()
    state = reply.cluster_resource_state.node_states.add(node_id=GPU_NODE)
    state.available_resources["GPU"] = 1.0
    waiting = reply.cluster_resource_state.pending_resource_requests.add(count=3)
    waiting.request.resources_bundle["GPU"] = 1.0
    constraint = waiting.request.label_selectors.add().label_constraints.add(label_key="modelpool-group")
    constraint.label_values.append("h100")
    scaling = reply.autoscaling_state
    scaling.autoscaler_state_version = 5
    scaling.pending_instance_requests.add(ray_node_type_name="h100", count=2, request_ts=int(NOW) - 5)
    scaling.pending_instances.add(ray_node_type_name="l4", details="starting ray")
    scaling.failed_instance_requests.add(ray_node_type_name="h100", count=1, reason="no capacity", failed_ts=int(NOW))
    scaling.infeasible_resource_requests.add().resources_bundle["TPU"] = 4.0
    return reply


def test_a_cluster_is_converted() -> None:
    infos = [
        info(
            DEAD,
            state=gcs_pb2.GcsNodeInfo.DEAD,
            end_time_ms=int(1000 * NOW) - 1000,
            death_info=common_pb2.NodeDeathInfo(reason="AUTOSCALER_DRAIN_PREEMPTED", reason_message="spot"),
        ),
        info(OLD, state=gcs_pb2.GcsNodeInfo.DEAD, end_time_ms=1),
        info(
            GPU_NODE,
            node_name="gpu",
            node_type_name="l4",
            labels={"modelpool-group": "l4"},
            resources_total={"GPU": 2.0, "CPU": 4.0},
        ),
        info(HEAD, node_name="head", is_head_node=True),
    ]
    draining = {GPU_NODE.hex(): int(1000 * NOW) + 8000, DEAD.hex(): 5}
    view = cluster_view(infos, draining, status(), NOW)
    head, dead, gpu = view.nodes
    assert (head.name, head.is_head, head.alive, head.drain_deadline) == ("head", True, True, None)
    assert (gpu.name, gpu.group, gpu.gpu_count, gpu.labels) == ("gpu", "l4", 2, (("modelpool-group", "l4"),))
    assert (gpu.free, gpu.drain_deadline, gpu.address, gpu.port) == ((("GPU", 1.0),), NOW + 8, "10.0.0.1", 7)
    assert (dead.end, dead.end_reason, dead.drain_deadline, dead.alive) == (NodeEnd.PREEMPTED, "spot", None, False)
    assert view.waiting == (ResourceDemand((("GPU", 1.0),), (("modelpool-group", "h100"),), 3),)
    assert view.autoscaler is not None
    assert view.autoscaler.pending == (NodeLaunch("h100", 2, at=NOW - 5), NodeLaunch("l4", 1, "starting ray"))
    assert view.autoscaler.failed == (NodeLaunch("h100", 1, at=NOW, failure="no capacity"),)
    assert view.autoscaler.infeasible == (ResourceDemand((("TPU", 4.0),)),)


def test_demand_is_found_by_resources_and_labels() -> None:
    view = cluster_view([], {}, status(), NOW)
    assert view.waits_for({"GPU": 1.0}, {"modelpool-group": "h100"})
    assert not view.waits_for({"GPU": 1.0}, {})
    assert not view.waits_for({"GPU": 2.0}, {"modelpool-group": "h100"})


def test_a_cluster_without_autoscaler_has_no_report_of_one() -> None:
    assert cluster_view([], {}, autoscaler_pb2.GetClusterStatusReply(), NOW).autoscaler is None


def test_ends_of_actors_as_ray_2_60_recorded_them() -> None:
    died = "The actor is dead because its worker process has died. Worker exit type: "
    lost = f"{died}SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2."
    left = f"{died}SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 3."
    asked = f"{died}INTENDED_USER_EXIT Worker exit detail: Worker exits by an user request. exit_actor() is called."
    killed = "The actor is dead because it was killed by `ray.kill`."
    preempted = common_pb2.NodeDeathInfo(reason="AUTOSCALER_DRAIN_PREEMPTED")
    cases = [
        (common_pb2.ActorDiedErrorContext(reason="WORKER_DIED", error_message=lost), Death.PROCESS_ENDED),
        (common_pb2.ActorDiedErrorContext(reason="WORKER_DIED", error_message=left), Death.EXITED),
        (common_pb2.ActorDiedErrorContext(reason="WORKER_DIED", error_message=asked), Death.EXITED),
        (common_pb2.ActorDiedErrorContext(reason="RAY_KILL", error_message=killed), Death.ENDED_BY_RAY),
        (common_pb2.ActorDiedErrorContext(reason="OWNER_DIED"), Death.ENDED_BY_RAY),
        (common_pb2.ActorDiedErrorContext(reason="NODE_DIED"), Death.NODE_DIED),
        (common_pb2.ActorDiedErrorContext(reason="NODE_DIED", node_death_info=preempted), Death.NODE_DRAINED),
    ]
    for context, death in cases:
        record = gcs_pb2.ActorTableData(
            state="DEAD", node_id=GPU_NODE, death_cause=common_pb2.ActorDeathCause(actor_died_error_context=context)
        )
        assert actor_report(record) == ActorReport(GPU_NODE.hex(), death, context.error_message)
    oom = common_pb2.ActorDeathCause(oom_context=common_pb2.OomContext(error_message="short of memory"))
    assert actor_report(gcs_pb2.ActorTableData(state="DEAD", death_cause=oom)).death is Death.MEMORY_MONITOR
    assert actor_report(gcs_pb2.ActorTableData(state="PENDING_CREATION")) == ActorReport("")
    assert actor_report(gcs_pb2.ActorTableData(state="PENDING_CREATION", node_id=HEAD)) == ActorReport("")
    assert actor_report(gcs_pb2.ActorTableData(state="ALIVE", node_id=b"\xff" * 28)) == ActorReport("")  # Ray's nil
    assert actor_report(gcs_pb2.ActorTableData(state="ALIVE", node_id=HEAD)) == ActorReport(HEAD.hex())


def test_the_self_test_names_what_a_ray_lacks(monkeypatch) -> None:
    self_test()
    missing = [
        ("_STATE_CALLS", ("actor_table", "feelings"), "GlobalState.feelings"),
        ("_ROW_KEYS", ("Name", "Mood"), "Mood in rows of actors"),
        ("_GCS_CALLS", ("get_all_node_info", "get_moving_nodes"), "GcsClient.get_moving_nodes"),
        ("_FIELDS", ((gcs_pb2, "GcsNodeInfo", ("node_id", "mood")),), "GcsNodeInfo.mood"),
        ("_FIELDS", ((gcs_pb2, "NoSuchMessage", ()),), "NoSuchMessage"),
        ("_ENDS", {"ABDUCTED": NodeEnd.UNKNOWN}, "NodeDeathInfo.ABDUCTED"),
        ("_DEATHS", {"BORED": Death.EXITED}, "ActorDiedErrorContext.BORED"),
    ]
    for name, value, lacking in missing:
        with monkeypatch.context() as patch:
            patch.setattr(ray_nodes, name, value)
            with pytest.raises(RuntimeError, match=rf"^Ray [\d.]+ lacks {lacking}, "):
                self_test()


def test_accelerator_types_are_those_of_ray() -> None:
    assert {"H100", "L4", "A100"} <= accelerator_types()


def actor(class_name: str, name: str = "", port: int = 0, owner_port: int = 0) -> Mapping[str, Any]:
    """A row of Ray's table of actors."""
    record = gcs_pb2.ActorTableData(
        class_name=class_name,
        name=name,
        address=common_pb2.Address(ip_address="10.0.0.1", port=port),
        owner_address=common_pb2.Address(ip_address="10.0.0.1", port=owner_port),
    )
    return ray._private.state.GlobalState()._gen_actor_info(record)


def test_workers_belong_to_the_pool_of_their_controller() -> None:
    rows = [
        actor("ControllerActor", "mine", port=1),
        actor("ControllerActor", "idle", port=2),
        actor("GpuWorkerActor", port=3, owner_port=1),
        actor("GpuWorkerActor", port=4, owner_port=1),
        actor("GpuWorkerActor", port=5, owner_port=9),
        actor("Holder", port=6, owner_port=1),
        actor("GpuWorkerActor", "lasting:gpu-0:3:1", port=7, owner_port=9),
    ]
    assert pools_of(rows) == {"mine": 2, "lasting": 1}


def test_a_controller_is_not_started_on_a_node_that_is_drained() -> None:
    """Ray's message said that the node does not exist, or that it is infeasible."""
    head, box = NodeView(NodeId("h"), "head", is_head=True), NodeView(NodeId("b"), "box")
    drained = replace(head, drain_deadline=NOW)
    view = ClusterView((head, box))
    assert controller_node(view, "head", box.node_id) == head.node_id
    assert controller_node(view, "driver", box.node_id) == box.node_id
    assert controller_node(ClusterView((drained, box)), "driver", box.node_id) == box.node_id
    with pytest.raises(UserError, match=r'^controller = "head": node head is being drained, .* use "driver"$'):
        controller_node(ClusterView((drained, box)), "head", box.node_id)
    with pytest.raises(UserError, match=r'^controller = "driver": node head is being drained, .* use "head"$'):
        controller_node(ClusterView((drained, box)), "driver", head.node_id)
    with pytest.raises(UserError, match="is not alive or runs no raylet"):
        controller_node(ClusterView((box,)), "head", box.node_id)
