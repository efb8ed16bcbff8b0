"""Compares what a model that does not fit on one card does on machines with and without links between cards.

33 billion weights of one byte each, on machines of four cards with 24 GB, in virtual time. The link from the host is
PCIe 4; the link among cards is none, a slow bridge, a bridge or a switch. With a link, members of a run hold weights
for each other (`pool.weights.plan.peer_shares`). "one GPU" shares no run; "2" always shares it among two. Times of
computing on several GPUs are the published ones (`scheduler.model.gang_times`). Medians of the seeds.

Run from the repository: `python -m benchmarks.large_models [--seeds 3]`. Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import mean, median

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, Stage, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.gpu_kinds import PCIE4
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.models import InventedModel

GB = 10**9
CARDS, CARD_BYTES, HOST_BYTES, DISK = 4, 24 * GB, 256 * GIB, 6e9
STEPS, JOBS = 30, 60
#: bytes per second among the cards, each way: a bridge of GeForce cards, a bridge of the A30, a switch
LINKS: Mapping[str, float] = {"none": 0.0, "56 GB/s": 56e9, "100 GB/s": 100e9, "300 GB/s": 300e9}
DEGREES: Mapping[str, tuple[int, ...]] = {"modelpool": (1, 2, 4), "one GPU": (1,), "2": (2,)}
MODEL = InventedModel(
    "large",
    text_encoder_bytes=8 * GB,
    diffusion_bytes=33 * GB,
    vae_bytes=GB // 4,
    activation_bytes=3 * GB,
    step_seconds=0.25,
    decode_seconds=1.0,
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One simulation: seconds of a job, GPUs of a sampling run, bytes per step from the host, and jobs per minute."""

    job_seconds: float
    gpus: float
    host_bytes: float
    jobs_per_minute: float


def simulate(link: float, degrees: tuple[int, ...], load: float | None, seed: int, jobs: int = JOBS) -> Figures:
    """Simulate jobs that keep the cards busy for `load` of the time if each ran on one card; None: all at once."""
    model, node, generator = replace(MODEL, degrees=degrees), NodeId("box"), Random(seed)
    room = CARD_BYTES - model.activation_bytes - model.scratch_bytes
    alone_seconds = STEPS * (model.step_seconds + (model.diffusion_bytes - room) / PCIE4) + model.decode_seconds
    gpus = [
        SimulatedGpu(WorkerId(f"gpu-{n}"), CARD_BYTES, PCIE4, node=node, gang_link_bytes_per_second=link)
        for n in range(CARDS)
    ]
    pool = VirtualCluster(SchedulerState(), gpus, [SimulatedNode(node, HOST_BYTES, DISK)])
    pool.start(model.components)
    at = 0.0
    for number in range(jobs):
        at += 0.0 if load is None else generator.expovariate(load * CARDS / alone_seconds)
        pool.post(Submitted(at, model.job(f"job-{number}", f"prompt {number}", number, steps=STEPS)))
    pool.run()
    runs = [run for run in pool.runs if run.stage is Stage.SAMPLE]
    members = Counter((run.task_id, run.started_at) for run in runs)
    end = max(run.ended_at for run in pool.runs)
    return Figures(
        median(pool.latency_seconds.values()),
        mean(members.values()),
        sum(run.streamed_bytes for run in runs) / (len(runs) * STEPS),
        60.0 * jobs / end,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_args().seeds + 1)
    print("| load | link among cards | policy | p50 s | GPUs of a run | GB from the host in a step | jobs/min |")
    print("|---|---|---|---|---|---|---|")
    for load in (0.2, 0.6, None):
        for name, link in LINKS.items():
            for policy, degrees in DEGREES.items():
                found = [simulate(link, degrees, load, seed) for seed in seeds]
                seconds, gpus, host, rate = (median(getattr(each, key) for each in found) for key in Figures.__slots__)
                shown = "batch" if load is None else f"{load}"
                print(f"| {shown} | {name} | {policy} | {seconds:.1f} | {gpus:.1f} | {host / GB:.1f} | {rate:.1f} |")


if __name__ == "__main__":
    main()
