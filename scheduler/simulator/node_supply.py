"""The provider of nodes in a simulation: nodes that start after a delay, are out of stock, or are taken back, and what
they cost. No randomness: delays and losses are passed in.

A node is billed from its launch to its end, by the second. It ends when its last worker has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.model.messages import LossCause
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: seconds after which the shell gives up a start, as in a live pool
START_TIMEOUT_SECONDS = 600.0
#: seconds of a restart of a process on a node that exists
RESTART_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A group of nodes, and the properties of each node."""

    group: NodeGroup
    capacity_bytes: int
    link_bytes_per_second: float
    speed: float = 1.0
    host_bytes: int = 512 * GIB
    storage_bytes_per_second: float = 3e9


@dataclass(frozen=True, slots=True)
class Reclaim:
    """A node is taken back this long after its launch; the notice comes `notice_seconds` before, if that is not 0."""

    after_seconds: float
    notice_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SupplyConditions:
    """How the provider behaves. By default nodes take the expected time, are in stock and are never taken back.

    start_seconds  group and number of the node -> seconds from its launch to its workers being up
    is_in_stock    group and time -> whether a node can be launched
    reclaim        group and number of the node -> its end, if it is taken back
    """

    start_seconds: Callable[[NodeGroup, int], float] = lambda group, number: group.start_seconds
    is_in_stock: Callable[[NodeGroup, float], bool] = lambda group, at: True
    reclaim: Callable[[NodeGroup, int], Reclaim | None] = lambda group, number: None
    timeout_seconds: float = START_TIMEOUT_SECONDS


@dataclass(slots=True)
class SuppliedNode:
    """One node that was launched. `ended_at` is infinity while it exists."""

    node: NodeId
    group: NodeGroup
    launched_at: float
    ready_at: float
    reclaim: Reclaim | None
    ended_at: float = math.inf
    workers: set[WorkerId] = field(default_factory=set)

    def cost(self, until: float) -> float:
        """Its price up to then, by started seconds."""
        seconds = math.ceil(max(0.0, min(self.ended_at, until) - self.launched_at) - 1e-9)
        return seconds * self.group.price_per_hour / 3600.0


class NodeSupply:
    """All groups, and the nodes that were launched."""

    def __init__(self, groups: Iterable[SimulatedGroup] = (), conditions: SupplyConditions | None = None) -> None:
        self.groups = {group.group.name: group for group in groups}
        self.conditions = conditions or SupplyConditions()
        #: every node, in order of launch
        self.nodes: list[SuppliedNode] = []
        self._by_name: dict[NodeId, SuppliedNode] = {}
        self._homes: dict[WorkerId, SuppliedNode] = {}
        #: nodes that exist, by group
        self._open: dict[str, dict[NodeId, SuppliedNode]] = {}
        #: the number of the last node, by group
        self._numbers: dict[str, int] = {}
        self._vacated = False

    def place(self, worker_id: WorkerId, group: str, at: float) -> tuple[SuppliedNode, bool] | None:
        """The node of a worker that starts, and whether it is new; None if there is none in stock."""
        simulated = self.groups[group]
        for node in self._open.get(group, {}).values():
            if len(node.workers) < simulated.group.gpus_per_node:
                self._join(node, worker_id)
                return node, False
        if not self.conditions.is_in_stock(simulated.group, at):
            return None
        number = self._numbers[group] = self._numbers.get(group, -1) + 1
        reclaim = self.conditions.reclaim(simulated.group, number)
        ready_at = at + self.conditions.start_seconds(simulated.group, number)
        node = SuppliedNode(NodeId(f"{group}-node-{number}"), simulated.group, at, ready_at, reclaim)
        self.nodes.append(node)
        self._by_name[node.node] = node
        self._open.setdefault(group, {})[node.node] = node
        self._join(node, worker_id)
        return node, True

    def _join(self, node: SuppliedNode, worker_id: WorkerId) -> None:
        node.workers.add(worker_id)
        self._homes[worker_id] = node

    def machine(self, node: SuppliedNode) -> SimulatedNode:
        """Its memory and disks."""
        simulated = self.groups[node.group.name]
        return SimulatedNode(node.node, simulated.host_bytes, simulated.storage_bytes_per_second)

    def gpu(self, node: SuppliedNode, worker_id: WorkerId) -> SimulatedGpu:
        """The GPU of a worker on it."""
        simulated = self.groups[node.group.name]
        return SimulatedGpu(
            worker_id,
            simulated.capacity_bytes,
            simulated.link_bytes_per_second,
            simulated.speed,
            RESTART_SECONDS,
            node.group.gpu_type,
            node.node,
        )

    def leave(self, worker_id: WorkerId) -> None:
        """A worker has ended, or was lost."""
        node = self._homes.pop(worker_id, None)
        if node is not None:
            node.workers.discard(worker_id)
            self._vacated = True

    def taken_back(self, name: NodeId, at: float) -> tuple[set[WorkerId], LossCause] | None:
        """The node is gone, with these workers; None if it had ended before."""
        node = self._by_name.get(name)
        if node is None or node.ended_at <= at:
            return None
        self._end(node, at)
        cause = LossCause.PREEMPTED if node.reclaim and node.reclaim.notice_seconds else LossCause.NODE_LOST
        for worker_id in node.workers:
            self._homes.pop(worker_id, None)
        return node.workers, cause

    def exists(self, name: NodeId) -> bool:
        """Whether the node has not ended."""
        node = self._by_name.get(name)
        return node is not None and node.ended_at == math.inf

    def sweep(self, at: float) -> None:
        """End the nodes without workers."""
        if self._vacated:
            self._vacated = False
            for nodes in self._open.values():
                for node in [node for node in nodes.values() if not node.workers]:
                    self._end(node, at)

    def _end(self, node: SuppliedNode, at: float) -> None:
        node.ended_at = at
        del self._open[node.group.name][node.node]

    def cost(self, until: float) -> float:
        """The price of all nodes up to then."""
        return sum(node.cost(until) for node in self.nodes)

    def cost_per_hour(self) -> float:
        """The price of the nodes that exist."""
        return sum(node.group.price_per_hour for nodes in self._open.values() for node in nodes.values())

    def gpu_seconds(self, until: float) -> float:
        """GPU-seconds that were paid for."""
        return sum(
            max(0.0, min(node.ended_at, until) - node.launched_at) * node.group.gpus_per_node for node in self.nodes
        )

    def counts(self) -> dict[str, int]:
        """group -> nodes that exist."""
        return {name: len(nodes) for name, nodes in self._open.items()}
