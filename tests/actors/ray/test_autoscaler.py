"""Demand as pending actors, on Ray's real autoscaler: nodes come, images are rendered, nodes leave.

The node types are those of configs/kuberay/raycluster.yaml, read by Ray's own parser of KubeRay's manifests, with the
CPUs of this machine; the groups are the groups of configs/kuberay/config.yaml, with the times of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelpool.scheduler.model.node_groups import NodeGroup
from tests.actors.ray.kuberay_manifests import GROUP_LABEL, configured_groups, node_types
from tests.actors.ray.local_autoscaler import LocalAutoscaler, NodeType, eventually, local_autoscaler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly(usually="tests/actors/ray/test_ray_fleet.py"),
]

#: node types that exist besides: one without capacity
EMPTY = NodeType(labels={GROUP_LABEL: "empty"}, node_config={"stock_out": "no capacity in zone a"})
SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "models"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalAutoscaler]:
    small = {
        name: NodeType(config["resources"]["GPU"], 1, 2, config["labels"]) for name, config in node_types().items()
    }
    with local_autoscaler({name: kind.config for name, kind in (small | {"empty": EMPTY}).items()}) as started:
        yield started


def quick_groups(*names: str) -> tuple[NodeGroup, ...]:
    """Groups of the manifest, whose nodes start soon, so that the pool gives them up soon."""
    return tuple(replace(group, start_seconds=2.0) for group in configured_groups() if group.name in names)


def start_pool(address: str, groups: tuple[NodeGroup, ...], record: Path | None = None) -> Any:
    """A pool of simulated GPUs of these groups, which decides every second."""
    from modelpool import ModelPool, PoolConfig
    from modelpool.scheduler.model.config import SchedulerConfig
    from modelpool.scheduler.model.node_groups import AutoscalingConfig

    scheduler = SchedulerConfig(groups=groups, autoscaling=AutoscalingConfig(interval_seconds=1.0, wait_seconds=1.0))
    config = PoolConfig(scheduler=scheduler).override(
        address=address, device="sim", vram="64MiB", models=[SHAPES], record=record
    )
    return ModelPool.start(config)


def requests(count: int, steps: int = 20) -> list[Any]:
    """Different images of the shapes model."""
    from modelpool import GenerateRequest

    return [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=steps) for seed in range(count)]


def alive_nodes() -> int:
    """The nodes besides the head, in a process that is connected to the cluster."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) - 1


def render_twice(address: str) -> dict[str, Any]:
    """Render images from no node, wait until the nodes have left, render one again."""
    found: dict[str, Any] = {}
    with start_pool(address, quick_groups("l4", "h100")) as pool:
        found["before"] = alive_nodes()
        jobs = pool.submit(requests(6), output=False)
        found["images"] = {image.request.seed: image.pixels.tobytes() for image in jobs.images()}
        found["failures"] = [failure.message for failure in jobs.failures]
        found["during"] = alive_nodes()
        eventually(lambda: not alive_nodes(), "the nodes leave when there is no work")
        (again,) = pool.submit(requests(1), output=False).images()
        found["again"] = again.pixels.tobytes()
    return found


def wait_until_empty(address: str) -> bool:
    """Wait until all nodes have left."""
    import ray

    ray.init(address)
    eventually(lambda: not alive_nodes(), "no node outlives the pool")
    return True


def test_nodes_come_with_work_render_images_and_leave(cluster) -> None:
    found = cluster.run(render_twice)
    assert found["before"] == 0
    assert found["failures"] == []
    assert sorted(found["images"]) == list(range(6))
    assert found["during"] >= 1
    assert found["again"] == found["images"][0]
    assert len(set(found["images"].values())) == 6
    assert cluster.run(wait_until_empty)


def render_with_another_group(address: str, record: Path) -> tuple[int, list[str]]:
    """Render an image where the cheapest groups cannot be provided; return the number of images, and all failures."""
    groups = (
        NodeGroup(name="empty", price_per_hour=0.01, labels=((GROUP_LABEL, "empty"),), start_seconds=2.0),
        NodeGroup(name="absent", price_per_hour=0.02, labels=((GROUP_LABEL, "absent"),), start_seconds=2.0),
        *quick_groups("l4"),
    )
    with start_pool(address, groups, record) as pool:
        jobs = pool.submit(requests(1), output=False)
        return len(list(jobs.images())), [failure.message for failure in jobs.failures]


def test_another_group_is_used_when_one_cannot_be_provided(cluster, tmp_path) -> None:
    record = tmp_path / "record.jsonl"
    assert cluster.run(render_with_another_group, record) == (1, [])
    failed = {
        event["worker_id"].rpartition("-")[0]: (event.get("cause"), event["reason"])
        for event in events_of(record, "StartFailed")
    }
    assert failed["empty"][0] == failed["absent"][0] == "no node"
    assert failed["empty"][1].startswith("no node of group empty can be provided: the autoscaler could not launch it: ")
    assert failed["absent"][1] == (
        "no node of group absent can be provided: no node type of the autoscaler has these resources and labels"
    )
    assert any(event["worker"]["worker_id"].startswith("l4-") for event in events_of(record, "WorkerUp"))


def events_of(record: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in an event log."""
    events = [json.loads(line).get("event", {}) for line in record.read_text().splitlines()]
    return [event[kind] for event in events if kind in event]
