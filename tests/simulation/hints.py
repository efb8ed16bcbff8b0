"""A pool in which memory is short, with and without the hint of the next needs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import Command, Event, RunTask
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import bursts
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel


class Silent(SchedulerState):
    """The core, with its hints kept from the workers. What it assumes is corrected by their reports."""

    def handle(self, event: Event) -> list[Command]:
        return [
            replace(command, needed_next=()) if isinstance(command, RunTask) else command
            for command in super().handle(event)
        ]


def tight(state: SchedulerState, workers: int = 1) -> tuple[VirtualCluster[SchedulerState], Mix]:
    """Workers with room for two or three of six models each."""
    models = [
        InventedModel(f"m{n}", text_encoder_bytes=[1, 2, 5][n % 3] * GIB, diffusion_bytes=[3, 5, 8][n % 3] * GIB)
        for n in range(6)
    ]
    mix = Mix(models, ["", "lora"], steps=(10, 20), seeds_per_prompt=2)
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 16 * GIB, 10.0 * GIB) for n in range(workers)]
    cluster = VirtualCluster(state, gpus)
    cluster.start(mix.components)
    return cluster, mix


def moved_gib(hints: bool, seeds: int = 6) -> float:
    """GiB on the bus of one such worker, over some workloads."""
    moved_bytes = 0
    for seed in range(seeds):
        cluster, mix = tight(SchedulerState() if hints else Silent())
        for submission in mix.submissions(bursts(90, 6, 20.0), Random(seed)):
            cluster.post(submission)
        cluster.run()
        moved_bytes += cluster.totals.uploaded_bytes + cluster.totals.streamed_bytes
    return moved_bytes / GIB
