"""Runs simulations for the command line: parses the cluster, the policies and the prices, and measures the core.

The simulation itself is `scheduler.simulator`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.cli.simulate.simulate_options import OURS
from modelpool.pool.values.core.errors import UserError, format_bytes, parse_bytes, unknown_name, unusable_field
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.simulator.metrics import Figures

if TYPE_CHECKING:
    from modelpool.pool.values.specs.spec import UserId
    from modelpool.scheduler.model.config import SchedulerConfig
    from modelpool.scheduler.model.messages import Command, Event
    from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
    from modelpool.scheduler.simulator.eviction_policies import WorkerMemory
    from modelpool.scheduler.simulator.gpu_spec import GpuGroup, NodeShape
    from modelpool.scheduler.simulator.machines import SimulatedGpu
    from modelpool.scheduler.simulator.workloads.workload import Workload

#: the word for all policies
ALL = "all"


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulation, and the time that the core took on this machine."""

    policy: str
    seed: int
    figures: Figures
    events: int
    core_seconds: float
    wall_seconds: float
    #: failure reasons, each with the first job that it stopped
    failures: tuple[tuple[str, str], ...]
    #: jobs with a deadline that met or missed it; cancelled jobs are neither
    deadlines_met: int = 0
    deadlines_missed: int = 0

    @property
    def events_per_second(self) -> float:
        """Events handled by the core per second of its own time."""
        return self.events / self.core_seconds if self.core_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The simulated cluster. `scheduler` is the scheduler configuration; None for defaults."""

    groups: tuple[GpuGroup, ...]
    shape: NodeShape
    scheduler: SchedulerConfig | None = None

    @property
    def words(self) -> str:
        """The GPUs, in the notation of --gpus."""
        return ", ".join(group.words for group in self.groups)


def setting_of(gpus: str, node: str | None, measured_on: str, config: Path | None) -> Setting:
    """Parse the options into a setting. GPUs that are named are all there are: the groups of nodes of a configuration
    do not count. Raises UserError."""
    from modelpool.scheduler.simulator.gpu_spec import parse_gpus

    groups, shape = parse_gpus(gpus, measured_on), parse_node(node)
    if config is None:
        return Setting(groups, shape)
    from modelpool.actors.config.config import PoolConfig
    from modelpool.scheduler.model.node_groups import NO_LIMITS

    scheduler = replace(PoolConfig.load(config).scheduler, groups=(), autoscaling=NO_LIMITS)
    return Setting(groups, shape, scheduler)


class TimedCore:
    """Wraps a core and measures the processor seconds of its decisions, which other load on this machine hardly
    changes.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.events = 0
        self.seconds = 0.0

    def handle(self, event: Event) -> list[Command]:
        """Forward `event` to the core."""
        begin = time.process_time()
        commands = self._core.handle(event)
        self.seconds += time.process_time() - begin
        self.events += 1
        return commands


def simulate_one(
    workload: Workload, seed: int, policy: str, setting: Setting
) -> tuple[Simulated, VirtualCluster[TimedCore]]:
    """Simulate one workload under one policy. Raises DoesNotFit for a job that none of the GPUs can run."""
    from modelpool.scheduler.simulator.cluster import VirtualCluster
    from modelpool.scheduler.simulator.gpu_spec import require_fit, simulated_gpus
    from modelpool.scheduler.simulator.metrics import figures

    gpus, nodes = simulated_gpus(setting.groups, setting.shape)
    require_fit(workload.jobs, gpus)
    core, memory = _core_of(policy, gpus, workload, setting.scheduler)
    timed = TimedCore(core)
    cluster = VirtualCluster(timed, gpus, nodes=nodes, memory=memory)
    begin = time.perf_counter()
    cluster.start(workload.components)
    for submitted in workload.jobs:
        cluster.post(submitted)
    cluster.run()
    wall_seconds = time.perf_counter() - begin
    reasons: dict[str, str] = {}
    for job, error in cluster.errors.items():
        reasons.setdefault(error.message, job)
    figured = figures(cluster, _weights(workload, setting.scheduler))
    met, missed = _deadlines(cluster)
    found = Simulated(
        policy, seed, figured, timed.events, timed.seconds, wall_seconds, tuple(reasons.items()), met, missed
    )
    return found, cluster


def _deadlines(cluster: VirtualCluster[TimedCore]) -> tuple[int, int]:
    """Count met and missed deadlines, whether or not the policy uses deadlines."""
    met = missed = 0
    for job_id, submitted in cluster.submitted.items():
        outcome, deadline = cluster.outcomes.get(job_id), submitted.job.deadline
        if deadline is None or outcome is Outcome.CANCELLED:
            continue
        in_time = outcome is Outcome.SUCCEEDED and submitted.at + cluster.latency_seconds[job_id] <= deadline
        met += in_time
        missed += not in_time
    return met, missed


