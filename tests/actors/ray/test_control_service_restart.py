"""A pool with a cluster that keeps the state of Ray's control service in Redis goes on when that service starts again.

With real processes: a Redis, a cluster of three nodes, `modelpool up`, and a submission that is under way.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.actors.ray.local_cluster import SHAPES, LocalCluster, local_cluster

COUNT = 40
#: of the control service; less than the patience of pools, and of Ray
SILENT_SECONDS = 5.0
WAIT_SECONDS = 240.0


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run a Redis on loopback; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: can_connect(port), folder / "redis.log")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def until(holds: object, *logs: Path) -> None:
    """Wait until a function returns true."""
    assert callable(holds)
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        time.sleep(0.1)


def modelpool(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelpool", *arguments]
    return subprocess.run(
        command, cwd=cluster.folder, env=cluster.environment(), capture_output=True, text=True, check=False, timeout=280
    )


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.nightly(usually="tests/actors/ray/test_control_service.py")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_a_restart_of_the_control_service_loses_no_image_and_repeats_none(tmp_path: Path) -> None:
    with redis(tmp_path) as address, local_cluster(redis=address) as cluster:
        for name in ("a", "b"):
            cluster.add_node(name, gpus=1)
        (cluster.folder / "pool.toml").write_text(f"""
[pool]
device = "sim"
workers = 2
vram = "64MiB"
journal = "pool.journal"
[models]
folders = ["{SHAPES / "models"}"]
loras = ["{SHAPES / "loras"}"]
[cluster]
address = "{cluster.address}"
[output]
folder = "images"
""")
        (cluster.folder / "jobs.jsonl").write_text(
            "".join(
                json.dumps({"model": "shapes", "prompt": "a red circle", "seed": seed, "steps": 60}) + "\n"
                for seed in range(COUNT)
            )
        )
        log = cluster.folder / "up.log"
        with log.open("w") as output:
            command = [sys.executable, "-m", "modelpool", "up", "--config", "pool.toml"]
            up = subprocess.Popen(command, cwd=cluster.folder, env=cluster.environment(), stdout=output, stderr=output)
        try:
            until(lambda: "Stop it:" in log.read_text(), log)
            submitted = modelpool(
                cluster,
                "submit",
                "jobs.jsonl",
                "--pool",
                "modelpool",
                "--id",
                "s1",
                "--out",
                str(cluster.folder / "images"),
            )
            assert submitted.returncode == 0, submitted.stderr
            images = cluster.folder / "images"
            until(lambda: len(list(images.glob("*.png"))) >= 2, log)
            cluster.stop_control_service()
            before = len(list(images.glob("*.png")))
            time.sleep(SILENT_SECONDS)
            cluster.start_control_service()
            assert before < COUNT, "it was under way"
            until(lambda: len(list(images.glob("*.png"))) == COUNT or up.poll() is not None, log)
            assert up.poll() is None, log.read_text()
            waited = modelpool(cluster, "wait", "s1", "--pool", "modelpool")
            assert waited.returncode == 0, waited.stdout + waited.stderr
            rows = [json.loads(line) for line in (images / "manifest.jsonl").read_text().splitlines()]
            seeds = sorted(row["recipe"]["seed"] for row in rows if "recipe" in row)
            assert seeds == list(range(COUNT)), "each image once"
            status = json.loads(modelpool(cluster, "status", "modelpool", "--json").stdout)
            assert (status["controller_restarts"], status["restarts"]) == (0, 0)
            more = modelpool(
                cluster, "generate", "a blue square", "--seed", "7", "--pool", "modelpool", "--out", "more"
            )
            assert more.returncode == 0, more.stderr
        finally:
            up.terminate()
            try:
                up.wait(60)
            finally:
                up.kill()
                up.wait()
