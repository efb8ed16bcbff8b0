"""The clusters that tests of several nodes run on."""

from __future__ import annotations

import psutil
import pytest

from tests.actors.ray.local_cluster import (
    ClusterFailed,
    LocalCluster,
    local_cluster,
    until,
)


def fail(cluster: LocalCluster) -> None:
    raise LookupError(f"nothing at {cluster.address}")


class Holder:
    """An actor that keeps its node."""

    def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


def draining(cluster: LocalCluster) -> list[str]:
    """Drain a node and remove another; return the nodes that the cluster then reports as draining."""
    import ray
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.core.generated.autoscaler_pb2 import NodeStatus

    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    leaving = cluster.add_node("leaving", resources={"thing": 3}, labels={"kind": "spot"})
    (row,) = [node for node in ray.nodes() if node["NodeName"] == "leaving"]
    assert row["Resources"]["thing"] == 3
    assert row["Labels"]["kind"] == "spot"
    holder = ray.remote(num_cpus=0, resources={"thing": 1})(Holder).remote()
    assert ray.get(holder.where.remote()) == leaving.node_id
    cluster.drain(leaving, 600)  # a raylet without work ends at once
    cluster.remove(cluster.add_node("gone"))
    client = GcsClient(address=cluster.address)
    names = {bytes.fromhex(node.node_id): node.name for node in cluster.nodes.values()}

    def found() -> list[str]:
        states = get_cluster_resource_state(client).node_states
        return [names[state.node_id] for state in states if state.status == NodeStatus.DRAINING]

    until(found)
    return found()


@pytest.mark.ray
@pytest.mark.nightly(usually="tests/actors/ray/test_ray_losses.py")
def test_nodes_are_labelled_drained_and_removed_failures_reported_and_nothing_is_left() -> None:
    others = set(psutil.Process().children(recursive=True))  # of earlier tests in this process
    with local_cluster() as cluster:
        assert cluster.run(draining) == ["leaving"]
        assert list(cluster.nodes) == ["head", "leaving"]
        family = psutil.Process().children(recursive=True)
        with pytest.raises(ClusterFailed, match=f"LookupError: nothing at {cluster.address}"):
            cluster.run(fail)
        family += psutil.Process().children(recursive=True)
    assert not cluster.folder.exists()
    ours = set(family) - others
    assert ours
    assert not [p for p in ours if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
