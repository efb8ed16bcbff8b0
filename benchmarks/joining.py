"""Requests that join a running pass at a step, against waiting for whole runs and against one image per pass.

    python -m benchmarks.joining [--requests 2000] [--loads 0.2,0.5,0.8,0.95] [--gpus 1,2] [--seeds 1] [--stages]
    python -m benchmarks.joining --kinds [--requests 2000] [--loads 0.2,0.5,0.8,0.95] [--seeds 1,2,3]

In virtual time, with the core as it is: 16 clients send requests at Poisson arrivals, with numbers of steps of their
own, to GPUs that have the model. All columns of a row have the same arrivals, of each seed. Only samplings: their texts
are there, and nobody decodes. The gains of larger passes are within the published ones for images, 1.3 to 2.5
(`benchmarks/notes/batching.md`). In the last column each request has the size of pass that the arrivals before it
suggest (`batch = "adaptive"`), and joins.

With `--stages`, the same GPUs encode the text of each request and decode its image: joining with and without stops of
passes for these (`scheduler.core.pass_breaks`), against whole runs and one image per pass.

With `--kinds`, requests of both shapes come to the same GPUs, half of the load each, with texts and decodes, without
and with LoRAs, which 30% of the SD1.5-shaped requests have: they share no pass with the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from random import Random
from statistics import geometric_mean, median

from modelpool.pool.values.core.errors import GIB
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
from modelpool.scheduler.core.pass_breaks import SWITCH_SECONDS
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.queue.size_by_load import SizeByLoad, SizeCosts
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu

CLIENTS = 16
#: the worker is up by then
BEGIN_AT = 5.0
UNET, TEXT, VAE = (ComponentKey(f"m/{part}") for part in ("diffusion_model", "text_encoder", "vae"))
#: the diffusion models of all models, of which each request has one; they have one text encoder and one VAE
UNETS = (UNET, ComponentKey("other/diffusion_model"))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of a model takes.

    step_seconds  of a pass of one image
    rows, gain    images of a larger pass, and how many times as many images it makes in a second
    steps         numbers of steps that requests have, one as often as the other
    text_seconds  of a text; image_seconds: to decode an image, alone, as images that are not small are
    text_gain     how many times as many texts a pass of `rows` encodes in a second, as measured on a CPU
    """

    name: str
    step_seconds: float
    rows: int
    gain: float
    steps: tuple[int, ...]
    text_seconds: float
    image_seconds: float
    text_gain: float

    def seconds(self, steps: int, rows: int) -> float:
        """Seconds of so many steps in passes of `rows` images, full or padded."""
        return steps * self.step_seconds * (rows / self.gain if rows > 1 else 1.0)

    def costs(self, steps: int, stages: bool) -> SizeCosts:
        """What a request of so many steps takes; `stages`: with its text and image, for which all rows of a pass
        stop."""
        single_seconds, shared_seconds = self.seconds(steps, 1), self.seconds(steps, self.rows)
        if stages:
            single_seconds += self.text_seconds + self.image_seconds
            shared_seconds += (self.text_pass_seconds(self.rows) + self.image_seconds) * self.rows
        return SizeCosts(self.rows, single_seconds, shared_seconds)

    def text_pass_seconds(self, rows: int) -> float:
        """Seconds of a pass of `rows` texts, full or padded."""
        return self.text_seconds * (rows / self.text_gain if rows > 1 else 1.0)

    def per_second(self, rows: int) -> float:
        """Images that full passes make in a second."""
        return rows / self.seconds(1, rows) / (sum(self.steps) / len(self.steps))


SHAPES = (
    Shape("SD1.5-shaped", 0.035, 8, 2.0, (20, 25, 30, 50), 0.02, 0.05, 5.3),
    Shape("Flux-shaped", 0.45, 4, 1.3, (20, 28, 50), 0.15, 0.25, 3.4),
)
#: arrivals, as parts of what full passes make
LOADS = (0.2, 0.5, 0.8, 0.95)
#: of the requests of the first shape, with `--kinds`
LORA_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run: images per second from the first arrival to the last end, and seconds from a request to its
    result."""

    per_second: float
    median_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are served.

    rows    of the passes; 0: by the load; -1: of each shape its own
    joins   whether requests join passes
    stops   whether passes stop for texts and decodes
    stages  whether the GPUs encode and decode, too
    """

    rows: int
    joins: bool
    stops: bool = False
    stages: bool = False


