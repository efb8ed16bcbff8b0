"""Measures what queued jobs of an attached driver cost the controller: memory, submissions per second, status, cancel.

    python -m benchmarks.queued_jobs [--jobs 20000 50000]

The controller and the core are real, on an event loop of this process; the catalog is that of the tests, and one worker
runs one task for ever. Each number of jobs is measured in processes of its own: memory by the resident size of the
process and by tracemalloc, times without tracemalloc. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc

import psutil

from modelpool import GenerateRequest
from modelpool.actors.client.client import CHUNK
from modelpool.actors.control.controller import Controller
from modelpool.actors.worker.wire.messages import Submission, SubmissionId
from tests.actors.fake_fleet import ME, Desk


def main() -> None:
    """Measure each number of jobs in processes of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[20_000, 50_000])
    parser.add_argument("--measure", choices=["time", "trace"], help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.measure:
        print(json.dumps(asyncio.run(measured(wanted.jobs[0], wanted.measure == "trace"))))
        return
    print("| jobs | KiB each, tracemalloc | KiB each, resident | after their end | submitted per second (CPU) |")
    print("| --- | --- | --- | --- | --- |")
    for jobs in wanted.jobs:
        time_of, trace = (
            json.loads(
                subprocess.run(
                    [sys.executable, "-m", __spec__.name, "--jobs", str(jobs), "--measure", way],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
            )
            for way in ("time", "trace")
        )
        print(
            f"| {jobs} | {trace['queued_kib']:.2f} | {time_of['queued_kib']:.2f} | {trace['ended_kib']:.2f} "
            f"| {time_of['per_second']:.0f} |"
        )
        print(f"status {time_of['status_ms']:.1f} ms, cancel {time_of['cancel_seconds']:.2f} s", file=sys.stderr)


async def measured(jobs: int, trace: bool) -> dict[str, float]:
    """Queue so many jobs as `ModelPool.submit` does, and cancel them."""
    desk = await Desk().open()
    await submitted(desk.controller, "warm-up", 2 * CHUNK)
    await desk.controller.cancel(ME, SubmissionId("warm-up"))
    await desk.hear()
    desk.ended.clear()
    if trace:
        tracemalloc.start()
    before, began = memory_bytes(trace), time.process_time()
    await submitted(desk.controller, "many", jobs)
    seconds = time.process_time() - began
    queued = memory_bytes(trace) - before
    began = time.process_time()
    await desk.controller.status()
    status_seconds = time.process_time() - began
    began = time.process_time()
    await desk.controller.cancel(ME, SubmissionId("many"))
    cancel_seconds = time.process_time() - began
    ended = memory_bytes(trace) - before
    return {
        "queued_kib": queued / jobs / 1024,
        "ended_kib": ended / jobs / 1024,
        "per_second": jobs / seconds,
        "status_ms": status_seconds * 1e3,
        "cancel_seconds": cancel_seconds,
    }


async def submitted(controller: Controller, name: str, jobs: int) -> None:
    """Submit small requests that differ in prompt and seed."""
    for first in range(0, jobs, CHUNK):
        requests = tuple(
            GenerateRequest(model="shapes", prompt=f"{name}: a red circle {seed}", seed=seed, steps=20, cfg=5.0)
            for seed in range(first, min(first + CHUNK, jobs))
        )
        hold = first + CHUNK < jobs
        await controller.submit(Submission(ME, SubmissionId(name), first, requests, hold))


def memory_bytes(trace: bool) -> int:
    """Return the traced or the resident bytes of this process."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] if trace else psutil.Process().memory_info().rss


if __name__ == "__main__":
    main()
