"""The commands of the manifests for a persistent pool, run as they stand, on a cluster of real raylets.

Not run is `ray start`, which would listen on more than loopback: the node of the server is started for it. RAY_ADDRESS
stands for a machine on which only this Ray is found by "auto".

Proves: the pool beside the head starts, the server joins on a node of Ray without resources and answers its probes; a
job that came over HTTP gives an image; when the pool ends, so does the server, and the next one joins the next pool.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.ray.kuberay_manifests import KUBERAY, documents
from tests.actors.ray.local_cluster import SHAPES, LocalCluster, local_cluster

KEY = "a-key-of-the-tests-0123"
CONFIG = "/etc/modelpool/modelpool.toml"
WAIT_SECONDS = 120.0


def script_of(container: str) -> str:
    """The shell script of a container of the manifest for a cluster of fixed size."""
    by_kind = {one["kind"]: one["spec"] for one in documents(KUBERAY / "persistent" / "fixed.yaml") if "spec" in one}
    pods = (by_kind["RayCluster"]["headGroupSpec"]["template"]["spec"], by_kind["Deployment"]["template"]["spec"])
    everything = [one for pod in pods for one in (*pod.get("initContainers", ()), *pod["containers"])]
    (found,) = [one["command"][-1] for one in everything if one["name"] == container]
    return str(found)


class Containers:
    """Runs scripts of containers as processes of a cluster's folder."""

    def __init__(self, cluster: LocalCluster, port: int) -> None:
        self.cluster, self.port = cluster, port
        self.config = cluster.folder / "modelpool.toml"
        self.config.write_text(f"""
[pool]
device = "sim"
workers = 1
vram = "64MiB"
[models]
folders = ["{SHAPES / "models"}"]
[cluster]
address = "auto"
[output]
folder = "images"
[serve]
host = "127.0.0.1"
port = {port}
folder = "images"
[serve.keys]
someone = "{KEY}"
""")

    @contextlib.contextmanager
    def running(self, container: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """Run a container; its processes end with the context, as a container's do."""
        script = script_of(container).replace(CONFIG, str(self.config)).replace("127.0.0.1:6379", self.cluster.address)
        script = re.sub("^ray start .*$", "", script, flags=re.MULTILINE)
        script = re.sub(r"\b(modelpool|ray) (?=up|serve|health)", rf"{Path(sys.executable).parent}/\1 ", script)
        log = self.cluster.folder / f"{container}-{time.monotonic_ns()}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["/bin/bash", "-c", script],
                cwd=self.cluster.folder,
                env=self.cluster.environment(HEAD=self.cluster.address, RAY_ADDRESS=self.cluster.address),
                stdout=output,
                stderr=output,
                text=True,
            )
        try:
            yield process, log
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def until(holds: Callable[[], object], *logs: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
        time.sleep(0.2)


def call(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer; 0 if nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=30
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read() or b"null")
    except OSError:
        return 0, None


@contextlib.contextmanager
def served(pods: Containers, pool_log: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run the server once the pool is there: before, its container ends, and Kubernetes starts it again."""
    until(lambda: "Stop it:" in pool_log.read_text(), pool_log)
    with pods.running("serve") as running:
        yield running


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.nightly(usually="tests/actors/ray/test_persistent_pool_manifests.py")
def test_the_containers_of_the_manifests_make_a_pool_that_serves_and_serves_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=1)
        cluster.add_node("serve", cpus=0)
        pods = Containers(cluster, port)
        with pods.running("pool") as (_, pool_log), served(pods, pool_log) as (server, log):
            until(lambda: call(port, "/livez")[0] == 200, log, pool_log)
            until(lambda: call(port, "/readyz")[0] == 200, log, pool_log)
            status, job = call(port, "/api/jobs", {"model": "shapes", "prompt": "a red circle", "steps": 2})
            assert status in (200, 201, 202), job
            until(lambda: call(port, f"/api/jobs/{job['id']}")[1]["succeeded"] == 1, log, pool_log)
        with pods.running("pool") as (pool, pool_log), served(pods, pool_log) as (server, log):
            until(lambda: call(port, "/readyz")[0] == 200, log, pool_log)
            pool.terminate()
            pool.wait(60)
            until(lambda: server.poll() is not None, log, pool_log)
            assert server.returncode == 1, "Kubernetes starts the container again"
