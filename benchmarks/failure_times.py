"""Measures the time until a failure is detected, and until work continues.

Each failure has a program of its own: a pool of two simulated GPUs on this machine renders small images all the time,
one of its processes is killed or stopped (SIGSTOP), and the status of the pool and the images are watched.

- detected: the worker is given up, and `status` counts a restart; for a pool that is lost, the driver gets PoolLost
- continues: the worker that replaces the lost one has ended a run; the driver of a lost pool may start a new one

Usage: python -m benchmarks.failure_times
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.results.outcomes import PoolLost

PRESET = Path(__file__).resolve().parents[1] / "configs" / "laptop.toml"
WORKER = "gpu-0"
#: failures, with the process that is hit and whether it is stopped instead of killed
FAILURES = {
    "worker killed during a run": ("worker", False),
    "worker stopped during a run": ("worker", True),
    "idle worker killed": ("idle worker", False),
    "idle worker stopped": ("idle worker", True),
    "controller killed": ("controller", False),
    "control service (GCS) killed": ("gcs_server", False),
    "control service (GCS) stopped": ("gcs_server", True),
    "control service (GCS) and a worker killed": ("gcs_server and worker", False),
}
MOST_SECONDS = 240.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the failure; None if it did not happen within `MOST_SECONDS`."""

    shown: float | None
    detected: float | None
    continues: float | None
    message: str


def main() -> None:
    """Print the table, or with --one the times of one failure as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=FAILURES, help=argparse.SUPPRESS)
    one = parser.parse_args().one
    if one is not None:
        print(json.dumps(asdict(times_of(*FAILURES[one]))), flush=True)
        os._exit(0)  # a Ray without its control service cannot be shut down in order
    print("| failure | status reports it | detected | work continues | message |\n|---|---|---|---|---|")
    for name in FAILURES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.failure_times", "--one", name],
            capture_output=True, text=True, check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode:
            print(f"| {name} | | | | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        found = Times(**json.loads(done.stdout.splitlines()[-1]))
        cells = (_text(found.shown), _text(found.detected), _text(found.continues), found.message)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def times_of(target: str, is_stopped: bool) -> Times:
    """Let a pool fail, and watch it."""
    with ModelPool.start(PoolConfig.load(PRESET).override(device="sim", workers=2)) as pool:
        pool.wait_ready(120)
        list(pool.submit([_request(seed) for seed in range(4)]).results())  # the lengths of runs are known from now on
        pids = {worker_id: memory.pid for worker_id, memory in pool.memory().items()}
        family = psutil.Process().children(recursive=True)
        busy = contextlib.nullcontext() if target == "idle worker" else _working(pool)
        with busy:
            if target != "idle worker":
                _wait(lambda: pool.status().workers[0].state == "busy")
            for name in target.split(" and "):
                for process in _processes(name, family, pids):
                    (process.suspend if is_stopped else process.kill)()
            try:
                return _watch(pool, time.monotonic())
            finally:
                for process in family:
                    with contextlib.suppress(psutil.Error):
                        process.kill()


def _watch(pool: ModelPool, began: float) -> Times:
    """Poll the status until the worker is replaced and has run something, or the pool is lost."""
    shown: float | None = None
    detected: float | None = None
    message, runs = "", 0
    while (passed := time.monotonic() - began) < MOST_SECONDS:
        try:
            worker = pool.status().workers[0]
        except PoolLost as lost:
            return Times(shown, time.monotonic() - began, None, f"driver: {lost}")
        if worker.silent_seconds and shown is None:
            shown = passed
        if worker.incarnation > 1 and detected is None:
            detected, message, runs = passed, worker.trouble, worker.runs
            pool.submit([_request(1000 + seed) for seed in range(8)])
        if detected is not None and worker.runs > runs:
            return Times(shown, detected, passed, message)
        time.sleep(POLL_SECONDS)
    return Times(shown, detected, None, message)


def _processes(name: str, family: list[psutil.Process], pids: dict[str, int]) -> list[psutil.Process]:
    """Return the processes to hit."""
    if name.endswith("worker"):
        return [psutil.Process(pids[WORKER])]
    title = "ray::ControllerA" if name == "controller" else name
    return [process for process in family if process.is_running() and process.name().startswith(title[:15])]


@contextlib.contextmanager
def _working(pool: ModelPool) -> Iterator[None]:
    """Keep both workers busy meanwhile."""
    over = threading.Event()

    def work() -> None:
        seed = 10
        with contextlib.suppress(Exception):  # the pool is lost: watched elsewhere
            while not over.is_set():
                seed += 8
                list(pool.submit([_request(seed + place) for place in range(8)]).results())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _request(seed: int) -> GenerateRequest:
    return GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=40)


def _wait(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(POLL_SECONDS)


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
