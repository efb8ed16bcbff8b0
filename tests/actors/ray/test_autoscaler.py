"""Demand as pending actors, on Ray's real autoscaler: nodes come, images are rendered, nodes leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelpool.scheduler.tables.node_groups import NodeGroup
from tests.actors.ray.local_autoscaler import LocalAutoscaler, NodeType, eventually, local_autoscaler

pytestmark = pytest.mark.ray

LABEL = "modelpool-group"
GROUPS = (
    NodeGroup(name="small", labels=((LABEL, "small"),), max_nodes=2),
    NodeGroup(name="large", labels=((LABEL, "large"),), gpus_per_node=2, max_nodes=1),
    NodeGroup(name="empty", labels=((LABEL, "empty"),)),
    NodeGroup(name="unknown", labels=((LABEL, "unknown"),)),
)
NODE_TYPES = {
    "small": NodeType(labels={LABEL: "small"}, most=2),
    "large": NodeType(gpus=2, labels={LABEL: "large"}, most=1),
    "empty": NodeType(labels={LABEL: "empty"}, node_config={"stock_out": "no capacity for this type in zone a"}),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalAutoscaler]:
    with local_autoscaler({name: node_type.config for name, node_type in NODE_TYPES.items()}) as started:
        yield started


def alive_nodes(address: str) -> int:
    """The nodes besides the head. Called in a process of the cluster."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) - 1


def render(address: str, seeds: range) -> dict[str, Any]:
    """Render images on simulated GPUs of the groups, from no node; return the images and the nodes that were there."""
    from modelpool import GenerateRequest, ModelPool, PoolConfig
    from modelpool.scheduler.tables.config import SchedulerConfig

    models = Path(__file__).parents[3] / "examples" / "shapes" / "models"
    groups = tuple(group for group in GROUPS if group.name in ("small", "large"))
    config = PoolConfig(scheduler=SchedulerConfig(groups=groups)).override(
        address=address, device="sim", vram="64MiB", models=[models]
    )
    found: dict[str, Any] = {}
    with ModelPool.start(config) as pool:
        found["before"] = alive_nodes(address)
        requests = [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=20) for seed in seeds]
        jobs = pool.submit(requests, output=False)
        images = {image.request.seed: image.pixels.tobytes() for image in jobs.images()}
        found["images"] = images
        found["failures"] = [failure.message for failure in jobs.failures]
        found["workers"] = sorted(worker.id for worker in pool.status().workers)
        found["during"] = alive_nodes(address)
        eventually(lambda: not pool.status().workers, "the workers end when there is no work")
        eventually(lambda: not alive_nodes(address), "their nodes leave")
        (again,) = pool.submit([requests[0]], output=False).images()
        found["again"] = again.pixels.tobytes()
    eventually(lambda: not alive_nodes(address), "no node outlives the pool")
    return found


def test_nodes_come_with_work_render_images_and_leave(cluster) -> None:
    found = cluster.run(render, range(6))
    assert found["before"] == 0
    assert found["failures"] == []
    assert sorted(found["images"]) == list(range(6))
    assert found["during"] >= 1
    assert found["again"] == found["images"][0]
    assert len(set(found["images"].values())) == 6
