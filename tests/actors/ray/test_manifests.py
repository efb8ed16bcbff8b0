"""The manifests and presets for clusters: Ray reads them, and they agree with the groups of the pool."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.http.ray_serve.ingress import IngressArguments
from tests.actors.ray.kuberay_manifests import (
    CONFIGS,
    GROUP_LABEL,
    KUBERAY,
    cluster_manifest,
    configured_groups,
    documents,
    node_types,
    pool_config,
)

PRESET = PoolConfig.load(CONFIGS / "autoscaling.toml")


def aws() -> dict[str, Any]:
    """The configuration of the cluster launcher, with Ray's defaults, validated by Ray."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((CONFIGS / "aws.yaml").read_text()))
    validate_config(config)
    return config


def test_every_group_of_the_pool_is_a_worker_group_with_its_label_and_gpus() -> None:
    kinds = node_types()
    assert {group.name for group in configured_groups()} == kinds.keys()
    for group in configured_groups():
        kind = kinds[group.name]
        assert kind["labels"] == dict(group.labels) == {GROUP_LABEL: group.name}
        assert kind["resources"]["GPU"] == group.gpus_per_node
        assert kind["min_workers"] == 0
        assert kind["max_workers"] >= group.max_nodes


def test_the_presets_for_kubernetes_and_for_others_name_the_same_groups() -> None:
    assert PRESET.scheduler.groups == configured_groups()


def test_the_head_has_no_gpu_and_keeps_the_state() -> None:
    spec = cluster_manifest()["spec"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    output = pool_config().output
    for path in (output.folder, output.record):
        assert any(str(path).startswith(f"{mount}/") for mount in mounts), path
    (variable,) = [one for one in container["env"] if one["name"] == "MODELPOOL_CONFIG"]
    assert variable["value"].rpartition("/")[0] in mounts


def test_every_pod_finds_its_volumes_and_the_weights() -> None:
    spec = cluster_manifest()["spec"]
    claims = {one["metadata"]["name"] for one in documents(KUBERAY / "storage.yaml")}
    (config,) = documents(KUBERAY / "config.yaml")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["restartPolicy"] == "Never"  # a condition of the autoscaler's version 2
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
            assert "/models" in {mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] == config["metadata"]["name"]


def test_a_pod_is_drained_for_less_time_than_kubernetes_gives_it() -> None:
    for group in cluster_manifest()["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (notice,) = [one for one in container["env"] if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert 0 < float(notice["value"]) < pod["terminationGracePeriodSeconds"]


def test_the_job_runs_a_batch_on_that_cluster() -> None:
    (job,) = documents(KUBERAY / "rayjob.yaml")
    assert job["kind"] == "RayJob"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster_manifest()["metadata"]["name"]}
    assert job["spec"]["entrypoint"].startswith("modelpool batch ")


def test_the_service_has_the_same_cluster_whose_head_offers_the_resource_of_its_replicas() -> None:
    (service,) = documents(KUBERAY / "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    start = cluster["headGroupSpec"]["rayStartParams"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    offered = json.loads(json.loads(start.pop("resources")))
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert {"containerPort": config.http_options.port, "name": "serve"} in container["ports"]
    container["ports"] = [port for port in container["ports"] if port["name"] != "serve"]
    assert cluster == cluster_manifest()["spec"]
    (app,) = config.applications
    module, _, name = app.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert IngressArguments.model_validate(app.args).start
    needed = sum(one.num_replicas * one.ray_actor_options.resources["ingress"] for one in app.deployments)
    assert needed <= offered["ingress"]


def test_everything_that_kustomize_applies_exists() -> None:
    (kustomization,) = documents(KUBERAY / "kustomization.yaml")
    kinds = [one["kind"] for name in kustomization["resources"] for one in documents(KUBERAY / name)]
    assert kinds == ["PersistentVolumeClaim", "PersistentVolumeClaim", "ConfigMap", "RayCluster"]


def test_the_cluster_launcher_accepts_its_configuration_and_has_every_group() -> None:
    config = aws()
    kinds = {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}
    groups = PRESET.scheduler.groups
    assert {group.name for group in groups} == kinds.keys()
    for group in groups:
        kind = kinds[group.name]
        assert kind["labels"] == dict(group.labels)
        assert kind["resources"]["GPU"] == group.gpus_per_node
        assert (kind["min_workers"], kind["max_workers"] >= group.max_nodes) == (0, True)
        assert ("InstanceMarketOptions" in kind["node_config"]) == group.spot
    assert sum(group.max_nodes for group in groups) <= config["max_workers"]
    assert any("RAY_enable_autoscaler_v2=1" in command for command in config["head_start_ray_commands"])


def test_all_images_are_the_one_that_the_dockerfile_builds() -> None:
    build = re.search(r"docker build .* -t (\S+)", (CONFIGS / "docker" / "Dockerfile").read_text())
    assert build is not None
    spec = cluster_manifest()["spec"]
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    images = [container["image"] for group in groups for container in group["template"]["spec"]["containers"]]
    assert {*images, aws()["docker"]["image"]} == {build[1]}
    assert spec["rayVersion"] in (CONFIGS.parent / "constraints.txt").read_text()
