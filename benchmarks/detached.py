"""Measures detached jobs: submission, group commit, the cost of the journal for a task, and recovery.

    python -m benchmarks.detached [--requests 100000] [--images 1000] [--rounds 5]

The engines are fakes from the tests, which do nothing; Ray, the job service, the journal and the files are real. The
journal is in the temporary folder of the system, or in that of TMPDIR. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.client.opening import start_pool
from modelpool.actors.control.detached.job_service import JobService
from modelpool.actors.control.detached.records import NewSubmission, RequestOutcome, request_text
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fakes import FakeEngine, fake_plan
from tests.actors.loop_connection import LoopConnection

WORKERS = 2
#: pause between two questions for the status
STATUS_SECONDS = 0.02


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    one, five, fifteen = os.getloadavg()
    print(f"{os.cpu_count()} cores, load {one:.1f} {five:.1f} {fifteen:.1f}\n")
    with tempfile.TemporaryDirectory() as folder:
        print("| group commit: threads | outcomes per second | transactions per second |\n|---|---|---|")
        for threads in (1, 4, 16, 64):
            outcomes, transactions = group_commit(Path(folder) / f"group-{threads}", threads)
            print(f"| {threads} | {outcomes:.0f} | {transactions:.0f} |")
        print(f"\n| recovery of {wanted.requests} queued requests | seconds |\n|---|---|")
        for what, seconds in recovery(Path(folder) / "recovery", wanted.requests):
            print(f"| {what} | {seconds:.2f} |")
        print("\n| with Ray | |\n|---|---|")
        for what, text in with_ray(Path(folder) / "ray", wanted.requests, wanted.images, wanted.rounds):
            print(f"| {what} | {text} |", flush=True)


def requests_of(count: int, first_seed: int = 0) -> list[GenerateRequest]:
    """Return small requests that differ in prompt and seed."""
    return [
        GenerateRequest(model="shapes", prompt=f"a red circle {seed}", seed=seed, steps=1, cfg=1.0)
        for seed in range(first_seed, first_seed + count)
    ]


def submit(journal: Journal, name: str, count: int, output: Path) -> None:
    """Write a submission to a journal."""
    journal.begin(NewSubmission(name, str(output), "", count))
    texts = [request_text(request, output) for request in requests_of(count)]
    for first in range(0, count, 1000):
        journal.append(name, first, texts[first : first + 1000])
    journal.seal(name)


def group_commit(folder: Path, threads: int, seconds: float = 2.0) -> tuple[float, float]:
    """Return the outcomes and the transactions per second if so many threads commit one outcome after the other."""
    journal = Journal(folder / "journal.sqlite")
    each = 20_000 // threads
    submit(journal, "a", each * threads, folder)
    commits = 0

    def count(statement: str) -> None:
        nonlocal commits
        commits += statement == "COMMIT"

    journal._connection.set_trace_callback(count)
    until = time.monotonic() + seconds
    done = [0] * threads

    def commit(thread: int) -> None:
        while done[thread] < each and time.monotonic() < until:
            place = thread * each + done[thread]
            journal.end([RequestOutcome("a", place, Outcome.SUCCEEDED, "a.png", 1, "x")])
            done[thread] += 1

    began = time.monotonic()
    workers = [threading.Thread(target=commit, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    passed = time.monotonic() - began
    journal.close()
    return sum(done) / passed, commits / passed


def recovery(folder: Path, count: int) -> Iterator[tuple[str, float]]:
    """Yield the seconds that a new service needs for a journal of `count` queued requests, step by step."""
    journal = Journal(folder / "journal.sqlite")
    submit(journal, "a", count, folder / "out")
    journal.close()
    line = LoopConnection(WORKERS, partial(FakeEngine, folder))
    began = time.monotonic()
    service = JobService(Journal(folder / "journal.sqlite"), lambda: line)
    yield "until the journal is open", time.monotonic() - began
    assert service.progress("a").record.pending
    yield "until the service answers", time.monotonic() - began
    while service.progress("a").in_pool < 1:
        time.sleep(0.001)
    yield "until the first requests are in the pool", time.monotonic() - began
    while service.progress("a").record.succeeded < 1:
        time.sleep(0.001)
    yield "until the first output is committed", time.monotonic() - began
    service.cancel("a")
    service.close()
    line.end()


def with_ray(folder: Path, count: int, images: int, rounds: int) -> Iterator[tuple[str, str]]:
    """Yield what needs a pool on Ray: submission, and a task with the journal and without."""
    config = PoolConfig().override(workers=WORKERS, device="cpu")
    pool_section = config.pool.model_copy(update={"journal": folder / "journal.sqlite"})
    config = config.model_copy(update={"pool": pool_section})
    opened = start_pool(config, fake_plan, keeps_jobs=True)
    with ModelPool(opened.connection, opened.close, None, jobs=opened.jobs) as pool:
        pool.wait_ready(300)
        off, on = tasks(pool, folder, images, rounds)
        yield f"{images} images of a driver that writes them", f"{statistics.median(off) / images * 1e3:.2f} ms each"
        yield f"{images} detached images", f"{statistics.median(on) / images * 1e3:.2f} ms each"
        yield "ratio of the medians", f"{statistics.median(on) / statistics.median(off):.2f}"
        wanted = requests_of(count, 1_000_000)
        with status_latencies(pool) as latencies:
            began = time.monotonic()
            jobs = pool.submit_detached(wanted, output=folder / "many")
            passed = time.monotonic() - began
        yield f"{count} requests submitted", f"{passed:.1f} s, {count / passed:.0f} per second"
        ordered = sorted(latencies)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        median, p99, most = (1e3 * each for each in (statistics.median(ordered), p99, ordered[-1]))
        yield "`status` meanwhile", f"median {median:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms"
        jobs.cancel()


def tasks(pool: ModelPool, folder: Path, images: int, rounds: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return the seconds of batches of a driver with its own folder, and of detached ones, in turns."""
    off, on = [], []
    for number in range(2 * rounds):
        wanted = requests_of(images, number * images)
        began = time.monotonic()
        if number % 2:
            jobs = pool.submit_detached(wanted, output=folder / f"on-{number}")
            assert jobs.wait().succeeded == images
            on.append(time.monotonic() - began)
        else:
            assert not pool.submit(wanted, output=folder / f"off-{number}").wait().failed
            off.append(time.monotonic() - began)
    return off, on


@contextmanager
def status_latencies(pool: ModelPool) -> Iterator[list[float]]:
    """Ask for the status all the time, and collect the seconds of each answer."""
    over, seconds = threading.Event(), list[float]()

    def ask() -> None:
        while not over.wait(STATUS_SECONDS):
            began = time.monotonic()
            pool.status()
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
