"""A pool with nodes that have no weights: they come from a source, and the images are the images of the complete
files."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.outputs.results.outcomes import JobFailure
from tests.architecture.source_tree import ROOT
from tests.pool.files.fetch.range_server import RangeServer, serving

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

SHAPES = ROOT / "examples" / "shapes"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A source with the example's model and LoRAs, and their hashes."""
    folder = tmp_path / "source"
    shutil.copytree(SHAPES / "models", folder)
    shutil.copytree(SHAPES / "loras", folder / "loras")
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in sorted(folder.rglob("*.safetensors"))
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    with serving(folder) as running:
        yield running


def config(server: RangeServer, tmp_path: Path, name: str) -> PoolConfig:
    return PoolConfig.model_validate(
        {
            "pool": {"device": "sim", "workers": 2, "vram": "64MiB"},
            "models": {"sources": [server.url], "cache": tmp_path / "cache", "registry": tmp_path / "registry"},
            "cluster": {"name": name},
        }
    )


def wanted() -> list[GenerateRequest]:
    plain = [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=2) for seed in range(4)]
    lora = GenerateRequest.model_validate(
        {"model": "shapes", "prompt": "a red circle", "seed": 9, "steps": 2, "loras": [{"name": "light"}]}
    )
    return [*plain, lora]


def pixels(pool: ModelPool) -> list[bytes]:
    jobs = pool.submit(wanted(), output=False)
    images = sorted(jobs.images(), key=lambda image: image.index)
    assert jobs.failures == ()
    return [image.pixels.tobytes() for image in images]


def test_images_from_a_source_are_those_of_local_files_even_when_a_worker_is_killed_while_it_fetches(
    server: RangeServer, tmp_path: Path
) -> None:
    size = (SHAPES / "models" / "shapes.safetensors").stat().st_size
    local = PoolConfig.model_validate(
        {
            "pool": {"device": "sim", "workers": 2, "vram": "64MiB"},
            "models": {"folders": [SHAPES / "models"], "loras": [SHAPES / "loras"]},
            "cluster": {"name": "local"},
        }
    )
    with ModelPool.start(local) as pool:
        expected = pixels(pool)
    with ModelPool.start(config(server, tmp_path, "remote")) as pool:
        pool.wait_ready(120)
        assert [model.name for model in pool.models()] == ["shapes"]
        described_bytes = server.sent_bytes("shapes.safetensors")
        server.bytes_per_second = 2e6
        jobs = pool.submit(wanted(), output=False)
        for _ in range(3000):
            if server.sent_bytes("shapes.safetensors") - described_bytes > size // 4:
                break
            time.sleep(0.01)
        busy = [worker for worker in pool.status().workers if worker.task is not None]
        pids = {worker_id: report.pid for worker_id, report in pool.memory().items()}
        os.kill(pids[busy[0].id], signal.SIGKILL)
        server.bytes_per_second = None
        images = sorted(jobs.images(), key=lambda image: image.index)
        assert jobs.failures == ()
        assert [image.pixels.tobytes() for image in images] == expected
        # what was fetched before the kill was not fetched again, except for the chunks in flight
        assert server.sent_bytes("shapes.safetensors") - described_bytes < 1.3 * size
        tasks = [task for image in images for task in image.tasks]
        assert sum(task.fetched_bytes for task in tasks) > 0
        assert pixels(pool) == expected


def test_a_wrong_hash_of_the_source_fails_the_job_with_its_url(server: RangeServer, tmp_path: Path) -> None:
    (server.root / "SHA256SUMS").write_text(f"{'ab' * 32}  shapes.safetensors\n")
    with ModelPool.start(config(server, tmp_path, "wrong")) as pool:
        jobs = pool.submit(wanted()[:1], output=False)
        (failure,) = jobs.results()
        assert isinstance(failure, JobFailure)
        assert f"{server.url}shapes.safetensors: found the SHA-256" in failure.message
        assert f"expected {'ab' * 32} as published by the source" in failure.message
