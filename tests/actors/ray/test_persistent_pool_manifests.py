"""The Helm chart in configs/helm and the plain manifests that it gives: a persistent pool, its server, its monitoring.

Proves: the configuration is one that the pool accepts, with the groups that the cluster has; every command line is one
of modelpool's or Ray's command; every probe asks for a path that needs no key and exists; volumes, selectors and
secrets agree; the alerts are the alerts of configs/prometheus; each example of the chart gives the manifest that is in
the repository, if a Helm is installed.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.scripts.scripts import cli as ray_command

from modelpool.actors.cli.cluster.rejoin import wait_for_next
from modelpool.actors.cli.main import build_app
from modelpool.actors.cli.terminal.screen import user_console
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.http.service.gate import PROBE_PATHS
from modelpool.actors.outputs.results.outcomes import PoolLost
from tests.actors.ray.kuberay_manifests import CONFIGS, GROUP_LABEL, KUBERAY, documents
from tests.architecture.source_tree import ROOT
from tests.each_case import each_case

MANIFESTS = {path.stem: path for path in sorted((KUBERAY / "persistent").glob("*.yaml"))}
CHART = CONFIGS / "helm" / "modelpool"


def only(name: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in documents(MANIFESTS[name]) if one["kind"] == kind]
    return found


def pods(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The specifications of all pods of a manifest, with a name of each."""
    spec = only(name, "RayCluster")["spec"]
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]
    yield "serve", only(name, "Deployment")["spec"]["template"]["spec"]


def containers(name: str) -> Iterator[dict[str, Any]]:
    for _, pod in pods(name):
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def configuration(name: str, folder: Path) -> PoolConfig:
    path = folder / "modelpool.toml"
    path.write_text(only(name, "ConfigMap")["data"]["modelpool.toml"])
    return PoolConfig.load(path)


def command_lines(name: str) -> Iterator[list[str]]:
    """The commands in the shell scripts of all containers."""
    for container in containers(name):
        *shell, script = container.get("command", [""])
        assert shell in ([], ["/bin/bash", "-c"])
        for line in script.replace("set -e\n", "").splitlines():
            for part in re.sub(r"^until (.*) 2>/dev/null; do sleep 2; done$", r"\1", line).split(";"):
                yield shlex.split(part.replace("$HEAD", "head:6379").removeprefix("exec "))


