"""Compares rules for the number of nodes: this pool's, those of other systems, and the best schedule in hindsight.

Everything runs in virtual time with the same core, placement and nodes; only the rule differs. A node has one GPU,
starts in two to four minutes, and is billed by the second from its launch to its end, idle time after the last image
included. `deadline` rows submit every image with a deadline, the others without; images in time are counted for both.

Run from the repository: `python -m benchmarks.autoscaling [--quick] [--only NAME] [--scale PART]`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from modelpool.benchmarks.lab.node_bounds import clairvoyant_node_seconds
from modelpool.benchmarks.lab.scaling_rules import OngoingRequests, QueueLength, Rule, ruled_core
from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, Submitted
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.metrics import percentile, succeeded_seconds
from modelpool.scheduler.simulator.node_supply import NodeSupply, Reclaim, SimulatedGroup, SupplyConditions
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel

SEED = 1
#: about Flux on an A100: 12.5 seconds per image
MODELS = (InventedModel("flux", step_seconds=0.4), InventedModel("flux-tuned", step_seconds=0.4))
STEPS = 30
IMAGE_SECONDS = 0.1 + STEPS * 0.4 + 0.4
START_SECONDS = (120.0, 240.0)
#: of a node with one GPU; a GPU-second costs 0.001
PRICE_PER_HOUR = 3.6
MOST_NODES = 48
#: time for each image in the rows with deadlines
WITHIN_SECONDS = 900.0
HOUR = 3600.0


@dataclass(frozen=True)
class Load:
    """Arrival times of images. `within_seconds` is the time that each has; `losses_per_hour` the part of the nodes that
    is taken back per hour, with a notice of two minutes."""

    name: str
    arrivals: tuple[float, ...]
    within_seconds: float = WITHIN_SECONDS
    losses_per_hour: float = 0.0

    @property
    def mean_gpus(self) -> float:
        """GPUs that are busy on average until the last deadline."""
        return IMAGE_SECONDS * len(self.arrivals) / (self.arrivals[-1] + self.within_seconds)


@dataclass(frozen=True)
class Result:
    """One row."""

    policy: str
    cost: float
    images: int
    p50: float
    p99: float
    in_time: float
    idle_share: float
    reloads: int
    resizes_per_hour: float
    seconds: float


def loads(scale: float) -> Iterator[Load]:
    """All loads; `scale` shortens them."""
    rng = Random(SEED)
    hours = max(0.5, 3.0 * scale)
    steady = tuple(_arrivals(lambda at: 0.8, hours * HOUR, rng))
    yield Load("Poisson, 0.8 images/s", steady)

    bursts = list(_arrivals(lambda at: 0.1, hours * HOUR, rng))
    begin = 600.0
    while begin < hours * HOUR:
        bursts += [begin + rng.uniform(0.0, 20.0) for _ in range(300)]
        begin += rng.uniform(900.0, 2700.0)
    yield Load("bursts of 300 every 15 to 45 min, 0.1 images/s between", tuple(sorted(bursts)))

    day = max(2.0, 12.0 * scale) * HOUR
    wave = tuple(_arrivals(lambda at: 0.5 * (1.0 - math.cos(2.0 * math.pi * at / day)), day, rng))
    yield Load(f"day and night: 0 to 1 images/s over {day / HOUR:.0f} h", wave)

    count = int(50_000 * scale)
    yield Load(f"batch of {count:,} images due in {8 * scale:.3g} h", (0.0,) * count, 8.0 * scale * HOUR)

    yield Load("Poisson, 0.8 images/s, 5% of the nodes lost per hour", steady, losses_per_hour=0.05)


def _arrivals(rate: Callable[[float], float], until: float, rng: Random) -> Iterator[float]:
    """Poisson arrivals whose rate, at most 1 per second, changes with time."""
    for at in accumulate(iter(lambda: rng.expovariate(1.0), None)):
        if at > until:
            return
        if rng.random() < rate(at):
            yield at


def submissions(load: Load, with_deadlines: bool) -> list[Submitted]:
    """The jobs."""
    mix = Mix(MODELS, steps=(STEPS,))
    jobs = list(mix.submissions(iter(load.arrivals), Random(SEED)))
    if not with_deadlines:
        return jobs
    return [replace(one, job=replace(one.job, deadline=one.at + load.within_seconds)) for one in jobs]


def conditions(load: Load) -> SupplyConditions:
    """The provider: the same delays and losses for every policy, by number of the node."""

    def start_seconds(group: NodeGroup, number: int) -> float:
        return Random(number).uniform(*START_SECONDS)

    def reclaim(group: NodeGroup, number: int) -> Reclaim | None:
        if not load.losses_per_hour:
            return None
        return Reclaim(Random(-1 - number).expovariate(-math.log(1.0 - load.losses_per_hour)) * HOUR, 120.0)

    return SupplyConditions(start_seconds=start_seconds, reclaim=reclaim)


def group(least: int = 0, most: int = MOST_NODES) -> NodeGroup:
    """The nodes."""
    return NodeGroup("gpu", gpu_bytes=24 * GIB, min_nodes=least, max_nodes=most, price_per_hour=PRICE_PER_HOUR)


def run(name: str, load: Load, core: SchedulerState, nodes: NodeGroup, with_deadlines: bool) -> Result:
    """Simulate one policy."""
    began = time.perf_counter()
    supply = NodeSupply([SimulatedGroup(nodes, 24 * GIB, 24e9)], conditions(load))
    cluster = VirtualCluster(core, (), supply=supply)
    cluster.start(Mix(MODELS).components)
    jobs = submissions(load, with_deadlines)
    for job in jobs:
        cluster.post(job)

    def until_done(state: SchedulerState) -> None:
        if nodes.min_nodes and len(cluster.outcomes) == len(jobs):
            raise StopIteration

    with contextlib.suppress(StopIteration):
        cluster.run(until_done)
    failed = [job for job, outcome in cluster.outcomes.items() if outcome is not Outcome.SUCCEEDED]
    assert len(cluster.outcomes) == len(jobs), f"{len(jobs) - len(cluster.outcomes)} jobs are stranded"
    assert not failed, f"{failed[0]} failed: {cluster.errors[failed[0]].message}"
    latencies, paid = succeeded_seconds(cluster), supply.gpu_seconds(cluster.now)
    busy = cluster.totals.run_seconds + cluster.totals.load_seconds
    ended = sum(node.ended_at < math.inf for node in supply.nodes)
    return Result(
        policy=name,
        cost=supply.cost(cluster.now),
        images=len(latencies),
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        in_time=sum(seconds <= load.within_seconds for seconds in latencies) / len(latencies),
        idle_share=1.0 - busy / paid,
        reloads=cluster.totals.reloads,
        resizes_per_hour=(len(supply.nodes) + ended) / (cluster.now / HOUR),
        seconds=time.perf_counter() - began,
    )


def ours(load: Load, with_deadlines: bool) -> Result:
    """This pool."""
    nodes = group()
    core = SchedulerState(SchedulerConfig(groups=(nodes,)))
    return run("modelpool, deadlines" if with_deadlines else "modelpool", load, core, nodes, with_deadlines)


def rivals(load: Load, quick: bool) -> Iterator[Result]:
    """Each rule with several targets, and fixed clusters."""
    rules: list[tuple[str, Rule]] = [
        *((f"Ray Serve, target {target:g}", OngoingRequests(target)) for target in ((2,) if quick else (1, 2, 4, 8))),
        *((f"HPA/KEDA, target {target:g}", QueueLength(target)) for target in ((5,) if quick else (1, 2, 5, 10))),
    ]
    for name, rule in rules:
        yield run(name, load, ruled_core(group(), rule), group(), False)
    for factor in (1.5,) if quick else (1.05, 1.2, 1.5, 2.0):
        count = min(MOST_NODES, math.ceil(factor * load.mean_gpus))
        nodes = group(count, count)
        yield run(f"{count} nodes", load, SchedulerState(SchedulerConfig(groups=(nodes,))), nodes, False)


def bound(load: Load, within_seconds: float) -> float:
    """The cost of the best schedule in hindsight."""
    slot = max(15.0, within_seconds / 480.0)
    start = sum(START_SECONDS) / 2.0 + MODELS[0].diffusion_bytes / 3e9
    work = [(at, IMAGE_SECONDS) for at in load.arrivals]
    return clairvoyant_node_seconds(work, within_seconds, start, slot, MOST_NODES) * PRICE_PER_HOUR / HOUR


def report(load: Load, quick: bool) -> None:
    """Print the table of one load."""
    free, due = ours(load, False), ours(load, True)
    least = bound(load, load.within_seconds)
    print(f"\n### {load.name}: {len(load.arrivals):,} images, {load.mean_gpus:.1f} GPUs busy on average\n")
    print(
        "| rule | cost per 1,000 images | relative to clairvoyant | p50 s | p99 s | in time | idle | reloads |", end=""
    )
    print(" resizes/h |\n|---|---|---|---|---|---|---|---|---|")
    print(f"| clairvoyant, all within {load.within_seconds:.0f} s | {1000 * least / free.images:.2f} | 1.00 |", end="")
    print(" | | 100% | | | |")
    for row in (due, free, *rivals(load, quick)):
        print(
            f"| {row.policy} | {1000 * row.cost / row.images:.2f} | {row.cost / least:.2f} | {row.p50:.0f} |"
            f" {row.p99:.0f} | {row.in_time:.1%} | {row.idle_share:.0%} | {row.reloads} | {row.resizes_per_hour:.1f} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables for RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of the images, one setting of each rule")
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--scale", type=float, default=None, help="part of the length of each load")
    options = parser.parse_args(arguments)
    scale = options.scale if options.scale is not None else 0.1 if options.quick else 1.0
    for load in loads(scale):
        if options.only in load.name:
            report(load, options.quick)


if __name__ == "__main__":
    main()
