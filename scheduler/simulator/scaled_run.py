"""Simulates groups of nodes: properties of the nodes, and the figures of a cluster that changed its size.

Pure apart from the simulation that it is passed; delays and losses follow from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from modelpool.pool.values.core.errors import UserError
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.gpu_kinds import kind_of
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.gpu_spec import REFERENCE_KIND, UNNAMED_LINK_BYTES_PER_SECOND, NodeShape
from modelpool.scheduler.simulator.node_supply import NodeSupply, Reclaim, SimulatedGroup, SupplyConditions

#: the start of a node takes between these multiples of `NodeGroup.start_seconds`
START_RANGE = (2.0 / 3.0, 4.0 / 3.0)
#: a provider announces that it takes a spot node back this long before
NOTICE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """The nodes of one simulation.

    cost              of all nodes, by started seconds
    gpu_seconds       that were paid for
    idle_share        part of them in which nothing ran or loaded; starts are idle
    nodes, most_nodes launched in all, and at a time
    nodes_lost        taken back by the provider
    resizes_per_hour  launches and ends
    reloads           loads of components of which a copy had ended with a node that was given up
    """

    cost: float
    gpu_seconds: float
    idle_share: float
    nodes: int
    most_nodes: int
    nodes_lost: int
    resizes_per_hour: float
    reloads: int


def simulated_groups(
    groups: Iterable[NodeGroup], shape: NodeShape, reference: str = REFERENCE_KIND
) -> tuple[SimulatedGroup, ...]:
    """The nodes of these groups; `reference` is the kind with speed 1. Raises UserError for a group with an unknown
    GPU."""
    measured_on = kind_of(reference)
    assert measured_on is not None, f"{reference} is not in the table"
    found = []
    for group in groups:
        kind = kind_of(group.gpu_type) if group.gpu_type else None
        if kind is None and not group.gpu_bytes:
            raise UserError(
                f"[groups.{group.name}] gpu_type: found {group.gpu_type!r}, expected a known kind of GPU, such as "
                '"A100", or gpu_memory as well: a simulation needs its memory'
            )
        found.append(
            SimulatedGroup(
                group,
                group.gpu_bytes or (0 if kind is None else kind.memory_bytes),
                UNNAMED_LINK_BYTES_PER_SECOND if kind is None else kind.link_bytes_per_second,
                1.0 if kind is None else kind.speed / measured_on.speed,
                shape.host_bytes,
                shape.storage_bytes_per_second,
            )
        )
    return tuple(found)


def random_conditions(seed: int, spot_losses_per_hour: float = 0.0) -> SupplyConditions:
    """A provider with random start times of nodes, which takes this part of the spot nodes back per hour.
    Draws depend on the seed, the group and the number of the node only."""

    def start_seconds(group: NodeGroup, number: int) -> float:
        return group.start_seconds * Random(f"start {seed} {group.name} {number}").uniform(*START_RANGE)

    def reclaim(group: NodeGroup, number: int) -> Reclaim | None:
        if not group.spot or not spot_losses_per_hour:
            return None
        rate = -math.log(1.0 - spot_losses_per_hour) / 3600.0
        return Reclaim(Random(f"end {seed} {group.name} {number}").expovariate(rate), NOTICE_SECONDS)

    return SupplyConditions(start_seconds=start_seconds, reclaim=reclaim)


def scaling_figures(cluster: VirtualCluster[Core]) -> ScalingFigures:
    """Compute the figures of a finished cluster with groups."""
    supply, end = cluster.supply, cluster.now
    paid = supply.gpu_seconds(end)
    busy = cluster.totals.run_seconds + cluster.totals.load_seconds
    ended = [node for node in supply.nodes if node.ended_at < math.inf]
    changes = sorted([(n.launched_at, 1) for n in supply.nodes] + [(n.ended_at, -1) for n in ended])
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return ScalingFigures(
        cost=supply.cost(end),
        gpu_seconds=paid,
        idle_share=max(0.0, 1.0 - busy / paid) if paid else 0.0,
        nodes=len(supply.nodes),
        most_nodes=most,
        nodes_lost=sum(n.reclaim is not None and n.ended_at >= n.launched_at + n.reclaim.after_seconds for n in ended),
        resizes_per_hour=len(changes) / (end / 3600.0) if end else 0.0,
        reloads=cluster.totals.reloads,
    )


def with_deadline(jobs: Sequence[Submitted], by: float | None, within_seconds: float | None) -> list[Submitted]:
    """The jobs with a deadline: at `by`, or each this long after its submission; the earlier one if both are set."""
    found = []
    for one in jobs:
        own = math.inf if within_seconds is None else one.at + within_seconds
        deadline = min(own, math.inf if by is None else by)
        found.append(one if deadline == math.inf else replace(one, job=replace(one.job, deadline=deadline)))
    return found


def scaled_cluster(
    core: SchedulerState, groups: Sequence[SimulatedGroup], conditions: SupplyConditions
) -> VirtualCluster[SchedulerState]:
    """A cluster without GPUs: its nodes are the ones that the core requests."""
    return VirtualCluster(core, (), supply=NodeSupply(groups, conditions))
