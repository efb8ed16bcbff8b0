"""Measures how long a user waits for the pool while another user submits many sizes that are new to it.

    python -m benchmarks.shared_catalog [--sizes N] [--before SECONDS]

A pool of two workers on the CPU runs known requests from a long queue. One user submits requests of `--sizes` new
sizes, for each of which the catalog makes dry runs of the model. Meanwhile another user asks for the pool's state, for
the models, and submits known requests. Prints the times until these are answered, before and during the submission of
the sizes, and how the workers are used.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modelpool import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.request.requests import GenerateRequest

SHAPES = Path(__file__).resolve().parents[1] / "examples" / "shapes"
MODEL = "shapes"
WORKERS = 2
QUESTIONS = ("state", "models", "submission")
_ASKED = itertools.count(1)


def known_request(seed: int) -> GenerateRequest:
    """Return a request of a size that the pool knows."""
    return GenerateRequest(model=MODEL, prompt="a red circle", seed=seed, steps=4, width=64, height=64)


def new_sizes(count: int) -> list[GenerateRequest]:
    """Return `count` requests, each of another size."""
    sides = itertools.islice(itertools.product(range(72, 512, 8), repeat=2), count)
    return [
        GenerateRequest(model=MODEL, prompt="a red circle", seed=1, steps=1, width=width, height=height)
        for width, height in sides
    ]


def ask_while(pool: ModelPool, goes_on: Callable[[], bool]) -> dict[str, list[float]]:
    """Ask the questions of the second user until `goes_on` is false, one of each kind at a time; return the seconds of
    each."""
    seeds = itertools.count(1_000_000 * next(_ASKED))
    questions: dict[str, Callable[[], object]] = {
        "state": pool.status,
        "models": pool.models,
        "submission": lambda: pool.submit(known_request(next(seeds)), output=False),
    }
    found: dict[str, list[float]] = {name: [] for name in questions}

    def ask(name: str) -> None:
        while goes_on():
            started = time.perf_counter()
            questions[name]()
            found[name].append(time.perf_counter() - started)
            time.sleep(0.05)

    threads = [threading.Thread(target=ask, args=(name,)) for name in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """The share of a time in which workers had no run, and the tasks that ended per second."""

    idle: float
    tasks: float


def sums(pool: ModelPool) -> tuple[float, float]:
    """Return the seconds in which workers have had a run, and the number of ended tasks."""
    families = {family.name: family for family in pool.metrics()}
    names = "modelpool_gpu_busy_seconds_total", "modelpool_tasks_total"
    busy_seconds, tasks = (sum(sample.value for sample in families[name].samples) for name in names)
    return busy_seconds, tasks


def use_during(pool: ModelPool, measured: Callable[[], None]) -> WorkerUse:
    """Return how the workers are used while `measured` goes on."""
    began, (busy_before, tasks_before) = time.perf_counter(), sums(pool)
    measured()
    seconds, (busy_seconds, tasks) = time.perf_counter() - began, sums(pool)
    return WorkerUse(1 - (busy_seconds - busy_before) / (WORKERS * seconds), (tasks - tasks_before) / seconds)


def line(label: str, seconds: dict[str, list[float]], use: WorkerUse) -> str:
    """Return one row of the table."""
    cells = []
    for name in QUESTIONS:
        found = seconds[name]
        p99 = statistics.quantiles(found, n=100)[98] if len(found) > 1 else found[0]
        cells.append(f"{statistics.median(found) * 1e3:.0f} / {p99 * 1e3:.0f} / {max(found) * 1e3:.0f} ({len(found)})")
    return f"| {label} | {' | '.join(cells)} | {100 * use.idle:.0f} % | {use.tasks:.0f} |"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=50)
    parser.add_argument("--before", type=float, default=10.0, help="seconds that are measured without new sizes")
    wanted = parser.parse_args()
    config = PoolConfig().override(models=[SHAPES], device="cpu", workers=WORKERS, threads=1)
    with ModelPool.start(config) as pool:
        pool.wait_ready(300)
        pool.submit([known_request(seed) for seed in range(4)], output=False).wait()
        feed = itertools.count(10)
        running = [pool.submit([known_request(next(feed)) for _ in range(256)], output=False) for _ in range(16)]
        rows = []
        ends_at = time.perf_counter() + wanted.before
        answers: list[dict[str, list[float]]] = []
        use = use_during(pool, lambda: answers.append(ask_while(pool, lambda: time.perf_counter() < ends_at)))
        rows.append(line("without new sizes", answers.pop(), use))
        accepted = threading.Event()

        def submit_sizes() -> None:
            pool.submit(new_sizes(wanted.sizes), output=False)
            accepted.set()

        other = threading.Thread(target=submit_sizes)
        began = time.perf_counter()
        other.start()
        use = use_during(pool, lambda: answers.append(ask_while(pool, lambda: not accepted.is_set())))
        spent = time.perf_counter() - began
        other.join()
        rows.append(line(f"{wanted.sizes} new sizes, accepted after {spent:.1f} s", answers.pop(), use))
        for jobs in running:
            jobs.cancel()
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{WORKERS} workers, {os.cpu_count()} cores, load {load}; ms: median / 99th percentile / longest (number)\n")
    print("| | state | models | submission | workers without a run | tasks a second |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
