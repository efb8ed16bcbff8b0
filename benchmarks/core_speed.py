"""How fast the scheduler's core alone is: events that a simulation recorded are fed to a fresh core, and only that is
timed. Cost per event against size: workers, components, waiting tasks. Imports neither torch nor Ray.

Run from the repository: `python -m benchmarks.core_speed [--plot FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from pool.errors import GIB
from pool.spec import WorkerId
from scheduler.config import SchedulerConfig
from scheduler.messages import Command, Event
from scheduler.simulated.cluster import VirtualCluster
from scheduler.simulated.machines import SimulatedGpu
from scheduler.state import SchedulerState
from scheduler.workloads.arrivals import all_at_once, poisson
from scheduler.workloads.mix import Mix
from scheduler.workloads.models import InventedModel

SEED = 1
LORAS = ("", "lora-1", "lora-2", "lora-3")


@dataclass(frozen=True)
class Size:
    """One row. `per_second` None is all at once; of `events`, those after the last submission are timed apart."""

    name: str
    workers: int
    models: int
    jobs: int
    per_second: float | None
    events: int


SIZES = (
    Size("8 workers, 12 models, all at once", 8, 12, 3_000, None, 12_000),
    Size("8 workers, 12 models, steady", 8, 12, 3_000, 2.4, 12_000),
    Size("8 workers, 3 models, steady", 8, 3, 3_000, 2.4, 12_000),
    Size("64 workers, 100 models", 64, 100, 6_000, None, 20_000),
    Size("256 workers, 300 models", 256, 300, 12_000, None, 30_000),
    Size("1,000 workers, 667 models", 1_000, 667, 34_000, None, 60_000),
)


class Recorder:
    """A core that keeps what it is told. Stops the simulation after so many events."""

    def __init__(self, most: int) -> None:
        self.state = SchedulerState(SchedulerConfig())
        self.events: list[Event] = []
        self._most = most

    def handle(self, event: Event) -> list[Command]:
        """As the core does. Raises StopIteration at the end."""
        self.events.append(event)
        if len(self.events) >= self._most:
            raise StopIteration
        return self.state.handle(event)


def record(size: Size) -> list[Event]:
    """The events of a simulation of this size, up to its limit."""
    rng = Random(SEED)
    mix = Mix([InventedModel(f"model-{n}") for n in range(size.models)], LORAS, steps=(20, 30))
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 24 * GIB, 10.0 * GIB) for n in range(size.workers)]
    recorder = Recorder(size.events)
    cluster = VirtualCluster(recorder, gpus)
    cluster.start(mix.components)
    arrivals = all_at_once(size.jobs) if size.per_second is None else poisson(size.jobs, size.per_second, rng)
    for submission in mix.submissions(arrivals, rng):
        cluster.post(submission)
    with contextlib.suppress(StopIteration):
        cluster.run()
    return recorder.events


def replay(events: Sequence[Event]) -> tuple[float, float, int]:
    """CPU seconds of the events up to the last submission, of those after it, and how many these are."""
    last = max(i for i, event in enumerate(events) if type(event).__name__ == "Submitted")
    state = SchedulerState(SchedulerConfig())
    gc.collect()
    gc.freeze()
    begun = time.process_time()
    for event in islice(events, last + 1):
        state.handle(event)
    between = time.process_time()
    for event in islice(events, last + 1, None):
        state.handle(event)
    ended = time.process_time()
    gc.unfreeze()
    return between - begun, ended - between, len(events) - last - 1


def main() -> None:
    """Measure and print the table for RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot")
    parser.add_argument("--quick", action="store_true", help="the sizes up to 64 workers, once")
    options = parser.parse_args()
    sizes = SIZES[:4] if options.quick else SIZES
    print("| size | tasks waiting at most | events | events/s, all | events/s, after the last submission | peak MiB |")
    print("|---|---|---|---|---|---|")
    points = []
    for size in sizes:
        events = record(size)
        runs = [replay(events) for _ in range(1 if options.quick else 3)]
        all_seconds = statistics.median(before + after for before, after, _ in runs)
        after_seconds = statistics.median(after for _, after, _ in runs)
        after_count = runs[0][2]
        waiting = 3 * size.jobs if size.per_second is None else 0
        after = f"{after_count / after_seconds:,.0f}" if after_count > 1000 else "-"
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {size.name} | {waiting:,} | {len(events):,} | {len(events) / all_seconds:,.0f} | {after} "
            f"| {peak_mib:.0f} |",
            flush=True,
        )
        points.append((size, 1e6 * all_seconds / len(events)))
    if options.plot:
        plot(points, options.plot)


def plot(points: Sequence[tuple[Size, float]], path: str) -> None:
    """Microseconds an event against workers, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    batch = [(size, cost) for size, cost in points if size.per_second is None]
    axes.plot([size.workers for size, _ in batch], [cost for _, cost in batch], marker="o")
    for size, cost in batch:
        axes.annotate(
            f"{3 * size.jobs:,} tasks", (size.workers, cost), textcoords="offset points", xytext=(0, 9), ha="center"
        )
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.2 * max(cost for _, cost in batch))
    axes.set_xticks([size.workers for size, _ in batch], [f"{size.workers:,}" for size, _ in batch])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel("microseconds of CPU an event")
    axes.set_title("Cost per event of the scheduler's core against its size")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
