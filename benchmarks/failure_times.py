"""Measures the time until a failure is detected, and until work continues.

Each failure has a program of its own: a pool of two simulated GPUs on this machine renders small images all the time,
one of its processes is killed or stopped (SIGSTOP), and the status of the pool and the images are watched.

- detected: the worker is given up, and `status` counts a restart; for a pool that is lost, the driver gets PoolLost
- continues: the worker that replaces the lost one has ended a run; the driver of a lost pool may start a new one

With --restarts: a pool of `modelpool up` gets detached jobs, and its controller is killed at once; the daemon starts
another one. Measured are the times until the new controller answers and until all images are committed, with workers
that are taken over, and with workers that end with their controller (`worker_lease_seconds = 0`).

Usage: python -m benchmarks.failure_times [--restarts]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.cli.cluster.daemon import start_in_background, stop_running_pool
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.run_file import RunningPool
from modelpool.pool.values.core.errors import format_bytes

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
#: of each measurement of a restart
IMAGES = 4
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
    parser.add_argument("--restarts", action="store_true", help="measure restarts of the controller")
    parser.add_argument("--restart", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.restart:
        device, lease_seconds = arguments.restart
        print(json.dumps(asdict(restart_times(device, float(lease_seconds)))), flush=True)
        return
    if arguments.restarts:
        _print_restarts()
        return
    one = arguments.one
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


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Seconds since the controller was killed, and the weights that were uploaded again."""

    answers: float
    continues: float
    uploaded_bytes: int
    same_workers: bool


def restart_times(device: str, lease_seconds: float) -> RestartTimes:
    """Submit detached jobs to a pool in the background, and kill its controller at once."""
    name = f"failure-times-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        config = PoolConfig.load(PRESET).override(device=device, workers=2, name=name)
        changed = {"worker_lease_seconds": lease_seconds, "journal": Path(folder) / "journal"}
        running = start_in_background(config.model_copy(update={"pool": config.pool.model_copy(update=changed)}))
        try:
            return _restarted(running, Path(folder))
        finally:
            stop_running_pool(name)


def _restarted(running: RunningPool, folder: Path) -> RestartTimes:
    with ModelPool.connect(running.name) as pool:
        pool.wait_ready(120)
        list(pool.submit([_request(seed) for seed in range(4)]).results())  # both workers have the weights
        before = _pids(pool)
        (controller,) = _processes("controller", psutil.Process(running.pid).children(recursive=True), {})
        jobs = pool.submit_detached([_request(100 + seed) for seed in range(IMAGES)], output=folder)
        controller.kill()
        began = time.monotonic()
        _wait(lambda: jobs.progress().record.succeeded == IMAGES)
        continues = time.monotonic() - began
    with ModelPool.connect(running.name) as pool:
        status = pool.status()
        uploaded_bytes = sum(worker.uploaded_bytes for worker in status.workers)
        answers = time.monotonic() - began - status.seconds
        return RestartTimes(answers, continues, uploaded_bytes, _pids(pool) == before)


def _pids(pool: ModelPool) -> set[int]:
    return {memory.pid for memory in pool.memory().values()}


def _print_restarts() -> None:
    print("| device | workers | new controller answers | images committed | weights uploaded | same processes |")
    print("|---|---|---|---|---|---|")
    for device in ("sim", "cpu"):
        for lease_seconds, text in ((0, "end with it"), (180, "are taken over")):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.failure_times", "--restart", device, str(lease_seconds)],
                capture_output=True, text=True, check=False, start_new_session=True,
            )  # fmt: skip
            if done.returncode:
                print(f"| {device} | {text} | failed: {done.stderr.strip().splitlines()[-1]} | | | |", flush=True)
                continue
            found = RestartTimes(**json.loads(done.stdout.splitlines()[-1]))
            same = "yes" if found.same_workers else "no"
            times = f"{_text(found.answers)} | {_text(found.continues)}"
            print(f"| {device} | {text} | {times} | {format_bytes(found.uploaded_bytes)} | {same} |", flush=True)


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
