"""The closed loops of `benchmarks.against_ray` in virtual time: loads, throughput and latency, and bounds of the loads.

    python -m benchmarks.closed_loop [--seeds 6] [--placement-only]

Requests for 12 models by Zipf's law; a worker has room for three. Each client sends its next request after a response.
The trace runs twice: a cold pass and a warm one. A load is as many bytes as a model has, copied at once or in parts.
The pool expects each run to take the mean of all. Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ray_trace import MODEL_BYTES, MODELS, ROOM_MODELS, STEP_SECONDS, STEPS, trace
from modelpool.benchmarks.lab.caches import reordered_lru_loads
from modelpool.benchmarks.lab.own_caches import LoopCase, own_cache_loads
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.simulator.closed_loop import LoopFigures, run_closed_loop
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.machines import SimulatedGpu

MIB = 1 << 20
#: activations and scratch of a run
WORKING_BYTES = 2 * MIB
#: the workers are up by then
BEGIN_AT = 2.0
WORKERS = (2, 3, 4)
#: a first seed that differs from that of `benchmarks.ray_trace` would be another trace
FIRST_SEED = 7


@dataclass(frozen=True, slots=True)
class Loop:
    """One closed loop."""

    requests: int
    clients: int
    load_seconds: float
    step_seconds: float


LOOPS = (Loop(600, 16, 0.05, 0.005), Loop(200, 64, 0.5, 0.05))


def run_loop(loop: Loop, workers: int, seed: int, config: SchedulerConfig) -> tuple[LoopFigures, LoopFigures]:
    """Run both passes of one loop; return the cold and the warm one."""
    requests, factor = trace(loop.requests, seed), loop.step_seconds / STEP_SECONDS
    mean_seconds = loop.step_seconds * sum(STEPS) / len(STEPS)
    specs = [
        ComponentSpec(ComponentKey(f"model-{number:02}/all@0"), Role.TEXT_ENCODER, MODEL_BYTES, MODEL_BYTES)
        for number in range(MODELS)
    ]
    seconds: dict[TaskId, float] = {}
    passes: list[list[JobSpec]] = []
    for number in range(2):
        jobs = []
        for request in requests:
            task_id = TaskId(f"{number}-{request.number}")
            seconds[task_id] = request.run_seconds * factor
            use = ComponentUse(ComponentKey(f"{request.model}/all@0"), MIB, passes=20)
            task = TaskSpec(task_id, Stage.ENCODE, (use,), WORKING_BYTES - MIB, mean_seconds)
            jobs.append(JobSpec(JobId(task_id), (task,), task_id))
        passes.append(jobs)
    link_bytes_per_second = MODEL_BYTES / loop.load_seconds
    capacity_bytes = ROOM_MODELS * MODEL_BYTES + WORKING_BYTES
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), capacity_bytes, link_bytes_per_second) for n in range(workers)]
    varied = Disturbances(run_factor=lambda command: seconds[command.task_id] / mean_seconds)
    cluster = VirtualCluster(SchedulerState(config), gpus, disturbances=varied)
    cluster.start(specs)
    cold = run_closed_loop(cluster, passes[0], loop.clients, BEGIN_AT)
    return cold, run_closed_loop(cluster, passes[1], loop.clients, cluster.now)


def bounds(loop: Loop, workers: int, seed: int) -> tuple[int, list[tuple[int, float]]]:
    """Return the loads by one cache for all workers that reorders requests within the clients, and for workers with
    their own models and no, a run's and ten runs' patience the loads and requests per second: both know the future."""
    requests, factor = trace(loop.requests, seed), loop.step_seconds / STEP_SECONDS
    models = [int(request.model.removeprefix("model-")) for request in requests]
    run_seconds = [request.run_seconds * factor for request in requests]
    case = LoopCase(models, run_seconds, workers, ROOM_MODELS, loop.clients, loop.load_seconds)
    mean_seconds = statistics.mean(run_seconds)
    found = [own_cache_loads(case, runs * mean_seconds) for runs in (0, 1, 10)]
    return reordered_lru_loads(models, ROOM_MODELS * workers, loop.clients), found


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--placement-only", action="store_true", help="without preloads (upload_ahead = false)")
    options = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    config = SchedulerConfig(upload_ahead=not options.placement_only)
    for loop in LOOPS:
        print(f"\n{loop.requests} requests, {loop.clients} clients, load {loop.load_seconds} s, step", end=" ")
        print(f"{loop.step_seconds} s; first trace, and mean of {len(seeds)} traces\n")
        print("| workers | pass | loads | of these preloaded | requests/s | p99 s |\n|---|---|---|---|---|---|")
        for workers in WORKERS:
            found = [run_loop(loop, workers, seed, config) for seed in seeds]
            for name, passes in zip(("cold", "warm"), zip(*found, strict=True), strict=True):
                cells = [
                    _cell([one.moved_bytes / MODEL_BYTES for one in passes], 1),
                    _cell([one.preloaded_bytes / MODEL_BYTES for one in passes], 1),
                    _cell([one.jobs_per_second for one in passes], 1),
                    _cell([one.p99_seconds for one in passes], 2),
                ]
                print(f"| {workers} | {name} | {' | '.join(cells)} |", flush=True)
        print("\nBounds of the loads, cold; workers with their own models also requests/s\n")
        print(f"| workers | one cache, window of {loop.clients} | own models | patience 1 run | patience 10 runs |")
        print("|---|---|---|---|---|")
        for workers in WORKERS:
            known = [bounds(loop, workers, seed) for seed in seeds]
            cells = [_cell([float(loads) for loads, _ in known], 1)]
            for number in range(3):
                loads, speed = zip(*(own[number] for _, own in known), strict=True)
                cells.append(f"{_cell(loads, 1)} at {_cell(speed, 0)}/s")
            print(f"| {workers} | {' | '.join(cells)} |", flush=True)


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{values[0]:.{digits}f}, {statistics.mean(values):.{digits}f}"


if __name__ == "__main__":
    main()
