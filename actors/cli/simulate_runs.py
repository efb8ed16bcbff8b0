"""Simulations as the command line asks for them: what to simulate, on what, under which policies.

Knows how a work is named, a file or a built-in one, and measures the core with this machine's clock; the simulation
itself is `scheduler.simulator`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.cli.simulate_options import OURS
from modelpool.pool.core.errors import UserError, format_bytes, parse_bytes, unknown_name, unusable_field
from modelpool.scheduler.simulator.metrics import Figures
from modelpool.scheduler.tables.messages import Outcome

if TYPE_CHECKING:
    from modelpool.pool.specs.spec import UserId
    from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
    from modelpool.scheduler.simulator.eviction_policies import WorkerMemory
    from modelpool.scheduler.simulator.gpu_spec import GpuGroup, NodeShape
    from modelpool.scheduler.simulator.machines import SimulatedGpu
    from modelpool.scheduler.tables.config import SchedulerConfig
    from modelpool.scheduler.tables.messages import Command, Event
    from modelpool.scheduler.workloads.workload import Workload

#: words that mean every policy there is
ALL = "all"


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulation, and what the core took for it on this machine."""

    policy: str
    seed: int
    figures: Figures
    events: int
    core_seconds: float
    wall_seconds: float
    #: why jobs failed, each reason with the first job that it stopped
    failures: tuple[tuple[str, str], ...]
    #: jobs with a deadline that were done by it, and that were not; those that nobody wants any more are neither
    deadlines_met: int = 0
    deadlines_missed: int = 0

    @property
    def events_per_second(self) -> float:
        """Events that the core took in, over the time that it took for them."""
        return self.events / self.core_seconds if self.core_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated besides the work. `scheduler` is how this pool decides, None for its usual numbers."""

    groups: tuple[GpuGroup, ...]
    shape: NodeShape
    scheduler: SchedulerConfig | None = None

    @property
    def words(self) -> str:
        """The GPUs as they were asked for."""
        return ", ".join(group.words for group in self.groups)


def setting_of(gpus: str, node: str | None, measured_on: str, config: Path | None) -> Setting:
    """The setting that options ask for. Raises UserError."""
    from modelpool.scheduler.simulator.gpu_spec import parse_gpus

    groups, shape = parse_gpus(gpus, measured_on), parse_node(node)
    if config is None:
        return Setting(groups, shape)
    from modelpool.actors.settings.config import PoolConfig

    return Setting(groups, shape, PoolConfig.load(config).scheduler)


class TimedCore:
    """A core and the processor seconds that it takes to decide: what else this machine does hardly counts."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.events = 0
        self.seconds = 0.0

    def handle(self, event: Event) -> list[Command]:
        """What the core says."""
        begin = time.process_time()
        commands = self._core.handle(event)
        self.seconds += time.process_time() - begin
        self.events += 1
        return commands


def simulate_one(
    workload: Workload, seed: int, policy: str, setting: Setting
) -> tuple[Simulated, VirtualCluster[TimedCore]]:
    """One workload under one policy. Raises DoesNotFit for a job that none of the GPUs can run."""
    from modelpool.scheduler.simulator.cluster import VirtualCluster
    from modelpool.scheduler.simulator.gpu_spec import require_fit, simulated_gpus
    from modelpool.scheduler.simulator.metrics import figures

    gpus, nodes = simulated_gpus(setting.groups, setting.shape)
    require_fit(workload.jobs, gpus)
    core, memory = _made(policy, gpus, workload, setting.scheduler)
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
    """Met and missed, by whatever policy: one that knows no deadlines has them all the same."""
    met = missed = 0
    for job_id, submitted in cluster.submitted.items():
        outcome, deadline = cluster.outcomes.get(job_id), submitted.job.deadline
        if deadline is None or outcome is Outcome.CANCELLED:
            continue
        in_time = outcome is Outcome.SUCCEEDED and submitted.at + cluster.latency_seconds[job_id] <= deadline
        met += in_time
        missed += not in_time
    return met, missed


def _made(
    policy: str, gpus: Sequence[SimulatedGpu], workload: Workload, config: SchedulerConfig | None
) -> tuple[Core, WorkerMemory]:
    """A core and its memory; a configuration is for ours alone."""
    from modelpool.actors.cli.simulate_lab import policies
    from modelpool.scheduler.core.state import SchedulerState
    from modelpool.scheduler.simulator.eviction_policies import PlannedMemory

    if policy == OURS and config is not None:
        return SchedulerState(config), PlannedMemory()
    return policies()[policy].make(gpus, workload.components)


def _weights(workload: Workload, config: SchedulerConfig | None) -> dict[UserId, float]:
    """The weight of each user of the workload that the configuration gives one."""
    from modelpool.scheduler.tables.user_share import EVERYBODY

    told = {share.user: share.weight for share in config.shares} if config is not None else {}
    users = {submitted.job.user for submitted in workload.jobs}
    return {user: told.get(user, told.get(EVERYBODY, 1.0)) for user in users}


def parse_policies(text: str) -> tuple[str, ...]:
    """Names of policies, each once, in the order given; ours first of 'all'. Raises UserError."""
    from modelpool.actors.cli.simulate_lab import has_lab, lab_missing, policies

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


def parse_prices(given: Sequence[str] | None) -> dict[str, float]:
    """Prices of an hour by kind, from 'H100=2.5' or 'H100=2.5,4090=0.4'. Raises UnusableField and UnknownName."""
    from modelpool.scheduler.tables.gpu_kinds import kind_of

    prices: dict[str, float] = {}
    for text in (part.strip() for one in given or () for part in one.split(",")):
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not equals or not 0.0 <= price < float("inf"):
            raise unusable_field("--price", text, "KIND=NUMBER, the price of an hour, such as H100=2.5")
        kind = kind_of(name)
        prices[name.strip() if kind is None else kind.name] = price
    return prices


def prices_of(groups: Sequence[GpuGroup], prices: dict[str, float]) -> dict[str, float] | None:
    """The price of an hour of each group's kind, None when no prices were given. Raises UserError for one without, and
    for a price of what is no kind."""
    from modelpool.scheduler.tables.gpu_kinds import kind_of

    if not prices:
        return None
    names = {name for group in groups for name in (group.kind, group.kind.partition(":")[0])}
    for name in prices:
        if name not in names and kind_of(name) is None:
            raise unknown_name("kind of GPU in --price", name, names)
    found = {}
    for group in groups:
        name = group.kind if group.kind in prices else group.kind.partition(":")[0]
        if name not in prices:
            raise UserError(f"--price: nothing was given for {group.kind}, expected --price {name}=NUMBER")
        found[group.kind] = prices[name]
    return found


def parse_node(text: str | None) -> NodeShape:
    """The machines: '8:512GiB:3GB' is GPUs, memory for files, bytes a second from disks; 'none' is without. Raises
    UnusableField."""
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
    """What the machines are, for people."""
    if not shape.gpus:
        return "none: every file is in memory"
    disk = f"{shape.storage_bytes_per_second / 1e9:.3g} GB/s from disks"
    return f"{shape.gpus} GPUs each, {format_bytes(shape.host_bytes)} of memory for files, {disk}"
