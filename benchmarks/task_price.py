"""Compares the cost of a task through the pool's controller with empty actor calls, on one local Ray.

    python -m benchmarks.task_price [--workers N] [--calls N] [--images N] [--rounds N] [--run-ms X] [--send-ahead X]
        [--profile]

Prints a Markdown table. The engines do nothing; Ray, the core, the controller, the dispatcher, the workers and the
client are the real ones. The rows are:

1. In the controller's process, sequentially: an empty call to a worker, awaited; the call that runs a task, with a
   prepared request; and a task that is submitted (divided into tasks, checked, queued), dispatched to a worker, run
   there by an engine that does nothing, reported, resolved and sent as a client event. All call the same workers in the
   same concurrency group from the same event loop. The difference is the overhead of the pool over the call that any
   scheduler must make.
2. The same from the driver: a call to an async actor, a call that such an actor forwards to a worker (the minimum for
   any service between driver and workers), and one stage of an image whose result reaches the driver.
3. One image after the other: encode, sample and decode, of a new prompt each, from the driver until its end is there.
4. With all workers busy: calls per second when the controller's process keeps one call at each worker, and tasks per
   second when a complete batch is waiting; there, too, each worker has one task at a time.
5. A batch: tasks per second accepted (until `submit` returns, all checked and queued), and completed; and how long a
   worker does nothing between two tasks of it. With `--run-ms`, each run waits for that time, so that workers, and not
   the cores of a small machine, limit the batch. `--send-ahead` sets `send_ahead_seconds`; 0 turns it off.

`--profile` also prints the functions of the controller's event loop with most CPU time in one more batch.

Rounds of all rows take turns; each figure is the median of the rounds, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.spread import spread
from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.pool_plan import PoolPlan
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    EncodeParams,
    ImagePixels,
    Latent,
    Result,
    SampleParams,
    StageParams,
)
from modelpool.pool.values.specs.spec import RunCost, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import plan
from modelpool.scheduler.model.config import SchedulerConfig
from tests.actors.fakes import MODELS, FakeEngine, fake_plan, spec_of


class IdleEngine(FakeEngine):
    """Returns results of a few bytes. Its weights stay, and loading them takes no time."""

    def run(
        self, task: TaskSpec, work: StageParams, inputs: tuple[Result, ...], *_: object, **__: object
    ) -> tuple[Result, RunCost]:
        """Return an empty result, after the time of a run."""
        if not {use.component for use in task.uses}.issubset([held.component for held in self._residency.entries]):
            specs = {use.component: spec_of(work.model, use.component) for use in task.uses}
            self._residency = plan(self._residency, task.uses, specs, task.activation_bytes).after
        seconds = self._image_side / 1000  # the number that an engine of a plan has
        if seconds:
            time.sleep(seconds)
        return empty_result(work), RunCost(run_seconds=seconds or 1e-6, resident=True)


def empty_result(work: StageParams) -> Result:
    """Return the smallest result of a stage."""
    match work:
        case EncodeParams():
            return Encoded(np.zeros((1, 1), np.float32))
        case SampleParams():
            return Latent(np.zeros((4, 1, 1), np.float32))
        case DecodeParams():
            return ImagePixels(np.zeros((1, 1, 3), np.uint8))


def idle_plan(config: PoolConfig, gpu_count: int, can_grow: bool, run_ms: int = 0) -> PoolPlan:
    """Return the plan of a pool whose engines do nothing, for `run_ms` each run."""
    return fake_plan(config, gpu_count, can_grow, image_side=run_ms, engine=IdleEngine)


@dataclass
class Figures:
    """The measurements of one row by round: latencies of calls in ms, calls per second, CPU ms per call, and ms that a
    worker is idle per task."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    a_second: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        """Add one round of sequential calls."""
        self.p50_ms.append(statistics.median(seconds) * 1e3)
        self.p99_ms.append(statistics.quantiles(seconds, n=100)[98] * 1e3)
        self.a_second.append(len(seconds) / sum(seconds))


class Measured:
    """A pool whose engines do nothing, on a separate Ray, and the rows that are measured with it."""

    def __init__(self, pool: ModelPool, controller, calls: int, images: int, workers: int, run_ms: int) -> None:
        self._workers = workers
        self._run_ms = run_ms
        self._pool = pool
        self._controller = controller
        self._calls = calls
        self._images = images
        self._labels = (f"round {number}" for number in itertools.count())
        self.rows: dict[str, Figures] = {name: Figures() for name in ROWS}

    def round(self) -> None:
        """Measure every row once."""
        import ray

        call, count, label = self._controller, self._calls, next(self._labels)
        self.rows[BARE].add(ray.get(call.bare_calls.remote(count)))
        self.rows[RUN].add(ray.get(call.run_calls.remote(count)))
        self.rows[TASK].add(ray.get(call.tasks.remote(count, label)))
        self.rows[DRIVER_BARE].add(seconds_of(count, lambda i: ray.get(call.nothing.remote())))
        self.rows[DRIVER_RELAY].add(seconds_of(count, lambda i: ray.get(call.relay.remote())))
        self.rows[DRIVER_TASK].add(seconds_of(count, lambda i: self._stage(f"driver, {label} {i}")))
        before = self._cpu_seconds()
        images = max(1, count // 6)
        self.rows[IMAGE].add(seconds_of(images, lambda i: self._image(f"image, {label} {i}")))
        self.rows[IMAGE].cpu_ms.append((self._cpu_seconds() - before) / (3 * images) * 1e3)
        started = time.perf_counter()
        ray.get([call.nothing.remote() for _ in range(10 * count)])
        self.rows[PIPELINED].a_second.append(10 * count / (time.perf_counter() - started))
        for name, runs in ((FLOOD, False), (RUN_FLOOD, True)):
            before = self._cpu_seconds()
            self.rows[name].a_second.append(ray.get(call.flood.remote(4 * count, runs)))
            self.rows[name].cpu_ms.append((self._cpu_seconds() - before) / (4 * count) * 1e3)
        before = self._cpu_seconds()
        accepted, done, tasks = self._batch(label)
        self.rows[DONE].cpu_ms.append((self._cpu_seconds() - before) / tasks * 1e3)
        self.rows[DONE].a_second.append(done)
        self.rows[DONE].idle_ms.append(self._workers / done * 1e3 - self._run_ms)
        self.rows[ACCEPTED].a_second.append(accepted)

    def profile(self) -> str:
        """Return a profile of the controller during a batch."""
        import ray

        ray.get(self._controller.profile.remote())
        self._batch(next(self._labels))
        return ray.get(self._controller.profiled.remote())

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of the controller's process."""
        import ray

        return ray.get(self._controller.cpu_seconds.remote())

    def _stage(self, text: str) -> object:
        return self._pool.encode(text, model=MODELS[0]).result()

    def _image(self, text: str) -> object:
        return self._pool.submit([GenerateRequest(model=MODELS[0], prompt=text, steps=1, cfg=1.0)]).wait()

    def _batch(self, label: str) -> tuple[float, float, int]:
        """Return tasks per second accepted and completed, for a batch of one prompt, and the number of tasks."""
        wanted = [
            GenerateRequest(model=MODELS[0], prompt=label, seed=number, steps=1, cfg=1.0)
            for number in range(self._images)
        ]
        started = time.perf_counter()
        jobs = self._pool.submit(wanted)
        accepted = time.perf_counter() - started
        tasks = len(jobs.wait().tasks)
        return tasks / accepted, tasks / (time.perf_counter() - started), tasks


