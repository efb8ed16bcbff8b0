"""Measures how long a cold node takes to its first image, in parts, and how one source supplies several nodes.

A local web server with a bounded speed is the source, processes with caches of their own are the nodes. Run from the
repository: `python -m benchmarks.weight_fetch [MIB_PER_SECOND] [MIB]`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.config.config import PoolConfig
from tests.pool.files.fetch.range_server import RangeServer, serving
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

MIB = 1 << 20
#: about 120 million parameters
UNET = layouts.LdmUnet(model_channels=128, context_width=32)
NODES = (1, 2, 4)


def fan_out(folder: Path, server: RangeServer, sha256: str, size_bytes: int, nodes: int) -> tuple[float, float]:
    """Return the seconds until every node has the file, and the bytes that the source sent, in files."""
    before_bytes = server.sent_bytes()
    with ExitStack() as stack:
        peers: list[str] = []
        processes = []
        for node in range(nodes):
            cache = folder / f"{nodes} nodes" / f"node {node}"
            command = [sys.executable, "-m", "tests.pool.files.fetch.fetching_process", str(cache), server.url, "token"]
            process = stack.enter_context(
                subprocess.Popen([*command, sha256, *peers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not peers:
                began = time.monotonic()
                peers.append(address)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            assert facts["source_bytes"] + facts["peer_bytes"] == size_bytes
        seconds = time.monotonic() - began
        for process in processes:
            process.communicate("\n")
    return seconds, (server.sent_bytes() - before_bytes) / size_bytes


def first_image(folder: Path, server: RangeServer) -> dict[str, float]:
    """Return the seconds of each part, from a driver without a pool to an image."""
    config = PoolConfig.model_validate(
        {
            "pool": {"device": "sim", "workers": 1, "vram": "2GiB"},
            "models": {"sources": [f"{server.url}"], "cache": folder / "cache", "registry": folder / "registry"},
        }
    )
    began = time.monotonic()
    with ModelPool.start(config) as pool:
        started = time.monotonic()
        pool.wait_ready(300)
        ready = time.monotonic()
        wanted = GenerateRequest(model="large", prompt="x", seed=1, steps=1, cfg=1, width=64, height=64)
        jobs = pool.submit([wanted], output=False)
        jobs.wait(600)
        ended = time.monotonic()
        assert not jobs.failures, jobs.failures
        (image,) = jobs.images()
    fetch = sum(task.fetch_seconds for task in image.tasks)
    load = sum(task.load_seconds for task in image.tasks)
    run = sum(task.seconds - task.load_seconds for task in image.tasks)
    return {
        "Ray and controller": started - began,
        "worker": ready - started,
        "fetch": fetch,
        "load": load,
        "run": run,
        "describe, schedule, transfer": ended - ready - fetch - load - run,
    }


def main(mib_per_second: float = 40.0, size_mib: int = 256) -> None:
    """Measure and print the tables for RESULTS.md."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        os.chmod(folder, 0o700)
        source = folder / "source"
        source.mkdir()
        data = random.Random(1).randbytes(size_mib * MIB)
        (source / "a.safetensors").write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        del data
        print("| nodes | seconds | relative to one | read from the source, in files |")
        print("|---|---|---|---|")
        with serving(source, bytes_per_second=mib_per_second * MIB) as server:
            alone = 0.0
            for nodes in NODES:
                seconds, files = fan_out(folder, server, sha256, size_mib * MIB, nodes)
                alone = alone or seconds
                print(f"| {nodes} | {seconds:.2f} | {seconds / alone:.2f} | {files:.2f} |", flush=True)
        layout = {
            **layouts.ldm_unet(UNET),
            **layouts.ldm_vae(layouts.TINY_VAE),
            **layouts.hf_clip(layouts.TINY_CLIP),
        }
        models = folder / "models"
        models.mkdir()
        path = write_tiny_checkpoint(models / "large.safetensors", layout=layout)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (models / "SHA256SUMS").write_text(f"{digest}  large.safetensors\n")
        print(f"\n| first image on a cold node, file of {path.stat().st_size / MIB:.0f} MiB | seconds |")
        print("|---|---|")
        with serving(models, bytes_per_second=mib_per_second * MIB) as server:
            for part, seconds in first_image(folder, server).items():
                print(f"| {part} | {seconds:.2f} |")


if __name__ == "__main__":
    main(*(float(argument) if place == 0 else int(argument) for place, argument in enumerate(sys.argv[1:])))
