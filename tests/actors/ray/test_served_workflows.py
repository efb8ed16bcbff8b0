"""Workflows over a real server and a real Ray: three workers, workflows that share parts, and a worker and the
controller killed in the middle. Each output arrives once, with the bytes of a pool in one process."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.actors.ray.local_cluster import LocalCluster, local_cluster
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[3] / "configs" / "laptop.toml"
NAMES = PoolNames({"one": "Stable Diffusion 1", "two": "Stable Diffusion 1"}, [])
COUNT, WAIT_SECONDS = 20, 150.0


def workflow(place: int) -> Graph:
    """One of many that share their first run, with a second one of another model."""
    graph = basic("one", steps=24)
    second = {**graph["sampler"]["inputs"], "denoise": 0.5, "seed": place // 2, "latent_image": ["scaled", 0]}
    graph["other"] = node("CheckpointLoaderSimple", ckpt_name="two.safetensors")
    factor = 1.0 + place % 2 / 2
    graph["scaled"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bilinear", scale_by=factor)
    graph["again"] = node("KSampler", **{**second, "model": ["other", 0]})
    graph["decoded"]["inputs"]["samples"] = ["again", 0]
    return graph


def workflow_requests() -> list[GenerateRequest]:
    return [
        request
        for place in range(COUNT)
        for output in outputs_of(workflow(place), NAMES)
        for request in requests_of(output, NAMES, lambda name: pytest.fail(f"reads {name}"))
    ]


def expected(models: Path, requests: list[GenerateRequest]) -> list[np.ndarray]:
    """What a pool in this process makes."""
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[models], workers=1)
    with open_real_pool(config) as pool:
        found = {each.index: each.pixels for each in pool.submit(requests, output=False).images()}
    return [found[place] for place in range(COUNT)]


def until(holds: Callable[[], object], *logs: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
        time.sleep(0.1)


def call(address: str, body: Any = None) -> bytes:
    """The content of an answer; empty while nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=60) as answer:
            found: bytes = answer.read()
            return found
    except urllib.error.HTTPError as refused:
        if refused.code < 500:
            raise
    except OSError:
        pass
    return b""


@contextmanager
def running(cluster: LocalCluster, *arguments: str) -> Iterator[Path]:
    """A command of modelpool and its log; it ends with the context."""
    log = cluster.folder / f"{arguments[0]}.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "modelpool", *arguments]
        process = subprocess.Popen(command, cwd=cluster.folder, env=cluster.environment(), stdout=output, stderr=output)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(100)


def kill(name: str, others: set[psutil.Process]) -> None:
    """Kill one actor of this name that is none of `others`."""
    titles = {
        process: " ".join(process.cmdline())
        for process in psutil.Process().children(recursive=True)
        if process not in others and process.status() != psutil.STATUS_ZOMBIE
    }
    found = [process for process, title in titles.items() if f"ray::{name}" in title]
    assert found, [title[:60] for title in titles.values()]
    os.kill(found[0].pid, signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.nightly(usually="tests/actors/test_workflow_ray.py")
def test_workflows_outlive_a_worker_and_the_controller(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for seed, name in enumerate(("one", "two")):
        write_tiny_checkpoint(tmp_path / "models" / f"{name}.safetensors", seed)
    requests = workflow_requests()
    wanted = expected(tmp_path / "models", requests)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server, others = f"http://127.0.0.1:{port}", set(psutil.Process().children(recursive=True))
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=3)
        (cluster.folder / "pool.toml").write_text(f"""
[pool]
device = "cpu"
workers = 3
vram = "64MiB"
journal = "pool.journal"
[models]
folders = ["{tmp_path / "models"}"]
[cluster]
address = "{cluster.address}"
[serve]
host = "127.0.0.1"
port = {port}
folder = "images"
""")
        with running(cluster, "up", "--config", "pool.toml") as up:
            until(lambda: "Stop it:" in up.read_text(), up)
            with running(cluster, "serve", "--pool", "modelpool", "--config", "pool.toml") as serve:
                until(lambda: call(f"{server}/readyz"), serve, up)
                body = [request.model_dump(mode="json", exclude_unset=True) for request in requests]
                # only the journal outlives the controller
                job = json.loads(call(f"{server}/api/jobs", {"requests": body, "detached": True}))["id"]

                def succeeded() -> int:
                    state = json.loads(call(f"{server}/api/jobs/{job}") or b"{}")
                    assert not state.get("failed"), state
                    return int(state.get("succeeded", 0))

                until(lambda: succeeded() >= 2, serve, up)
                kill("GpuWorkerActor", others)
                until(lambda: succeeded() >= 6, serve, up)
                kill("ControllerActor", others)
                until(lambda: succeeded() == COUNT, serve, up)
                for place, pixels in enumerate(wanted):
                    content = call(f"{server}/api/jobs/{job}/outputs/{place}")
                    found = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
                    np.testing.assert_array_equal(found, pixels, err_msg=str(place))
        assert len(list((cluster.folder / "images").glob("*.png"))) == COUNT, "each output is written once"