BARE = "in the controller: an empty call to a worker"
RUN = "in the controller: the call to a worker that runs a task"
TASK = "in the controller: a task, from submission to client event"
DRIVER_BARE = "from the driver: an empty call to an async actor"
DRIVER_RELAY = "from the driver: the same, forwarded to a worker"
DRIVER_TASK = "from the driver: a task, until its result is in the driver"
IMAGE = "from the driver: an image of three tasks, until its end is there, one after the other"
PIPELINED = "from the driver: concurrent empty calls to an async actor"
FLOOD = "in the controller: empty calls, one at a time per worker"
RUN_FLOOD = "in the controller: calls that run a task, one at a time per worker"
DONE = "a batch: tasks completed, one at a time per worker"
ACCEPTED = "a batch: tasks accepted"
ROWS = (BARE, RUN, TASK, DRIVER_BARE, DRIVER_RELAY, DRIVER_TASK, IMAGE, PIPELINED, FLOOD, RUN_FLOOD, DONE, ACCEPTED)


def seconds_of(count: int, call: Callable[[int], object]) -> list[float]:
    """Return the seconds of each of `count` sequential calls."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median of the ratios of the rounds, with minimum and maximum."""
    return spread([a / b for a, b in zip(above, below, strict=True)], 2)


def table(rows: dict[str, Figures]) -> str:
    """Return all rows as a Markdown table, with ratios between rows."""
    lines = [
        "| operation | p50 ms | p99 ms | per second | CPU ms of the controller, each | ms without a run, each |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {spread(row.p50_ms, 2)} | {spread(row.p99_ms, 1)} | {spread(row.a_second, 0)} "
        f"| {spread(row.cpu_ms, 2)} | {spread(row.idle_ms, 1)} |"
        for name, row in rows.items()
    ]
    lines += [
        "",
        f"Ratio of a task in the controller to an empty call (p50): {ratio(rows[TASK].p50_ms, rows[BARE].p50_ms)}; "
        f"to a call that runs a task: {ratio(rows[TASK].p50_ms, rows[RUN].p50_ms)}.",
        f"Ratio of a task from the driver to a forwarded call (p50): "
        f"{ratio(rows[DRIVER_TASK].p50_ms, rows[DRIVER_RELAY].p50_ms)}.",
        f"Ratio of empty calls per second to tasks of a batch: {ratio(rows[FLOOD].a_second, rows[DONE].a_second)}; "
        f"of calls that run a task: {ratio(rows[RUN_FLOOD].a_second, rows[DONE].a_second)}.",
    ]
    return "\n".join(lines)


