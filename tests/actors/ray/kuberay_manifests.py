"""The manifests of configs/kuberay as values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from modelpool.actors.config.config import PoolConfig
from modelpool.scheduler.model.node_groups import NodeGroup

CONFIGS = Path(__file__).parents[3] / "configs"
KUBERAY = CONFIGS / "kuberay"
#: the label by which groups of the pool find nodes
GROUP_LABEL = "modelpool-group"


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def cluster_manifest() -> dict[str, Any]:
    """The RayCluster, with the namespace that Kubernetes adds."""
    (manifest,) = documents(KUBERAY / "raycluster.yaml")
    manifest["metadata"]["namespace"] = "default"
    return manifest


def node_types() -> dict[str, dict[str, Any]]:
    """The worker groups as node types of the autoscaler, by Ray's own parser."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    derived = _derive_autoscaling_config_from_ray_cr(cluster_manifest())
    return {name: kind for name, kind in derived["available_node_types"].items() if name != derived["head_node_type"]}


def pool_config() -> PoolConfig:
    """The pool's configuration in the ConfigMap, read as the pool reads it."""
    (config,) = documents(KUBERAY / "config.yaml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "modelpool.toml"
        path.write_text(config["data"]["modelpool.toml"])
        return PoolConfig.load(path)


def configured_groups() -> tuple[NodeGroup, ...]:
    """The groups of the ConfigMap."""
    return pool_config().scheduler.groups
