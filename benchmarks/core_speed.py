"""Measures the speed of the scheduler's core alone: a new core handles recorded events of a simulation.

Reports the cost per event against size: workers, components, waiting tasks. Only the handling of the events is timed.
Imports neither torch nor Ray. Run from the repository:
`python -m benchmarks.core_speed [--plot FILE] [--quick] [--compiled]`. With `--compiled` the core is also built into a
temporary folder (`benchmarks.compiled_core`), and both cores are measured in turn, each time in a new process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.compiled_core import ROOT, build
from benchmarks.core_replay import Seconds, replay
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once, poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel

SEED = 1
LORAS = ("", "lora-1", "lora-2", "lora-3")


@dataclass(frozen=True)
class Size:
    """One row. `per_second` None submits all at once; events after the last submission are also timed separately."""

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
    """A core that records its events. Stops the simulation after `most` events."""

    def __init__(self, most: int) -> None:
        self.state = SchedulerState(SchedulerConfig())
        self.events: list[Event] = []
        self._most = most

    def handle(self, event: Event) -> list[Command]:
        """Handle an event as the core does. Raises StopIteration at the limit."""
        self.events.append(event)
        if len(self.events) >= self._most:
            raise StopIteration
        return self.state.handle(event)


def record(size: Size) -> list[Event]:
    """Return the events of a simulation of this size, up to its limit."""
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


def measured(events: Sequence[Event], times: int, compiled: Path | None) -> list[list[Seconds]]:
    """Replay `times` times with the Python core and, if `compiled` is its folder, in turn with the compiled core."""
    if compiled is None:
        return [[replay(events) for _ in range(times)]]
    with TemporaryDirectory() as folder:
        recorded = Path(folder) / "events"
        recorded.write_bytes(pickle.dumps(list(events)))
        found: list[list[Seconds]] = [[], []]
        for _ in range(times):
            for core, place in zip(found, (ROOT, compiled), strict=True):
                core.append(_replay_with(place, recorded))
    assert not any(run.is_compiled for run in found[0])
    assert all(run.is_compiled for run in found[1])
    return found


def _replay_with(place: Path, recorded: Path) -> Seconds:
    """Replay once in a new process, with the core in this folder."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "core_replay.py"), str(recorded)]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, env=environment, cwd=place, stdout=subprocess.PIPE, text=True, check=True)
    return Seconds(**json.loads(done.stdout))


def main() -> None:
    """Measure and print the table for RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot")
    parser.add_argument("--quick", action="store_true", help="only the sizes up to 64 workers, one run each")
    parser.add_argument(
        "--compiled", action="store_true", help="also measure the compiled core, in turn with the Python one"
    )
    options = parser.parse_args()
    sizes = SIZES[:4] if options.quick else SIZES
    with TemporaryDirectory() as folder:
        compiled = build(Path(folder), opt_level=3) if options.compiled else None
        points = table(sizes, 1 if options.quick else 3, compiled)
    if options.plot:
        plot(points, options.plot)


def table(sizes: Sequence[Size], times: int, compiled: Path | None) -> list[tuple[Size, float]]:
    """Print a row for each size. Returns the cost per event of the Python core, in microseconds."""
    rates = ("events/s, all", "events/s, after the last submission")
    heads = [f"{rate}{core}" for core in ("", ", compiled")[: 1 if compiled is None else 2] for rate in rates]
    columns = ["size", "most waiting tasks", "events", *heads, *(() if compiled is None else ("ratio",)), "peak MiB"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    points = []
    for size in sizes:
        events = record(size)
        cores = measured(events, times, compiled)
        seconds = [statistics.median(run.both for run in runs) for runs in cores]
        cells = [size.name, f"{3 * size.jobs if size.per_second is None else 0:,}", f"{len(events):,}"]
        for runs, both in zip(cores, seconds, strict=True):
            after, count = statistics.median(run.after for run in runs), runs[0].events_after
            cells += [f"{len(events) / both:,.0f}", f"{count / after:,.0f}" if count > 1000 else "-"]
        cells += [] if compiled is None else [f"{seconds[0] / seconds[1]:.2f}"]
        cells.append(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)
        points.append((size, 1e6 * seconds[0] / len(events)))
    return points


def plot(points: Sequence[tuple[Size, float]], path: str) -> None:
    """Plot microseconds per event against workers, as an image file."""
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
    axes.set_ylabel("CPU microseconds per event")
    axes.set_title("Cost per event of the scheduler's core against its size")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
