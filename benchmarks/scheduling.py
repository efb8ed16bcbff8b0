"""Compares scheduling policies on simulated workers: the pool's policy, policies of other systems, and bounds.

The arrival rate keeps the GPUs busy for the stated fraction of the time with runs alone, everything resident. A policy
with too many loads cannot keep up, which shows in throughput, and much earlier in latency. Loads use the link of the
GPU; files are read from a machine's memory or its disks. Five seeds: median, minimum and maximum.

Run from the repository: `python -m benchmarks.scheduling [--rows PART;...] [--seeds 5] [--policies NAME,...]
[--first-jobs N] [--batch N:GAIN]`. With --batch, up to N tasks that are alike share a run, in which they make GAIN
times the images of single ones, and the pool's policy with batches is compared with itself without them, or with the
--policies, none of which has batches. With --first-jobs, only the first N jobs of each workload arrive: a large row in
less time. Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from random import Random

from modelpool.benchmarks.lab.bounds import (
    least_adapter_loads,
    least_load_seconds,
    least_makespan_seconds,
    task_adapters,
)
from modelpool.benchmarks.lab.katz import katz_workload
from modelpool.benchmarks.lab.katz_habits import SERVICES
from modelpool.benchmarks.lab.policies import POLICIES
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobSpec, Role
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.gpu_spec import NodeShape, parse_gpus, simulated_gpus
from modelpool.scheduler.simulator.metrics import figures
from modelpool.scheduler.simulator.policy import OUR_POLICY
from modelpool.scheduler.simulator.workloads.generators import bursting, heterogeneous, offline_batch, shifting, zipf
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import SDXL
from modelpool.scheduler.simulator.workloads.workload import Workload

#: seconds of one SDXL image on the reference GPU of the speed factors
SDXL_SECONDS = SDXL.encode_seconds + 20 * SDXL.step_seconds + SDXL.decode_seconds
#: one host with consumer GPUs: 64 GiB and one NVMe disk
HOST = NodeShape(gpus=4, host_bytes=64 * GIB, storage_bytes_per_second=3e9)
#: a serving instance of the calibrated workload: one GPU, and a machine that keeps about ten LoRAs of 0.3 GB and the
#: base model's files, from which patched weights are restored; other files are read over the network
INSTANCE = NodeShape(gpus=1, host_bytes=8 * GIB, storage_bytes_per_second=1e9)


@dataclass(frozen=True)
class Row:
    """One workload on some GPUs."""

    name: str
    gpus: str
    shape: NodeShape
    make: Callable[[Random, float], Workload]
    #: the complete queue is known from the beginning
    is_batch: bool = False
    #: LoRAs are read from storage all the time: print the lower bound of their loads
    counts_loras: bool = False


def models(count: int) -> list[InventedModel]:
    """Return `count` models of equal size."""
    return [replace(SDXL, name=f"sdxl-{number}") for number in range(count)]


def by_load(load: float, workload: Callable[[Random, float], Workload]) -> Callable[[Random, float], Workload]:
    """Return a workload whose arrival rate keeps all GPUs busy for the fraction `load` of the time."""
    return lambda rng, speed: workload(rng, load * speed / SDXL_SECONDS)


def calibrated(gpus: int, jobs: int, load: float) -> Callable[[Random, float], Workload]:
    """Return the workload of service A of the production trace."""
    return lambda rng, speed: katz_workload(SERVICES[:1], gpus, jobs, rng, load)


LORAS = ["", "lora-1", "lora-2", "lora-3"]
TWELVE = Mix(models(12), steps=(20,))
WITH_LORAS = Mix(models(12), LORAS, steps=(20,))
ROWS = (
    Row("zipf, 12 models, 2 GPUs", "2x4090", HOST, by_load(0.8, lambda rng, rate: zipf(TWELVE, 600, rng, rate))),
    Row("zipf, 12 models, 3 GPUs", "3x4090", HOST, by_load(0.8, lambda rng, rate: zipf(TWELVE, 900, rng, rate))),
    Row(
        "zipf, 12 models, 4 LoRAs, 4 GPUs",
        "4x4090",
        HOST,
        by_load(0.8, lambda rng, rate: zipf(WITH_LORAS, 1200, rng, rate)),
    ),
    Row(
        "zipf, 12 models, 4 LoRAs, overloaded, 4 GPUs",
        "4x4090",
        HOST,
        by_load(1.3, lambda rng, rate: zipf(WITH_LORAS, 1200, rng, rate)),
    ),
    Row(
        "shifting popularity, 4 GPUs",
        "4x4090",
        HOST,
        by_load(0.8, lambda rng, rate: shifting(TWELVE, 1200, rng, rate, 300.0)),
    ),
    Row("bursts, 4 GPUs", "4x4090", HOST, by_load(0.5, lambda rng, rate: bursting(TWELVE, 800, rng, rate, 40, 120.0))),
    Row(
        "heterogeneous GPUs and models",
        "2xH100,2xA100,4x4090",
        NodeShape(4, 256 * GIB, 3e9),
        lambda rng, speed: heterogeneous(600, rng, 0.065 * speed),
    ),
    Row("offline batch, 4 GPUs", "4x4090", HOST, lambda rng, speed: offline_batch(models(12), LORAS, 1200, rng), True),
    Row("calibrated, 8 GPUs", "8xH100", INSTANCE, calibrated(8, 3000, 0.8), counts_loras=True),
    Row("calibrated, 64 GPUs", "64xH100", INSTANCE, calibrated(64, 12_000, 0.8), counts_loras=True),
    Row("calibrated, overloaded, 64 GPUs", "64xH100", INSTANCE, calibrated(64, 12_000, 1.2), counts_loras=True),
    Row("calibrated, 512 GPUs", "512xH100", INSTANCE, calibrated(512, 30_000, 0.8), counts_loras=True),
)
#: the pool's policy with batches
BATCHES = "modelpool, batches"
COLUMNS = ("jobs/min", "p50 s", "p99 s", "loading GPU-s", "LoRA loads/job", "resident", "GiB moved", "CPU s")


@dataclass(frozen=True)
class Batch:
    """Runs of up to `size` tasks, which make `gain` times the images of single ones."""

    size: int
    gain: float

    @classmethod
    def of(cls, text: str) -> Batch:
        """Parse N:GAIN."""
        size, _, gain = text.partition(":")
        return cls(int(size), float(gain))

    @property
    def marginal(self) -> float:
        """The time of each further task of a batch, as a fraction of one."""
        return (self.size / self.gain - 1.0) / (self.size - 1)


@dataclass(frozen=True)
class Variant:
    """What differs from the rows as they are: shared runs under the policy `BATCHES`, and how many jobs arrive (None:
    all)."""

    batch: Batch | None = None
    first_jobs: int | None = None


def simulate(row: Row, policy: str, seed: int, variant: Variant) -> tuple[float, ...]:
    """Run one simulation; return its columns."""
    batch = variant.batch
    groups = parse_gpus(row.gpus)
    gpus, nodes = simulated_gpus(groups, row.shape, reserve_bytes=GIB)
    workload = row.make(Random(seed), sum(gpu.speed for gpu in gpus))
    workload = replace(workload, jobs=workload.jobs[: variant.first_jobs])
    if batch is not None:
        gpus = [replace(gpu, marginal=batch.marginal) for gpu in gpus]
        workload = replace(workload, jobs=tuple(replace(each, job=_alike(each.job)) for each in workload.jobs))
    core, memory = POLICIES[OUR_POLICY.name if policy == BATCHES else policy].make(
        gpus, workload.components, Random(seed)
    )
    if batch is not None and policy == BATCHES:
        core = SchedulerState(SchedulerConfig(batch_limit=batch.size))
    cluster = VirtualCluster(core, gpus, nodes, memory)
    cluster.start(workload.components)
    for job in workload.jobs:
        cluster.post(job)
    begun = time.process_time()
    cluster.run()
    seconds = time.process_time() - begun
    seen = figures(cluster)
    assert seen.succeeded == seen.jobs, f"{policy} on {row.name}: {seen.succeeded} of {seen.jobs} jobs succeeded"
    moved = (seen.uploaded_bytes + seen.streamed_bytes) / GIB
    return (
        seen.jobs_per_minute, seen.latency.p50_seconds, seen.latency.p99_seconds, seen.loading_seconds,
        seen.lora_loads_per_job, seen.resident_share, moved, seconds,
    )  # fmt: skip


def _alike(job: JobSpec) -> JobSpec:
    """Return a job with tasks that may share runs with others of the same weights, stage and length."""
    tasks = (replace(task, together=f"{task.stage.value} {task.run_seconds:g}") for task in job.tasks)
    return replace(job, tasks=tuple(tasks))


def _one(job: tuple[str, str, int, Variant]) -> tuple[float, ...]:
    name, policy, seed, variant = job
    return simulate(next(row for row in ROWS if row.name == name), policy, seed, variant)


def bounds(row: Row, seed: int) -> tuple[float, float]:
    """Return lower bounds for a batch: GPU-seconds of loading, and the makespan."""
    gpus, _ = simulated_gpus(parse_gpus(row.gpus), row.shape, reserve_bytes=GIB)
    workload = row.make(Random(seed), sum(gpu.speed for gpu in gpus))
    jobs = [submitted.job for submitted in workload.jobs]
    loads = least_load_seconds(jobs, gpus, {spec.key: spec for spec in workload.components})
    return loads, least_makespan_seconds(jobs, gpus, loads)


def lora_bound(row: Row, seed: int) -> tuple[float, int]:
    """Return the minimum of LoRA loads per job, for jobs in order of arrival and LoRAs of average size, and the number
    of LoRAs that each GPU keeps: in its share of host memory next to the base model's file, and in patched weights."""
    gpus, nodes = simulated_gpus(parse_gpus(row.gpus), row.shape, reserve_bytes=GIB)
    workload = row.make(Random(seed), sum(gpu.speed for gpu in gpus))
    jobs = [submitted.job for submitted in workload.jobs]
    sizes = [spec.upload_bytes for spec in workload.components if spec.role is Role.LORA]
    base_bytes = min(spec.upload_bytes for spec in workload.components if spec.role is Role.DIFFUSION_MODEL)
    room_bytes = sum(node.host_bytes - base_bytes for node in nodes) / len(gpus)
    patched = max(len(task_adapters(task)) for job in jobs for task in job.tasks)
    slots = int(room_bytes / statistics.mean(sizes)) + patched
    return least_adapter_loads(jobs, slots * len(gpus)) / len(jobs), slots


