"""`NodeWatch`: polls the nodes of the cluster, and turns notices of their end into events of the core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from modelpool.actors.control.cluster_view import ClusterView, DrainNotice, drain_events, drain_notices
from modelpool.actors.control.fleet import Clock
from modelpool.pool.values.specs.spec import NodeId
from modelpool.scheduler.model.messages import NodeDraining

logger = logging.getLogger(__name__)


class ClusterNodes(Protocol):
    """The nodes of a cluster; `actors.ray.ray_nodes.RayNodes` implements it."""

    async def poll(self) -> ClusterView:
        """Return the current nodes. Raises if the cluster does not answer."""

    async def recent(self, max_age_seconds: float) -> ClusterView:
        """As `poll`, or return a view that is at most this old."""

    async def workers_by_pool(self) -> Mapping[str, int]:
        """Return the number of workers of each pool of the cluster, by name. Raises if the cluster does not answer."""

    async def drain(self, node_id: NodeId, deadline: float, reason: str) -> str:
        """Let the cluster drain a node until `deadline` (Unix seconds). Returns "", or why it refuses."""


class NodeWatch:
    """Watches the nodes of one pool.

    Notices come from the cluster (drain requests, found by polling) and from notice commands of workers;
    the earlier deadline of a node counts.
    """

    def __init__(
        self,
        nodes: ClusterNodes,
        post: Callable[[NodeDraining], None],
        clock: Clock,
        interval_seconds: float,
        unix_time: Callable[[], float] = time.time,
        on_view: Callable[[ClusterView], None] = lambda view: None,
    ) -> None:
        """`on_view` is called with every view, after its notices were posted."""
        self._nodes = nodes
        self._on_view = on_view
        self._post = post
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._unix_time = unix_time
        #: the latest poll; None before the first
        self.view: ClusterView | None = None
        #: deadlines of which the core was informed, on its clock
        self._known: dict[NodeId, float] = {}
        #: notices of workers
        self._reported: dict[NodeId, DrainNotice] = {}

    async def keep_watching(self) -> None:
        """Poll until cancelled. A cluster that does not answer is polled again."""
        while True:
            await self.poll()
            await self._clock.sleep(self._interval_seconds)

    async def poll(self) -> None:
        """Poll once, and post what changed."""
        try:
            view = await self._nodes.poll()
        except Exception as failed:
            logger.warning("the nodes of the cluster cannot be read: %s: %s", type(failed).__name__, failed)
            return
        self.view = view
        gone = {node.node_id for node in view.nodes if not node.alive}
        for notices in (self._known, self._reported):
            for node in gone & notices.keys():
                del notices[node]
        self._post_changes()
        self._on_view(view)

    async def notice(self, node: NodeId, deadline: float | None, reason: str) -> None:
        """Note a notice that a worker of `node` received; None withdraws it. The cluster is asked to drain the node
        too, so that nothing else starts there."""
        if deadline is None:
            self._reported.pop(node, None)
            self._post_changes()
            return
        is_new = node not in self._reported
        self._reported[node] = DrainNotice(node, deadline, reason)
        self._post_changes()
        if is_new:
            try:
                refusal = await self._nodes.drain(node, deadline, reason)
            except Exception as failed:
                refusal = f"{type(failed).__name__}: {failed}"
            if refusal:
                logger.warning("Ray does not drain node %s: %s", node, refusal)

    def _post_changes(self) -> None:
        notices = (*(drain_notices(self.view) if self.view else ()), *self._reported.values())
        for event in drain_events(self._known, notices, self._clock.now(), self._unix_time()):
            if event.deadline == float("inf"):
                self._known.pop(event.node, None)
            else:
                self._known[event.node] = event.deadline
            self._post(event)
