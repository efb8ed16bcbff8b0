"""The clusters that tests of several nodes run on."""

from __future__ import annotations

import psutil
import pytest

from modelpool import GenerateRequest
from tests.actors.ray.local_cluster import (
    ClusterFailed,
    Finished,
    LocalCluster,
    expected_of,
    finish,
    local_cluster,
    shapes_requests,
    sim_pool,
)


def batch_with_a_loss(cluster: LocalCluster, wanted: list[GenerateRequest]) -> Finished:
    """Kill the node of a worker while a batch runs."""
    with sim_pool(cluster) as pool:
        pool.wait_ready(200)
        assert sorted(worker.node_name for worker in pool.status().workers) == ["a", "b"]
        jobs = pool.submit(wanted, output=False)
        first = next(jobs.images())
        cluster.kill(cluster.nodes["b"])
        return finish(jobs, first)


def fail(cluster: LocalCluster) -> None:
    raise LookupError(f"nothing at {cluster.address}")


@pytest.mark.ray
def test_a_batch_survives_the_loss_of_a_node_and_the_cluster_leaves_nothing() -> None:
    wanted = shapes_requests(16)
    with local_cluster() as cluster:
        family = psutil.Process().children(recursive=True)
        cluster.add_node("a", gpus=1)
        cluster.add_node("b", gpus=1)
        with pytest.raises(ClusterFailed, match=f"LookupError: nothing at {cluster.address}"):
            cluster.run(fail)
        assert cluster.run(batch_with_a_loss, wanted) == expected_of(wanted)
        assert list(cluster.nodes) == ["head", "a"]
        family += psutil.Process().children(recursive=True)
    assert not cluster.folder.exists()
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
