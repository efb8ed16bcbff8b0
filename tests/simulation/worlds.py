"""Simulated pools for the tests: workloads with everything that can go wrong, by one seed."""

from __future__ import annotations

from random import Random

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import CancelRequested
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once, bursts, poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel


def gpus(count: int, *capacities_gib: int) -> list[SimulatedGpu]:
    """Workers gpu-0, gpu-1, ... with these capacities in turn."""
    sizes = capacities_gib or (24,)
    return [SimulatedGpu(WorkerId(f"gpu-{n}"), sizes[n % len(sizes)] * GIB, 10.0 * GIB) for n in range(count)]


def mix(models: int = 6, loras: int = 3) -> Mix:
    """Models of three sizes, some LoRAs, some prompts with several seeds."""
    invented = [InventedModel(f"model-{n}", diffusion_bytes=(2 + 2 * (n % 3)) * GIB) for n in range(models)]
    names = ["", *(f"lora-{n}" for n in range(1, loras))]
    return Mix(invented, names, seeds_per_prompt=2, steps=(10, 20))


def troubled(
    seed: int, jobs: int, workers: list[SimulatedGpu], config: SchedulerConfig | None = None, arrivals: str = "poisson"
) -> VirtualCluster[SchedulerState]:
    """A pool in which workers are lost, starts fail, runs fail and vary in length, and drivers cancel."""
    rng = Random(seed)
    kinds = [RunErrorKind.OUT_OF_VRAM, RunErrorKind.INPUT_LOST, RunErrorKind.INTERNAL]
    disturbances = Disturbances(
        start_fails=lambda command: rng.random() < 0.1,
        run_factor=lambda command: rng.uniform(0.7, 1.5),
        run_error=lambda command: rng.choice(kinds) if rng.random() < 0.02 else None,
    )
    state = SchedulerState(config or SchedulerConfig(story_length=None))
    cluster = VirtualCluster(state, workers, disturbances=disturbances)
    what = mix()
    cluster.start(what.components)
    times = {
        "poisson": lambda: poisson(jobs, len(workers) / 3.0, rng),
        "bursts": lambda: bursts(jobs, 20, 30.0),
        "at once": lambda: all_at_once(jobs),
    }[arrivals]()
    last = 0.0
    for submission in what.submissions(times, rng):
        cluster.post(submission)
        last = submission.at
        if rng.random() < 0.05:
            cluster.post(CancelRequested(submission.at + rng.uniform(0.0, 30.0), submission.job.job_id))
    for worker in workers:
        cluster.lose(worker.worker_id, rng.uniform(0.0, last + 60.0))
    return cluster
