"""The demand of a worker, as Ray and its autoscaler see it."""

from __future__ import annotations

from modelpool.actors.ray.actor_options import worker_needs
from modelpool.scheduler.model.node_groups import NodeGroup

TYPES = {"L4", "H100"}


def test_the_options_of_each_kind_of_worker() -> None:
    labelled = NodeGroup(name="h100", gpu_type="H100", labels=(("modelpool-group", "h100"),))
    custom = NodeGroup(name="big", gpu_type="H100", resources=(("vram_gb", 80.0),))
    cases = [
        (None, 1, 0, {"num_gpus": 1, "num_cpus": 0}),
        (None, 0, 1, {"num_gpus": 0, "num_cpus": 1}),
        (labelled, 1, 0, {"num_gpus": 1.0, "num_cpus": 0.0, "label_selector": {"modelpool-group": "h100"}}),
        (custom, 1, 0, {"num_gpus": 1.0, "num_cpus": 0.0, "resources": {"vram_gb": 80.0}}),
        (NodeGroup(name="l4", gpu_type="L4"), 1, 0, {"num_gpus": 1.0, "num_cpus": 0.0, "accelerator_type": "L4"}),
        (NodeGroup(name="x", gpu_type="NVIDIA GeForce RTX 4090"), 1, 0, {"num_gpus": 1.0, "num_cpus": 0.0}),
        (NodeGroup(name="sim"), 0, 1, {"num_gpus": 1.0, "num_cpus": 0.0}),
    ]
    for group, gpus, cpus, options in cases:
        assert worker_needs(gpus, cpus, group, TYPES).options == options


def test_the_bundle_counts_as_ray_does() -> None:
    needs = worker_needs(1, 0, NodeGroup(name="l4", gpu_type="L4"), TYPES)
    assert needs.bundle == {"GPU": 1.0, "accelerator_type:L4": 0.001}
    assert worker_needs(0, 1, None, TYPES).bundle == {"CPU": 1}
