"""Measures the overhead of the pool, with engines that do nothing: driver to controller to worker and back.

    python -m benchmarks.overhead [--workers N] [--images N] [--stages N]

Prints a Markdown table. The engines are fakes from the tests; Ray, the core and the client are the real ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from modelpool.actors.client.client import ModelPool
from modelpool.actors.control.controller import Controller
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.fakes import start_fake_pool


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--stages", type=int, default=300)
    wanted = parser.parse_args()
    with start_fake_pool("overhead", workers=wanted.workers) as pool:
        pool.wait_ready(300)
        warm_up(pool)
        calls = latencies(wanted.stages, lambda i: pool._connection.call(Controller.enter, pool._client_id))
        stages = latencies(wanted.stages, lambda i: pool.encode(f"text {i}", model="shapes").result())
        seconds, tasks = batch(pool, wanted.images)
    one, five, fifteen = os.getloadavg()
    print(f"{wanted.workers} workers, {os.cpu_count()} cores, load {one:.1f} {five:.1f} {fifteen:.1f}\n")
    print("| operation | p50 ms | p99 ms | per second |")
    print("|---|---|---|---|")
    print(row("an empty call to the controller", calls))
    print(row("one task, from submission to the result in the driver", stages))
    print(f"| {tasks} tasks of {wanted.images} images, submitted at once | | | {tasks / seconds:.0f} tasks |")


def warm_up(pool: ModelPool) -> None:
    """Run some tasks, so that every process has imported its modules."""
    pool.submit(GenerateRequest(model="shapes", prompt="warm", seed=seed, steps=1) for seed in range(20)).wait()


def latencies(count: int, call: Callable[[int], object]) -> list[float]:
    """Return the seconds of each of `count` sequential calls."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return seconds


def batch(pool: ModelPool, images: int) -> tuple[float, int]:
    """Return the seconds for a batch of images, and the number of its tasks."""
    wanted = [
        GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=1, cfg=1.0) for seed in range(images)
    ]
    started = time.perf_counter()
    summary = pool.submit(wanted).wait()
    return time.perf_counter() - started, len(summary.tasks)


def row(what: str, seconds: list[float]) -> str:
    """Return one row of the table."""
    p99 = statistics.quantiles(seconds, n=100)[98]
    return f"| {what} | {statistics.median(seconds) * 1e3:.1f} | {p99 * 1e3:.1f} | {len(seconds) / sum(seconds):.0f} |"


if __name__ == "__main__":
    main()