def measure(
    workers: int,
    calls: int,
    images: int,
    rounds: int,
    run_ms: int,
    send_ahead_seconds: float,
    is_profiled: bool = False,
) -> dict[str, Figures]:
    """Open a pool, measure it `rounds` times, and close it."""
    from modelpool.actors.ray.ray_session import open_session

    config = PoolConfig().override(workers=workers, name="price")
    scheduler = replace(config.scheduler, send_ahead_seconds=send_ahead_seconds)
    config = config.model_copy(update={"scheduler": scheduler})
    session = open_session(None, config.cluster.namespace, workers)
    try:
        from benchmarks.priced_controller import start_priced_controller
        from modelpool.actors.ray.ray_connection import RayConnection

        plan = idle_plan(config, 0, False, run_ms)
        controller = start_priced_controller(plan, config.cluster.namespace, config.cluster.name)

        with ModelPool(RayConnection(controller), lambda: None, None) as pool:
            pool.wait_ready(300)
            measured = Measured(pool, controller, calls, images, workers, run_ms)
            measured.round()  # every process imports its modules
            measured.rows = {name: Figures() for name in ROWS}
            for _ in range(rounds):
                gc.collect()
                measured.round()
            if is_profiled:
                print(measured.profile())
        return measured.rows
    finally:
        session.close()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calls", type=int, default=300, help="sequential calls of each kind per round")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run-ms", type=int, default=0, help="length of a run of a batch and of the calls before it")
    parser.add_argument("--send-ahead", type=float, default=SchedulerConfig().send_ahead_seconds)
    parser.add_argument("--profile", action="store_true", help="profile the controller during a batch")
    wanted = parser.parse_args()
    rows = measure(
        wanted.workers,
        wanted.calls,
        wanted.images,
        wanted.rounds,
        wanted.run_ms,
        wanted.send_ahead,
        wanted.profile,
    )
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{wanted.workers} workers, {wanted.rounds} rounds, {os.cpu_count()} cores, load {load}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