def table(row: Row, policies: Sequence[str], seeds: int, pool: ProcessPoolExecutor, variant: Variant) -> None:
    """Print the table of one row."""
    wanted = [(row.name, policy, seed, variant) for policy in policies for seed in range(1, seeds + 1)]
    results = dict(zip(wanted, pool.map(_one, wanted), strict=True))
    print(f"\n{row.name} ({row.gpus})\n\n| policy | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for policy in policies:
        of_seeds = list(zip(*(results[row.name, policy, seed, variant] for seed in range(1, seeds + 1)), strict=True))
        cells = [_cell(column) for column in of_seeds]
        print(f"| {policy} | {' | '.join(cells)} |", flush=True)
    if variant.first_jobs is not None:
        return
    if row.is_batch:
        found = [bounds(row, seed) for seed in range(1, seeds + 1)]
        loads, makespan = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"\nLower bounds for any policy: {loads:.0f} GPU-s of loading, and a makespan of {makespan:.0f} s.")
    if row.counts_loras:
        fewest, slots = zip(*(lora_bound(row, seed) for seed in range(1, seeds + 1)), strict=True)
        print(
            f"\nLower bound in order of arrival: {statistics.median(fewest):.2f} LoRA loads per job. This is one "
            f"optimal cache for all GPUs that knows all jobs, with room for {max(slots)} LoRAs of average size per GPU."
        )


def _cell(values: Sequence[float]) -> str:
    def short(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    middle = short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({short(min(values))} to {short(max(values))})"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="", help="parts of row names, separated by semicolons")
    parser.add_argument("--policies", help="separated by commas; with --batch, those without batches")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first-jobs", type=int, metavar="N", help="jobs of each workload that arrive")
    parser.add_argument("--batch", type=Batch.of, metavar="N:GAIN")
    options = parser.parse_args()
    rows = [row for row in ROWS if any(part in row.name for part in options.rows.split(";"))]
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in rows:
            usual = list(POLICIES) if options.batch is None else [OUR_POLICY.name]
            names = usual if options.policies is None else [name for name in options.policies.split(",") if name]
            names = [name for name in names if name != "clairvoyant" or row.is_batch]
            if options.batch is not None:
                names.append(BATCHES)
            table(row, names, options.seeds, pool, Variant(options.batch, options.first_jobs))


if __name__ == "__main__":
    main()
