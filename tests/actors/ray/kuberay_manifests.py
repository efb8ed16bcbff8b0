"""The manifests of configs/kuberay as values."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from modelpool.scheduler.tables.node_groups import NodeGroup

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


def pool_tables() -> Mapping[str, Any]:
    """The pool's configuration in the ConfigMap."""
    (config,) = documents(KUBERAY / "config.yaml")
    return tomllib.loads(config["data"]["modelpool.toml"])


def groups_in(tables: Mapping[str, Any]) -> tuple[NodeGroup, ...]:
    """The groups of a configuration."""
    groups = []
    for name, keys in tables["groups"].items():
        labels = tuple(keys.get("labels", {}).items())
        groups.append(NodeGroup(name=name, **{**keys, "labels": labels}))
    return tuple(groups)


def configured_groups() -> tuple[NodeGroup, ...]:
    """The groups of the ConfigMap."""
    return groups_in(pool_tables())
