"""Compares policies for runs that several GPUs share: this pool's, and those of other systems.

The others are in `benchmarks.lab.gang_peers`. A studio of images and videos (`benchmarks.lab.studio`) in virtual time,
on machines of 8 H100: without deadlines, with deadlines ("due"), and all at once ("batch"). Times on several GPUs are
the published ones (`scheduler.model.gang_times`), and every policy pays the same for loads and for forming a gang. "one
GPU" is this pool as it was: no run is shared. Medians of the seeds.

Run from the repository: `python -m benchmarks.gang_scheduling [--gpus 8,64] [--rows "0.2,1.0,due 0.6"] [--seeds 3]`.
Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import median

from modelpool.benchmarks.lab.gang_peers import FixedDegree, RoundRobin, Rounds, SlackFirst, TailAware
from modelpool.benchmarks.lab.studio import is_video, studio
from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory, WholeComponents, WorkerMemory
from modelpool.scheduler.simulator.gpu_spec import NodeShape, parse_gpus, simulated_gpus
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.workload import Workload

#: machines of 8 GPUs, with room for all files
SHAPE = NodeShape(gpus=8, host_bytes=1024 * GIB, storage_bytes_per_second=6e9)
#: jobs for each GPU of a row
JOBS_PER_GPU = 60
Maker = Callable[[Sequence[SimulatedGpu]], tuple[Core, WorkerMemory]]


def _pool(gpus: Sequence[SimulatedGpu]) -> tuple[Core, WorkerMemory]:
    return SchedulerState(), PlannedMemory()


def _peer(make: Callable[..., Core], *arguments: int) -> Maker:
    return lambda gpus: (make(gpus, *arguments), WholeComponents())


#: name -> most GPUs of a run, and the core
POLICIES: Mapping[str, tuple[int, Maker]] = {
    "modelpool": (8, _pool),
    "one GPU": (1, _pool),
    "fixed 1": (8, _peer(FixedDegree, 1)),
    "fixed 2": (8, _peer(FixedDegree, 2)),
    "fixed 4": (8, _peer(FixedDegree, 4)),
    "fixed 8": (8, _peer(FixedDegree, 8)),
    "tail-aware 1": (8, _peer(TailAware, 1)),
    "tail-aware 4": (8, _peer(TailAware, 4)),
    "round robin 1": (8, _peer(RoundRobin, 1)),
    "round robin 4": (8, _peer(RoundRobin, 4)),
    "rounds": (8, _peer(Rounds)),
    "slack first": (8, _peer(SlackFirst)),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One simulation: seconds, part of the deadlines that were met, jobs per minute, and its length."""

    video_seconds: float
    image_seconds: float
    met: float
    jobs_per_minute: float
    makespan_seconds: float


def simulate(policy: str, gpus: int, row: str, seed: int) -> Figures:
    """Simulate a policy on one draw of the workload of a row: a load, "due" and a load, or "batch"."""
    degrees, make = POLICIES[policy]
    load = None if row == "batch" else float(row.removeprefix("due "))
    is_due = row.startswith("due ")
    workload: Workload = studio(Random(seed), JOBS_PER_GPU * gpus, gpus, load, degrees, is_due)
    found, nodes = simulated_gpus(parse_gpus(f"{gpus}xH100"), SHAPE)
    machines = list(found)
    core, memory = make(machines)
    cluster = VirtualCluster(core, machines, nodes, memory)
    cluster.start(workload.components)
    for submitted in workload.jobs:
        cluster.post(submitted)
    cluster.run()
    seconds = cluster.latency_seconds
    due = [one for one in workload.jobs if one.job.deadline is not None]
    met = sum(one.at + seconds[one.job.job_id] <= (one.job.deadline or 0.0) for one in due)
    end = max(one.at + seconds[one.job.job_id] for one in workload.jobs)
    return Figures(
        median(took for job_id, took in seconds.items() if is_video(job_id)),
        median(took for job_id, took in seconds.items() if not is_video(job_id)),
        met / len(due) if due else 1.0,
        60.0 * len(workload.jobs) / end,
        end,
    )


def _row(arguments: tuple[str, int, str, int]) -> Figures:
    return simulate(*arguments)


def _print_rows(gpus: int, row: str, policies: Sequence[str], seeds: int, pool: ProcessPoolExecutor) -> None:
    asked = [(policy, gpus, row, seed) for policy in policies for seed in range(1, seeds + 1)]
    found = list(pool.map(_row, asked))
    for place, policy in enumerate(policies):
        mine = found[place * seeds : (place + 1) * seeds]
        figures = [median(getattr(one, name) for one in mine) for name in Figures.__slots__]
        video, image, met, rate, makespan = figures
        shown = f"{met:.1%}" if row.startswith("due ") else ""
        print(
            f"| {gpus} | {row} | {policy} | {video:.1f} | {image:.2f} | {shown} | {rate:.1f} | {makespan:.0f} |",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", default="8,64")
    parser.add_argument("--rows", default="0.2,0.6,1.0,batch,due 0.2,due 0.6,due 0.8,due 1.0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES))
    chosen = parser.parse_args()
    print("| GPUs | row | policy | p50 s of videos | p50 s of images | deadlines met | jobs/min | all done after s |")
    print("|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(2) as pool:
        for gpus in map(int, chosen.gpus.split(",")):
            for row in chosen.rows.split(","):
                _print_rows(gpus, row, chosen.policies.split(","), chosen.seeds, pool)


if __name__ == "__main__":
    main()