def test_there_are_clusters_of_fixed_size_with_autoscaling_and_with_redis() -> None:
    assert list(MANIFESTS) == ["autoscaling", "fixed", "head_failures"]
    scales = {name: only(name, "RayCluster")["spec"]["enableInTreeAutoscaling"] for name in MANIFESTS}
    assert scales == {"autoscaling": True, "fixed": False, "head_failures": True}
    kept = only("head_failures", "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    redis = {one["kind"]: one for one in documents(CHART / "examples" / "redis.yaml")}
    service, port = kept["redisAddress"].split(":")
    assert service == redis["Service"]["metadata"]["name"]
    assert int(port) == redis["Service"]["spec"]["ports"][0]["port"]
    (container,) = redis["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (password,) = container["env"]
    assert kept["redisPassword"]["valueFrom"] == password["valueFrom"]
    assert container["volumeMounts"], "the state of the cluster outlives Redis itself"


@each_case("name", MANIFESTS)
def test_the_pool_accepts_the_configuration_and_the_cluster_has_its_groups(name: str, tmp_path: Path) -> None:
    config, spec = configuration(name, tmp_path), only(name, "RayCluster")["spec"]
    config.serve.check_exposure()
    assert config.cluster.address == "auto"
    assert config.cluster.name == PoolConfig().cluster.name, "`serve --pool auto` joins the pool of that name"
    nodes = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    groups = {group.name: group for group in config.scheduler.groups}
    if not spec["enableInTreeAutoscaling"]:
        assert not groups
        assert all(node["replicas"] == node["minReplicas"] == node["maxReplicas"] > 0 for node in nodes.values())
    else:
        assert nodes.keys() == groups.keys()
        assert spec["autoscalerOptions"]["version"] == "v2"
    for called, group in groups.items():
        node = nodes[called]
        assert node["labels"] == dict(group.labels) == {GROUP_LABEL: called}
        assert (node["minReplicas"], node["maxReplicas"]) == (0, group.max_nodes)
        (container,) = node["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(group.gpus_per_node)


@each_case("name", MANIFESTS)
def test_every_command_line_is_one_of_the_programs_in_the_image(name: str) -> None:
    programs: dict[str, Any] = {"modelpool": typer.main.get_command(build_app()), "ray": ray_command}
    found = []
    for program, command, *arguments in command_lines(name):
        selected = programs[program].get_command(None, command)
        assert selected is not None, command
        selected.make_context(command, list(arguments))  # refuses unknown options
        found.append(f"{program} {command}")
    assert found == ["ray health-check", "modelpool up", "ray health-check", "ray start", "modelpool serve"]


@each_case("name", MANIFESTS)
def test_every_probe_asks_for_a_path_that_the_server_has(name: str, tmp_path: Path) -> None:
    (container,) = only(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    port = configuration(name, tmp_path).serve.port
    assert container["ports"] == [{"containerPort": port, "name": "http"}]
    probes = {key: container[key]["httpGet"] for key in container if key.endswith("Probe")}
    assert probes.keys() == {"startupProbe", "livenessProbe", "readinessProbe"}
    assert {probe["path"] for probe in probes.values()} == set(PROBE_PATHS)
    assert probes["livenessProbe"]["path"] == "/livez", "a server without a pool is not killed"
    assert {probe["port"] for probe in probes.values()} == {"http"}


@each_case("name", MANIFESTS)
def test_the_pool_starts_again_whenever_it_ends_and_finds_its_state(name: str, tmp_path: Path) -> None:
    config, parts = configuration(name, tmp_path), dict(pods(name))
    (pool,) = parts["head"]["initContainers"]
    (head,) = parts["head"]["containers"]
    assert pool["restartPolicy"] == "Always", "whatever the policy of the pod, which the autoscaler wants to be Never"
    assert pool["volumeMounts"] == head["volumeMounts"], "the driver and its actors see the same files and sockets"
    mounts = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert {"/tmp/ray", "/dev/shm"} <= mounts, "a driver reaches the Ray of the other container"
    variables = [{one["name"]: one.get("value") for one in each["env"]} for each in (pool, head)]
    assert variables[0]["XDG_STATE_HOME"] == variables[1]["XDG_STATE_HOME"]
    paths = (config.pool.journal, config.pool.checkpoint_dir, config.output.folder, config.serve.folder)
    for path in (*paths, variables[0]["XDG_STATE_HOME"]):
        assert str(path).startswith("/state/"), path
    assert parts["head"]["terminationGracePeriodSeconds"] > config.cluster.drain_seconds


@each_case("name", MANIFESTS)
def test_volumes_selectors_images_and_tokens_agree(name: str) -> None:
    everything = documents(MANIFESTS[name])
    claims = {one["metadata"]["name"] for one in everything if one["kind"] == "PersistentVolumeClaim"}
    for called, pod in pods(name):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys(), called
            assert container["image"] == "registry.local/modelpool:latest"
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, called
            if "configMap" in volume:
                assert volume["configMap"]["name"] == only(name, "ConfigMap")["metadata"]["name"], called
    deployment, service = only(name, "Deployment"), only(name, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    cluster = only(name, "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    for container in (dict(pods(name))["head"]["initContainers"][0], dict(pods(name))["serve"]["containers"][0]):
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}, "which KubeRay creates"
    assert cluster["spec"]["rayVersion"] in (ROOT / "constraints.txt").read_text()


@each_case("name", MANIFESTS)
def test_a_pod_is_drained_for_less_time_than_kubernetes_gives_it(name: str) -> None:
    for called, pod in pods(name):
        for container in pod["containers"]:
            for variable in container.get("env", ()):
                if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S":
                    assert 0 < float(variable["value"]) < pod["terminationGracePeriodSeconds"], called


def test_the_monitor_reads_the_service_and_the_ingress_leads_to_it() -> None:
    service, monitor = only("autoscaling", "Service"), only("autoscaling", "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    (rule,) = only("autoscaling", "Ingress")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}


def test_the_alerts_are_those_of_the_repository() -> None:
    rules = CONFIGS / "prometheus" / "alerts.yml"
    assert (CHART / "files" / "alerts.yaml").read_text() == rules.read_text(), "scripts/write_kubernetes.py copies it"
    assert only("autoscaling", "PrometheusRule")["spec"] == yaml.safe_load(rules.read_text())
    label = only("autoscaling", "ServiceMonitor")["spec"]["jobLabel"]
    job = only("autoscaling", "Service")["metadata"]["labels"][label]
    assert f'up{{job="{job}"}}' in rules.read_text(), "the job that the rules ask for"


def test_a_server_that_joined_by_address_ends_with_its_pool() -> None:
    """`--pool auto` waited for ever for a pool called "auto": the container would never have joined the next one."""
    for name in ("auto", "head:6379"):
        with pytest.raises(PoolLost, match="gone"):
            wait_for_next(name, "gone", user_console())


@pytest.mark.skipif(
    shutil.which("helm") is None and importlib.util.find_spec("helm_python") is None,
    reason="needs helm, or the package helm-python-sdk",
)
def test_the_manifests_are_those_of_the_chart() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "write_kubernetes.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
