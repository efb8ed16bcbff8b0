"""`ClusterFacts`: what users read about the nodes of a pool: their names, and what a worker without a node waits for.

Ray-free; the facts come from a `ClusterNodes`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.actors.control.cluster_view import ClusterView, NodeView
from modelpool.actors.control.node_watch import ClusterNodes
from modelpool.pool.values.specs.spec import NodeId

logger = logging.getLogger(__name__)

#: characters of a node id in names of nodes that share an address or a name
SHORT_ID = 6
#: how old a view may be from which the use of GPUs is read
FRESH_SECONDS = 2.0
#: names of nodes that are remembered; more than any cluster has at a time
NAMES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The GPUs of the nodes that stay, as Ray counts them.

    by_pool  pool name -> GPUs that it occupies, for pools that this cluster runs
    """

    total: int
    free: int
    by_pool: Mapping[str, int] = field(default_factory=dict)


class ClusterFacts:
    """The nodes of one pool, for users. Answers may be a few seconds old; a cluster that does not answer leaves them
    as they were."""

    def __init__(self, nodes: ClusterNodes | None = None, needs_gpus: bool = False) -> None:
        """Without `nodes`, as on a single machine, nodes have no names. Without `needs_gpus`, no GPU is waited for."""
        self._nodes = nodes
        self._needs_gpus = needs_gpus
        self._names: dict[NodeId, str] = {}

    @property
    def names(self) -> Mapping[NodeId, str]:
        """Display names of the nodes that were read, also of those that are gone."""
        return self._names

    async def read_names(self, nodes: Iterable[NodeId]) -> None:
        """Make sure that `names` has these nodes, if they are alive."""
        if any(node and node not in self._names for node in nodes):
            view = await self._view(0.0)
            for node_id, name in names_of(view.alive if view is not None else ()).items():
                self._names.setdefault(node_id, name)  # a name that users have read stays
            while len(self._names) > NAMES_KEPT:
                del self._names[next(iter(self._names))]

    async def gpu_use(self) -> GpuUse | None:
        """Return the use of GPUs; None if unknown."""
        view = await self._view(FRESH_SECONDS) if self._needs_gpus else None
        if view is None or self._nodes is None:
            return None
        try:
            by_pool = await self._nodes.workers_by_pool()
        except Exception as failed:
            logger.info("the pools of the cluster cannot be read: %s: %s", type(failed).__name__, failed)
            by_pool = {}
        staying = [node for node in view.alive if node.drain_deadline is None]
        return GpuUse(sum(node.gpu_count for node in staying), sum(node.free_gpus for node in staying), by_pool)

    async def _view(self, max_age_seconds: float) -> ClusterView | None:
        try:
            return None if self._nodes is None else await self._nodes.recent(max_age_seconds)
        except Exception as failed:
            logger.info("the nodes of the cluster cannot be read: %s: %s", type(failed).__name__, failed)
            return None


def names_of(nodes: Iterable[NodeView]) -> dict[NodeId, str]:
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
