"""Nodes of the cluster for users: their names, and what a worker waits for that has not been placed on one. Ray-free.

`actors.ray.ray_cluster` reads the facts from Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from modelpool.pool.specs.spec import NodeId

#: characters of a node id in names of nodes that share an address or a name
SHORT_ID = 6


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node.

    name     of `ray start --node-name`; equal to `address` without it
    address  its IP address
    """

    node_id: NodeId
    name: str
    address: str
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The GPUs of the cluster, as Ray counts them.

    by_pool  pool name -> GPUs that it occupies, for pools that this cluster runs
    """

    total: int
    free: int
    by_pool: Mapping[str, int] = field(default_factory=dict)


class Cluster(Protocol):
    """The cluster of a controller. Answers may be a few seconds old."""

    @property
    def names(self) -> Mapping[NodeId, str]:
        """Display names of the nodes that were read, also of those that are gone."""

    async def read_names(self, nodes: Iterable[NodeId]) -> None:
        """Make sure that `names` has these nodes, if they are alive."""

    async def gpu_use(self) -> GpuUse | None:
        """Return the use of GPUs; None if unknown."""


class OneMachine:
    """The cluster of pools that run in one process: nodes have no names, and no GPU is waited for."""

    @property
    def names(self) -> Mapping[NodeId, str]:
        """See `Cluster`."""
        return {}

    async def read_names(self, nodes: Iterable[NodeId]) -> None:
        """See `Cluster`."""

    async def gpu_use(self) -> GpuUse | None:
        """See `Cluster`."""
        return None


def names_of(nodes: Iterable[ClusterNode]) -> dict[NodeId, str]:
    """Return a short name for each node: the name that was set for it, or its address and the start of its id. The id
    is added to set names too if several nodes have the same.
    """
    nodes = tuple(nodes)
    used = Counter(node.name for node in nodes)
    return {
        node.node_id: node.name
        if node.name and node.name != node.address and used[node.name] == 1
        else f"{node.name or node.address}-{node.node_id[:SHORT_ID]}"
        for node in nodes
    }


def short_name(node_id: NodeId, names: Mapping[NodeId, str]) -> str:
    """Return the name of a node, or the start of its id if it has none; "" for no node."""
    return names.get(node_id) or node_id[:SHORT_ID]


def waiting_text(waiting: int, use: GpuUse, own_pool: str = "") -> str:
    """Describe what workers without a GPU wait for: who has the GPUs, or that there are none."""
    wanted = f"waiting for {_gpus(waiting)}"
    if use.total == 0:
        return f"{wanted}: the cluster has none yet"
    found = f"{wanted}: {use.free} of {use.total} {'is' if use.free == 1 else 'are'} free"
    users = [
        f"{'this pool' if name == own_pool else f'pool {name!r}'} uses {count}"
        for name, count in sorted(use.by_pool.items())
        if count
    ]
    others = use.total - use.free - sum(use.by_pool.values())
    users += [f"other programs use {others}"] if others > 0 else []
    return f"{found}; {', '.join(users)}" if users else found


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
