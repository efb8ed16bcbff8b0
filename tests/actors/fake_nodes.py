"""`FakeNodes`: the nodes of a cluster that a test changes. See `ClusterNodes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.actors.control.cluster_view import ClusterView, NodeView
from modelpool.pool.values.specs.spec import NodeId

UNIX = 1_800_000_000.0


class FakeNodes:
    """Only the first node can be drained. While `problem` is set, every call raises it."""

    def __init__(self, *nodes: NodeView) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.problem: Exception | None = None
        self.drained: list[tuple[NodeId, float]] = []
        self.pools: Mapping[str, int] = {}

    def change(self, node_id: NodeId, **fields: Any) -> None:
        self.nodes[node_id] = replace(self.nodes[node_id], **fields)

    async def poll(self) -> ClusterView:
        if self.problem is not None:
            raise self.problem
        return ClusterView(tuple(self.nodes.values()), at=UNIX)

    async def recent(self, max_age_seconds: float) -> ClusterView:
        return await self.poll()

    async def workers_by_pool(self) -> Mapping[str, int]:
        if self.problem is not None:
            raise self.problem
        return self.pools

    async def drain(self, node_id: NodeId, deadline: float, reason: str) -> str:
        if self.problem is not None:
            raise self.problem
        self.drained.append((node_id, deadline))
        return "" if node_id == next(iter(self.nodes)) else "this node cannot be drained"