def serve(shape: Shape, gpus: int, load: float, way: Way, requests: int, seed: int = 1, models: int = 1) -> Figures:
    """Serve `requests` at a `load` that is relative to full passes of `shape.rows`, each by one of so many models."""
    state = SchedulerState(SchedulerConfig(story_length=1000, joins=way.joins, preemption=way.stops))
    machines = [
        SimulatedGpu(WorkerId(f"gpu-{n}"), 80 * GIB, 25.0 * GIB, resume_seconds=SWITCH_SECONDS) for n in range(gpus)
    ]
    cluster = VirtualCluster(state, machines)
    components = (
        *(ComponentSpec(unet, Role.DIFFUSION_MODEL, 2 * GIB, 2 * GIB) for unet in UNETS[:models]),
        ComponentSpec(TEXT, Role.TEXT_ENCODER, GIB, GIB),
        ComponentSpec(VAE, Role.VAE, GIB // 4, GIB // 4),
    )
    cluster.start(components)
    rng = Random(seed)
    times = list(_arrivals(load * gpus * shape.per_second(shape.rows), requests, rng))
    sizes = SizeByLoad()
    for number, at in enumerate(times):
        steps = rng.choice(shape.steps)
        unet = rng.choice(UNETS[:models]) if models > 1 else UNET
        rows = way.rows or sizes.choose(unet, at, gpus, shape.costs(steps, way.stages)).size
        cluster.post(Submitted(at, job_of(shape, number, steps, rows, way.stages, unet)))
    cluster.run()
    assert not cluster.errors
    assert len(cluster.outcomes) == requests
    seconds = sorted(cluster.latency_seconds.values())
    return Figures(requests / (cluster.now - times[0]), seconds[requests // 2], seconds[requests * 99 // 100])


def _arrivals(per_second: float, requests: int, rng: Random) -> Iterator[float]:
    """The arrivals of all clients, ascending."""

    def of_client(own: Random) -> Iterator[float]:
        at = BEGIN_AT
        while True:
            at += own.expovariate(per_second / CLIENTS)
            yield at

    return islice(merge(*(of_client(Random(rng.random())) for _ in range(CLIENTS))), requests)


def job_of(shape: Shape, number: int, steps: int, rows: int, stages: bool, unet: ComponentKey = UNET) -> JobSpec:
    """Return a request of so many steps, in passes of `rows` images; `stages`: with its encode and decode."""
    is_single = rows == 1
    text = TaskSpec(
        TaskId(f"text-{number}"),
        Stage.ENCODE,
        (ComponentUse(TEXT, 0),),
        GIB,
        shape.text_pass_seconds(rows),
        together="" if is_single else f"text {shape.name}",
        batch_size=rows,
    )
    task = TaskSpec(
        TaskId(f"sample-{number}"),
        Stage.SAMPLE,
        (ComponentUse(unet, 0, passes=steps),),
        GIB * rows,
        shape.seconds(steps, rows),
        (text.task_id,) if stages else (),
        together=f"sample {steps} {rows} {unet}",
        batch_size=rows,
        pass_key="" if is_single else f"sample {rows} {unet}",
    )
    if not stages:
        return JobSpec(JobId(f"job-{number}"), (task,), task.task_id)
    decode = TaskSpec(
        TaskId(f"decode-{number}"),
        Stage.DECODE,
        (ComponentUse(VAE, 0),),
        GIB,
        shape.image_seconds,
        (task.task_id,),
    )
    return JobSpec(JobId(f"job-{number}"), (text, task, decode), decode.task_id)


@dataclass(frozen=True, slots=True)
class MixedFigures:
    """Images per second of all kinds, seconds in the 99th percentile of each shape, and the share of the requests of
    each shape that run in larger passes."""

    per_second: float
    p99_seconds: tuple[float, ...]
    shared: tuple[float, ...]


def serve_kinds(gpus: int, load: float, way: Way, requests: int, seed: int, loras: bool) -> MixedFigures:
    """Serve `requests` of all shapes at a `load` that is relative to full passes, of which each shape has its part."""
    state = SchedulerState(SchedulerConfig(story_length=1000, joins=way.joins, preemption=way.stops))
    machines = [
        SimulatedGpu(WorkerId(f"gpu-{n}"), 80 * GIB, 25.0 * GIB, resume_seconds=SWITCH_SECONDS) for n in range(gpus)
    ]
    cluster = VirtualCluster(state, machines)
    cluster.start(
        (
            *(ComponentSpec(unet, Role.DIFFUSION_MODEL, 2 * GIB, 2 * GIB) for unet in UNETS),
            ComponentSpec(TEXT, Role.TEXT_ENCODER, GIB, GIB),
            ComponentSpec(VAE, Role.VAE, GIB // 4, GIB // 4),
        )
    )
    rng = Random(seed)
    rates = [load / len(SHAPES) * gpus * shape.per_second(shape.rows) for shape in SHAPES]
    counts = [round(requests * rate / sum(rates)) for rate in rates]
    arrivals = sorted(
        (at, place)
        for place, (rate, count) in enumerate(zip(rates, counts, strict=True))
        for at in _arrivals(rate, count, rng)
    )
    sizes, shape_of, shared = SizeByLoad(), dict[JobId, int](), [0] * len(SHAPES)
    for number, (at, place) in enumerate(arrivals):
        shape, steps = SHAPES[place], rng.choice(SHAPES[place].steps)
        has_lora = loras and place == 0 and rng.random() < LORA_SHARE
        rows = 1 if way.rows == 1 else shape.rows
        if not way.rows:
            rows = sizes.choose((place, has_lora), at, gpus, shape.costs(steps, True)).size
        job = job_of(shape, number, steps, rows, True, UNETS[place])
        if has_lora:
            job = replace(job, tasks=tuple(_with_lora(task) for task in job.tasks))
        shape_of[job.job_id] = place
        shared[place] += rows > 1
        cluster.post(Submitted(at, job))
    cluster.run()
    assert not cluster.errors
    assert len(cluster.outcomes) == len(arrivals)
    ended: list[list[float]] = [[] for _ in SHAPES]
    for job_id, seconds in cluster.latency_seconds.items():
        ended[shape_of[job_id]].append(seconds)
    return MixedFigures(
        len(arrivals) / (cluster.now - arrivals[0][0]),
        tuple(sorted(each)[len(each) * 99 // 100] for each in ended),
        tuple(count / of for count, of in zip(shared, counts, strict=True)),
    )


def _with_lora(task: TaskSpec) -> TaskSpec:
    """The same task, alike only with tasks that have the LoRA."""
    return replace(task, pass_key=task.pass_key and f"{task.pass_key} lora", together=f"{task.together} lora")


def print_kinds(requests: int, loads: list[float], seeds: list[int]) -> None:
    """Print medians of the seeds, and the slowest percent of the way that adapts, relative to the better of the others
    in each seed: the worse of both shapes."""
    ways = (Way(1, False, stages=True), Way(-1, True, True, True), Way(0, True, True, True))
    print("| GPUs | load | LoRAs | one image | passes, joining with stops | adaptive | in passes | p99 of it / best |")
    print("|---|---|---|---|---|---|---|---|")
    for gpus in (1, 2, 4, 16):
        for load in loads:
            for loras in (False, True):
                found = [[serve_kinds(gpus, load, way, requests, seed, loras) for seed in seeds] for way in ways]
                cells = []
                for of_way in found:
                    p99 = (median(column) for column in zip(*(each.p99_seconds for each in of_way), strict=True))
                    per_second = median(each.per_second for each in of_way)
                    cells.append(" / ".join((f"{per_second:.3g}", *(f"{seconds:.1f}" for seconds in p99))))
                shared = (median(column) for column in zip(*(each.shared for each in found[-1]), strict=True))
                cells.append(", ".join(f"{share:.0%}" for share in shared))
                ratios = [
                    max(third.p99_seconds) / min(max(first.p99_seconds), max(second.p99_seconds))
                    for first, second, third in zip(*found, strict=True)
                ]
                cells.append(f"{geometric_mean(ratios):.2f} (max {max(ratios):.2f})")
                print(f"| {gpus} | {load:.2f} | {'yes' if loras else 'no'} | {' | '.join(cells)} |", flush=True)


def print_ways(requests: int, loads: list[float], gpu_counts: list[int], seeds: list[int], stages: bool) -> None:
    """Print medians of the seeds, and the slowest percent of the last way, relative to the better of single images and
    whole runs, and to the best of all others, in each seed."""
    last = "joining, with stops" if stages else "adaptive"
    print(
        f"| steps | GPUs | load | one image | whole runs | joining | {last} | p99 / best of the first two | / of all |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        rows = shape.rows
        ways = [Way(1, False, stages=stages), Way(rows, False, stages=stages), Way(rows, True, stages=stages)]
        ways.append(Way(rows, True, True, True) if stages else Way(0, True))
        for gpus in gpu_counts:
            for load in loads:
                found = [[serve(shape, gpus, load, way, requests, seed) for seed in seeds] for way in ways]
                cells = [f"{shape.name}, passes of {rows}", str(gpus), f"{load:.2f}"]
                for of_way in found:
                    middle = [median(getattr(f, name) for f in of_way) for name in Figures.__slots__]
                    cells.append(f"{middle[0]:.3g} / {middle[1]:.1f} / {middle[2]:.1f}")
                p99 = [[figures.p99_seconds for figures in of_way] for of_way in found]
                for others in (p99[:2], p99[:3]):
                    ratios = [own / min(best) for own, *best in zip(p99[3], *others, strict=True)]
                    most = "" if len(seeds) == 1 else f" (max {max(ratios):.2f})"
                    cells.append(f"{geometric_mean(ratios):.2f}{most}")
                print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs, without --kinds")
    parser.add_argument("--stages", action="store_true", help="with encodes and decodes")
    parser.add_argument("--kinds", action="store_true", help="requests of both shapes at the same time")
    parser.add_argument("--seeds", help="of the arrivals; 1, with --kinds 1,2,3")
    given = parser.parse_args()
    loads = [float(load) for load in given.loads.split(",")]
    seeds = [int(seed) for seed in (given.seeds or ("1,2,3" if given.kinds else "1")).split(",")]
    if given.kinds:
        print_kinds(given.requests, loads, seeds)
    else:
        print_ways(given.requests, loads, [int(count) for count in given.gpus.split(",")], seeds, given.stages)


if __name__ == "__main__":
    main()
