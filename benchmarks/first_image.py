"""Measures how soon a large batch of different prompts has its first images, in virtual time, and what that costs.

    python -m benchmarks.first_image [--jobs 2000] [--gpus 1,8]

Prints a Markdown table: the times of the first and the tenth image and of the batch, seconds of loading, bytes moved,
and the most prompts that were encoded ahead of sampling. Imports neither torch nor Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import Stage
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.gpu_spec import NodeShape, parse_gpus, simulated_gpus
from modelpool.scheduler.simulator.metrics import figures
from modelpool.scheduler.simulator.workloads.generators import offline_batch
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import FLUX, SD15, SDXL

#: name, models, LoRAs and kind of GPU
CASES = (
    ("sdxl", [SDXL], [""], "4090"),
    ("flux, streamed", [FLUX], [""], "4090"),
    ("flux", [FLUX], [""], "A100"),
    ("3 x sd15, 2 LoRAs", [replace(SD15, name=f"sd15-{number}") for number in range(3)], ["", "a", "b"], "4090"),
    ("12 x sdxl, 3 LoRAs", [replace(SDXL, name=f"sdxl-{number}") for number in range(12)], ["", "a", "b", "c"], "4090"),
)


def simulate(models: Sequence[InventedModel], loras: Sequence[str], jobs: int, specification: str) -> str:
    """Return the cells of one row."""
    groups = parse_gpus(specification)
    gpus, nodes = simulated_gpus(groups, NodeShape(groups[0].count, 64 * GIB, 3e9), reserve_bytes=GIB)
    workload = offline_batch(models, loras, jobs, Random(1), 1)
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), gpus, nodes)
    cluster.start(workload.components)
    for job in workload.jobs:
        cluster.post(job)
    cluster.run()
    ends = sorted(cluster.latency_seconds.values())
    seen = figures(cluster)
    ahead = most = 0
    for run in cluster.runs:
        ahead += {Stage.ENCODE: 1, Stage.SAMPLE: -1}.get(run.stage, 0)
        most = max(most, ahead)
    moved_gib = (seen.uploaded_bytes + seen.streamed_bytes) / GIB
    return f"{ends[0]:.0f} | {ends[9]:.0f} | {ends[-1]:.0f} | {seen.loading_seconds:.0f} | {moved_gib:.0f} | {most}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--gpus", default="1,8", help="numbers of GPUs")
    options = parser.parse_args()
    print("| models | GPUs | first image s | tenth s | batch s | loading GPU-s | GiB moved | encoded ahead |")
    print("|---|---|---|---|---|---|---|---|")
    for name, models, loras, kind in CASES:
        for count in options.gpus.split(","):
            specification = f"{count}x{kind}"
            print(f"| {name} | {specification} | {simulate(models, loras, options.jobs, specification)} |", flush=True)


if __name__ == "__main__":
    main()
