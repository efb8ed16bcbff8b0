"""`Cordons`: the machines and workers that an operator has taken out of use, and the workers that are to be restarted.

Nothing new is placed there; what runs continues, and weights stay. A machine that is drained is cordoned, and its
workers end once they run nothing, by its deadline at the latest. Knows no tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import NO_NODE, NodeId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue

if TYPE_CHECKING:
    from modelpool.scheduler.model.workers import Worker

#: cordoned machines, and cordoned workers, that are remembered; the oldest are forgotten
MOST_CORDONS = 4096


@dataclass(frozen=True, slots=True)
class Cordon(WireValue):
    """One cordon. `deadline` is when the runs there must have ended, because the machine is drained; None: it is only
    cordoned."""

    since: float
    deadline: float | None = None


class Cordons:
    """The cordons of a pool, by machine and by worker, and the restarts that have been requested."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Cordon] = {}
        self.workers: dict[WorkerId, Cordon] = {}
        #: workers that are to be restarted, and when their runs must have ended
        self.restarts: dict[WorkerId, float] = {}
        #: why nodes may not be given up now: a maintenance window; "" if they may
        self.obstacle = ""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.workers or self.restarts)

    def of(self, worker: Worker) -> Cordon | None:
        """Return the cordon of a worker: its machine's if that is drained, or else its own, or its machine's."""
        node = None if worker.spec is None else self.nodes.get(worker.spec.node)
        own = self.workers.get(worker.worker_id)
        return node if own is None or (node is not None and node.deadline is not None) else own

    def add(self, node: NodeId, worker_id: WorkerId, cordon: Cordon) -> None:
        """Cordon a machine, or a worker; the cordon replaces an earlier one."""
        if node:
            self.nodes.pop(node, None)
            self.nodes[node] = cordon
            while len(self.nodes) > MOST_CORDONS:
                del self.nodes[next(iter(self.nodes))]
        if worker_id:
            self.workers.pop(worker_id, None)
            self.workers[worker_id] = cordon
            while len(self.workers) > MOST_CORDONS:
                del self.workers[next(iter(self.workers))]

    def remove(self, node: NodeId, worker_id: WorkerId) -> None:
        """Withdraw the cordon of a machine, or of a worker."""
        self.nodes.pop(node, None)
        self.workers.pop(worker_id, None)

    def drained(self) -> dict[NodeId, float]:
        """Return the machines that are drained, or have been, with their deadlines."""
        return {node: cordon.deadline for node, cordon in self.nodes.items() if cordon.deadline is not None}


def unavailable(cordons: Cordons, workers: Iterable[Worker], ending: Iterable[NodeId]) -> set[NodeId]:
    """Return the machines that are drained or have been, those that are `ending`, and those that are given up and
    still have a worker."""
    leaving = {worker.spec.node for worker in workers if worker.spec is not None and not worker.wanted and worker.live}
    return (set(cordons.drained()) | set(ending) | leaving) - {NO_NODE}
