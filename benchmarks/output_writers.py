"""Measures how fast a batch is written to an object store that takes a while for each PUT, and what passes through the
driver.

    python -m benchmarks.output_writers [--images 300] [--side 512] [--put-ms 100] [--workers 2]

The store is moto's S3 server over HTTP, with a delay before each PUT. The engines are fakes from the tests, which make
images at once: the figures are those of the writing. Ray, the core and the client are the real ones. Ways:

one thread   the driver fetches, encodes and writes every image in one thread, as before version 0.2.0
driver       the driver does so in several threads: where no process of the pool can write to the place
node         a process on the node of the worker writes, and the driver gets the entry of the manifest

Prints a Markdown table. "fetched" are the pixels that the driver has fetched, and "uploaded" the bytes that it has sent
to the store; "CPU" is the time of the driver's process.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from modelpool.actors.client import output_writer
from modelpool.actors.client.client import ModelPool
from modelpool.actors.control.output_commit import WRITE_THREADS
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.ray.ray_connection import RayConnection
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.fakes import start_fake_pool

WAYS = ("one thread", "driver", "node")
#: of the images that wake the processes up, and are not measured
_WARM_UP = 20


class Traffic:
    """Bytes through this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fetched_bytes = 0
        self.uploaded_bytes = 0
        self._lock = threading.Lock()
        fetch, create = RayConnection.fetch, ObjectPrefix.create

        def counted_fetch(connection: RayConnection, ref: Any) -> Any:
            result = fetch(connection, ref)
            with self._lock:
                self.fetched_bytes += result.pixels_HWC.nbytes if isinstance(result, ImagePixels) else 0
            return result

        def counted_create(objects: ObjectPrefix, name: str, content: bytes) -> bool:
            with self._lock:
                self.uploaded_bytes += len(content)
            return create(objects, name, content)

        patch.setattr(RayConnection, "fetch", counted_fetch)
        patch.setattr(ObjectPrefix, "create", counted_create)

    def reset(self) -> None:
        """Count from 0."""
        self.fetched_bytes = self.uploaded_bytes = 0


def serve_slowly(port: int, put_seconds: float) -> None:
    """Run moto's S3 server with a delay before each PUT, until the process is ended."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    def delayed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "PUT":
            time.sleep(put_seconds)
        return app(environ, start_response)

    run_simple("127.0.0.1", port, delayed, threaded=True)


@contextmanager
def slow_s3(put_seconds: float) -> Iterator[None]:
    """Run such a server with a bucket in a process of its own; the environment of this process leads there."""
    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"from modelpool.benchmarks.output_writers import serve_slowly; serve_slowly({port}, {put_seconds})"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
    try:
        for _ in range(300):
            with suppress(Exception):
                boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
                break
            time.sleep(0.2)
        yield
    finally:
        server.kill()
        server.wait()


def measure(way: str, images: int, side: int, workers: int, patch: pytest.MonkeyPatch) -> tuple[float, float, Traffic]:
    """Return the seconds of a batch, those of this process on the CPU, and the bytes that went through it."""
    patch.setattr(output_writer, "WRITE_THREADS", 1 if way == "one thread" else WRITE_THREADS)
    traffic = Traffic(patch)
    url = f"s3://bucket/{way.replace(' ', '-')}"
    with start_fake_pool("writers", workers=workers, image_side=side) as pool:
        pool.wait_ready(300)
        if way != "node":
            pool._outputs._node_writers = None
        _run(pool, url, range(_WARM_UP))
        if way == "node":
            _wait_for_writers(pool, url)
        traffic.reset()
        started, cpu_started = time.perf_counter(), time.process_time()
        _run(pool, url, range(_WARM_UP, _WARM_UP + images))
        return time.perf_counter() - started, time.process_time() - cpu_started, traffic


def _run(pool: ModelPool, url: str, seeds: range) -> None:
    wanted = [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=1, cfg=1.0) for seed in seeds]
    summary = pool.submit(wanted, output=url).wait()
    assert summary.succeeded == len(wanted), summary


def _wait_for_writers(pool: ModelPool, url: str) -> None:
    writers: Any = pool._outputs._node_writers
    while not any(opened.is_open for opened in writers._opened.values()):
        time.sleep(0.05)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--put-ms", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    wanted = parser.parse_args()
    print("| way | images/s | fetched KB per image | uploaded KB per image | CPU ms per image |")
    print("|---|---|---|---|---|")
    with slow_s3(wanted.put_ms / 1000):
        for way in wanted.ways:
            with pytest.MonkeyPatch.context() as patch:
                seconds, cpu_seconds, traffic = measure(way, wanted.images, wanted.side, wanted.workers, patch)
            fetched, uploaded = (size / wanted.images / 1e3 for size in (traffic.fetched_bytes, traffic.uploaded_bytes))
            cpu_ms = cpu_seconds / wanted.images * 1e3
            rate = wanted.images / seconds
            print(f"| {way} | {rate:.1f} | {fetched:.0f} | {uploaded:.1f} | {cpu_ms:.1f} |", flush=True)
    print(f"\n{wanted.workers} workers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
