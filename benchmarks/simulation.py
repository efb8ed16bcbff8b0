"""How fast the scheduler core is, simulated workers included, and that one seed gives one log.

5,000 jobs over 12 models with 4 LoRAs on 8 workers, all at once and as a steady stream. Imports neither torch nor Ray.
Run from the repository: `python -m benchmarks.simulation [JOBS] [REPEATS]`.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from random import Random

from pool.errors import GIB
from pool.spec import WorkerId
from scheduler.config import SchedulerConfig
from scheduler.simulated.cluster import VirtualCluster
from scheduler.simulated.machines import SimulatedGpu
from scheduler.state import SchedulerState
from scheduler.workloads.arrivals import all_at_once, poisson
from scheduler.workloads.mix import Mix
from scheduler.workloads.models import InventedModel

WORKERS = 8
MIX = Mix(
    [InventedModel(f"model-{n}") for n in range(12)], ["", "lora-1", "lora-2", "lora-3"], steps=(20, 30)
)  # fmt: skip
#: a little below what the workers can do
JOBS_PER_SECOND = 2.4
SEED = 1


def simulate(jobs: int, per_second: float | None) -> tuple[VirtualCluster[SchedulerState], float, float]:
    """One simulation from nothing, and the wall and processor seconds that it took: jobs, core and workers."""
    began, began_cpu = time.perf_counter(), time.process_time()
    rng = Random(SEED)
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 24 * GIB, 10.0 * GIB) for n in range(WORKERS)]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig()), gpus)
    cluster.start(MIX.components)
    arrivals = all_at_once(jobs) if per_second is None else poisson(jobs, per_second, rng)
    for submission in MIX.submissions(arrivals, rng):
        cluster.post(submission)
    cluster.run()
    return cluster, time.perf_counter() - began, time.process_time() - began_cpu


def row(name: str, jobs: int, per_second: float | None, repeats: int) -> str:
    """A row of the table: the median of several runs, all of which must give the same commands."""
    runs = [simulate(jobs, per_second) for _ in range(repeats)]
    first = runs[0][0]
    assert all(cluster.commands == first.commands for cluster, _, _ in runs), "one seed gave two logs"
    assert len(first.outcomes) == jobs, "a job was not resolved"
    seconds = statistics.median(wall for _, wall, _ in runs)
    cpu_seconds = statistics.median(cpu for _, _, cpu in runs)
    latencies = sorted(first.latency_seconds.values())
    totals = first.totals
    cells = [
        *(name, jobs, totals.runs, WORKERS, totals.events, f"{seconds:.2f}", f"{cpu_seconds:.2f}"),
        *(f"{totals.events / cpu_seconds:.0f}", f"{first.now:.0f}", f"{latencies[jobs // 2]:.1f}"),
        *(f"{latencies[jobs * 99 // 100]:.1f}", f"{totals.runs_resident / totals.runs:.0%}", f"{_peak_mib():.0f}"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main(jobs: int = 5000, repeats: int = 5) -> None:
    """Measure and print the table for RESULTS.md."""
    print(
        "| arrivals | jobs | tasks | workers | events | wall seconds (median) | CPU seconds (median) "
        "| events per CPU second | virtual s | p50 latency, virtual s | p99 | weights resident | peak memory, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    print(row("all at once", jobs, None, repeats))
    print(row(f"Poisson, {JOBS_PER_SECOND}/s", jobs, JOBS_PER_SECOND, repeats))
    loaded = sorted(name for name in ("torch", "ray") if name in sys.modules)
    assert not loaded, f"{loaded} were imported"


def _peak_mib() -> float:
    """Most memory that this process ever had, in MiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