def _core_of(
    policy: str, gpus: Sequence[SimulatedGpu], workload: Workload, config: SchedulerConfig | None
) -> tuple[Core, WorkerMemory]:
    """Create a core and its memory; a configuration applies to ours only."""
    from modelpool.actors.cli.simulate.simulate_lab import policies
    from modelpool.scheduler.core.state import SchedulerState
    from modelpool.scheduler.simulator.eviction_policies import PlannedMemory

    if policy == OURS and config is not None:
        return SchedulerState(config), PlannedMemory()
    return policies()[policy].make(gpus, workload.components)


def _weights(workload: Workload, config: SchedulerConfig | None) -> dict[UserId, float]:
    """Return the weight of each user of the workload, from the configuration."""
    from modelpool.scheduler.model.user_share import EVERYBODY

    weights = {share.user: share.weight for share in config.shares} if config is not None else {}
    users = {submitted.job.user for submitted in workload.jobs}
    return {user: weights.get(user, weights.get(EVERYBODY, 1.0)) for user in users}


def parse_policies(text: str) -> tuple[str, ...]:
    """Parse names of policies: each once, in order; modelpool first for 'all'. Raises UserError."""
    from modelpool.actors.cli.simulate.simulate_lab import has_lab, lab_missing, policies

    known = policies()
    names = [name.strip() for name in text.split(",")]
    if names == [ALL]:
        if not has_lab():
            raise lab_missing("--policy", text)
        return tuple(known)
    for name in names:
        if name not in known:
            raise unknown_name("policy in --policy", name, known) if has_lab() else lab_missing("--policy", name)
    if len(set(names)) < len(names):
        raise unusable_field("--policy", text, "each policy once")
    return tuple(names)


def parse_prices(passed: Sequence[str] | None) -> dict[str, float]:
    """Parse prices per hour by kind: 'H100=2.5' or 'H100=2.5,4090=0.4'. Raises UnusableField and UnknownName."""
    from modelpool.scheduler.model.gpu_kinds import kind_of

    prices: dict[str, float] = {}
    for text in (part.strip() for one in passed or () for part in one.split(",")):
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not equals or not 0.0 <= price < float("inf"):
            raise unusable_field("--price", text, "KIND=NUMBER, the price per hour, such as H100=2.5")
        kind = kind_of(name)
        prices[name.strip() if kind is None else kind.name] = price
    return prices


def prices_of(groups: Sequence[GpuGroup], prices: dict[str, float]) -> dict[str, float] | None:
    """Return the price per hour of each group's kind; None without prices. Raises UserError for a missing price, and
    for a price of an unknown kind.
    """
    from modelpool.scheduler.model.gpu_kinds import kind_of

    if not prices:
        return None
    names = {name for group in groups for name in (group.kind, group.kind.partition(":")[0])}
    for name in prices:
        if name not in names and kind_of(name) is None:
            raise unknown_name("GPU kind in --price", name, names)
    found = {}
    for group in groups:
        name = group.kind if group.kind in prices else group.kind.partition(":")[0]
        if name not in prices:
            raise UserError(f"--price: no price for {group.kind}; add --price {name}=NUMBER")
        found[group.kind] = prices[name]
    return found


def parse_node(text: str | None) -> NodeShape:
    """Parse the nodes: '8:512GiB:3GB' is GPUs, memory for files, bytes per second of the disks; 'none' is without.
    Raises UnusableField.
    """
    from modelpool.scheduler.simulator.gpu_spec import NodeShape

    if text is None:
        return NodeShape()
    if text.strip().lower() == "none":
        return NodeShape(gpus=0)
    parts = text.split(":")
    try:
        count, host, storage = int(parts[0]), parse_bytes(parts[1]), parse_bytes(parts[2])
    except (ValueError, IndexError):
        count, host, storage = 0, 0, 0
    if len(parts) != 3 or count < 1:
        raise unusable_field("--node", text, "GPUs:MEMORY:DISK such as 8:512GiB:3GB, or none")
    return NodeShape(count, host, float(storage))


def node_words(shape: NodeShape) -> str:
    """Describe the nodes."""
    if not shape.gpus:
        return "none: all files are in memory"
    disk = f"disks {shape.storage_bytes_per_second / 1e9:.3g} GB/s"
    return f"{shape.gpus} GPUs each, {format_bytes(shape.host_bytes)} memory for files, {disk}"
