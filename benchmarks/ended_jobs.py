"""Measures what ended jobs cost the controller: memory over many jobs that were submitted, run and ended.

    python -m benchmarks.ended_jobs [--jobs 1000000] [--every 100000] [--at-once 400]

The controller and the core are real, on an event loop of this process; the workers are those of the tests, which end
each task at once, and two clients' submissions take turns. Prints a row of a Markdown table after each `--every` jobs:
the resident size of the process, and what it grew for each job since the row before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

import psutil

from modelpool.actors.request.requests import GenerateRequest
from tests.actors.fake_fleet import Desk

WORKERS = 2


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=100_000, help="jobs of a row")
    parser.add_argument("--at-once", type=int, default=400, help="jobs that are queued at a time")
    wanted = parser.parse_args()
    asyncio.run(measured(wanted.jobs, wanted.every, wanted.at_once))


async def measured(jobs: int, every: int, at_once: int) -> None:
    """Run so many jobs in submissions of `at_once`, and print a row after each `every`."""
    desk = await Desk(workers=WORKERS).open()
    print("| jobs that ended | resident MiB | bytes per job since the row before | CPU s | jobs/s of CPU |")
    print("| --- | --- | --- | --- | --- |")
    ended, bytes_before, ended_before, began = 0, memory_bytes(), 0, time.process_time()
    for target in range(every, jobs + 1, every):
        while ended < target:
            count = min(at_once, target - ended)
            requests = [
                GenerateRequest(model="shapes", prompt=f"a cat {seed}", seed=seed)
                for seed in range(ended, ended + count)
            ]
            await desk.submit(*requests, submission=f"jobs from {ended}")
            await desk.run_dry()
            forget(desk)
            ended += count
        now, seconds = memory_bytes(), time.process_time() - began
        grown = (now - bytes_before) / (ended - ended_before)
        print(f"| {ended:,} | {now / 2**20:.0f} | {grown:.0f} | {seconds:.0f} | {ended / seconds:.0f} |", flush=True)
        bytes_before, ended_before = now, ended


def forget(desk: Desk) -> None:
    """Drop what the workers and clients of the tests remember of ended jobs."""
    desk.ended.clear()
    desk.fleet.sent.clear()
    desk.fleet.joined.clear()
    for worker in desk.fleet.workers.values():
        worker.made.clear()


def memory_bytes() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    main()
