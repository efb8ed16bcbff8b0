"""A core with groups in virtual time, with checks after every event: limits hold and nobody waits in vain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import ComponentSpec
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event, Submitted
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingWhy
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.node_supply import NodeSupply, SimulatedGroup, SupplyConditions
from modelpool.scheduler.simulator.workloads.models import InventedModel

#: 4 GiB of weights; a job of 30 steps takes 10 seconds
SMALL = InventedModel("small", diffusion_bytes=2 * GIB, step_seconds=0.3)
#: needs more than 24 GiB at once: its activations do
LARGE = InventedModel("large", diffusion_bytes=20 * GIB, activation_bytes=28 * GIB, step_seconds=1.0)
COMPONENTS: tuple[ComponentSpec, ...] = (*SMALL.components, *LARGE.components)


class LoggedCore:
    """A core that keeps its events and commands."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.state = SchedulerState(config)
        self.log: list[tuple[Event, tuple[Command, ...]]] = []

    def handle(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        self.log.append((event, tuple(commands)))
        return commands


@dataclass
class Scaled:
    """One simulation. `decisions` are all that the core took, in order."""

    groups: Sequence[NodeGroup]
    limits: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    conditions: SupplyConditions = field(default_factory=SupplyConditions)
    gpus: Sequence[SimulatedGpu] = ()
    validated: bool = False
    #: nodes that may be unavailable at a time; None: any number
    most_unavailable: int | None = None

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            groups=tuple(self.groups), autoscaling=self.limits, max_unavailable_nodes=self.most_unavailable
        )
        self.core = LoggedCore(config)
        self.supply = NodeSupply([_simulated(group) for group in self.groups], self.conditions)
        self.cluster = VirtualCluster(self.core, self.gpus, supply=self.supply)
        self.decisions: list[ScalingWhy] = []
        self.most_nodes = 0

    def run(self, jobs: Iterable[Submitted]) -> None:
        self.cluster.start(COMPONENTS)
        for job in jobs:
            self.cluster.post(job)
        self.cluster.run(lambda core: self._check(core.state))

    def _check(self, state: SchedulerState) -> None:
        assert state.autoscaler is not None
        last = self.decisions[-1] if self.decisions else None
        fresh: list[ScalingWhy] = []
        for why in reversed(state.autoscaler.decisions):
            if why is last:
                break
            fresh.append(why)
        self.decisions += reversed(fresh)
        counts = self.supply.counts()
        self.most_nodes = max(self.most_nodes, sum(counts.values()))
        for group in self.groups:
            assert counts.get(group.name, 0) <= group.max_nodes, f"{counts} at {state.at}"
        gpus = sum(counts.get(group.name, 0) * group.gpus_per_node for group in self.groups)
        assert self.limits.max_gpus is None or gpus <= self.limits.max_gpus
        rate = self.supply.cost_per_hour()
        assert self.limits.max_cost_per_hour is None or rate <= self.limits.max_cost_per_hour + 1e-9
        # the bill counts started seconds
        rounding = len(self.supply.nodes) * max(group.price_per_hour for group in self.groups) / 3600.0
        cost = self.supply.cost(self.cluster.now)
        assert self.limits.max_cost is None or cost <= self.limits.max_cost + rounding, f"{cost} at {state.at}"
        if self.validated:
            validate(state)

    @property
    def nodes_left(self) -> dict[str, int]:
        return {name: count for name, count in self.supply.counts().items() if count}


def _simulated(group: NodeGroup) -> SimulatedGroup:
    return SimulatedGroup(group, group.gpu_bytes or 24 * GIB, 20e9, storage_bytes_per_second=2e9)


def jobs_of(
    times: Iterable[float], model: InventedModel = SMALL, name: str = "job", within: float = math.inf, steps: int = 30
) -> list[Submitted]:
    """One image for each time."""
    return [
        Submitted(
            at,
            model.job(
                f"{name}-{number}",
                f"{name} prompt {number}",
                number,
                steps=steps,
                deadline=None if within == math.inf else at + within,
            ),
        )
        for number, at in enumerate(times)
    ]
