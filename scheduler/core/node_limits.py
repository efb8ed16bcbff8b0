"""The machines with limits: those that will end, and those that lack files of components.

Placement looks at the workers of such a machine one by one: the worker index keeps them apart. Runs on machines that
will end are the matter of `leaving`.
"""

from __future__ import annotations

from math import inf

from modelpool.pool.values.specs.spec import ComponentKey, NodeId, RunError, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.wakeups import Ticks
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.nodes import UNAVAILABLE_SECONDS
from modelpool.scheduler.model.workers import Worker, WorkerTable

#: drain notices that are remembered, for workers that start on such a machine
MOST_DRAINING = 4096
#: time after its deadline at which a notice is forgotten: if the machine still runs, it was not drained
DRAINED_SECONDS = 120.0


class NodeLimits:
    """The drain notices, and the known missing files. Keeps the restrictions of the worker index."""

    def __init__(self, costs: Costs, worker_table: WorkerTable, ticks: Ticks) -> None:
        self._costs = costs
        self._worker_table = worker_table
        self._ticks = ticks
        #: machines with a drain notice, and when they end; the oldest notices are forgotten
        self.draining: dict[NodeId, float] = {}

    def drain(self, node: NodeId, ends_at: float, at: float) -> None:
        """Note until when the workers of a machine may run; they take only what ends before. Infinity takes a notice
        back. A machine without a name cannot be told from others."""
        if not node:
            return
        self.draining.pop(node, None)
        deadline = None if ends_at == inf else ends_at
        if deadline is not None:
            self.draining[node] = deadline
            if len(self.draining) > MOST_DRAINING:
                oldest = next(iter(self.draining))
                del self.draining[oldest]
                self.update(oldest)
            self._ticks.request(deadline - at, at)
        self._worker_table.drain(node, deadline)
        self.update(node)

    def forget_drained(self, at: float) -> bool:
        """Forget notices of machines that should be gone long since. Returns whether there were any."""
        forgotten = [node for node, deadline in self.draining.items() if deadline + DRAINED_SECONDS <= at]
        for node in forgotten:
            del self.draining[node]
            self._worker_table.drain(node, None)
            self.update(node)
        if self.draining:
            due = [ends_at if ends_at > at else ends_at + DRAINED_SECONDS for ends_at in self.draining.values()]
            self._ticks.request(min(due) - at, at)
        return bool(forgotten)

    def note_missing(
        self,
        worker: Worker,
        error: RunError | None,
        at: float,
        spec: TaskSpec | None = None,
        after: Residency | None = None,
    ) -> None:
        """The worker ended a run of `spec`, or a load, with `error`, and has `after` on its GPU: its machine may lack
        files."""
        if error is not None and error.components and (machine := self._costs.nodes.of(worker.spec)) is not None:
            resident = () if spec is None or after is None else self._unread(spec, after)
            machine.lacks(error.files, error.message, at, resident)
            self.update(machine.node)
            for other in self._worker_table.worker_index.on_node.get(machine.node, ()) if resident else ():
                other.files_changed()
            self._ticks.request(UNAVAILABLE_SECONDS, at)

    def _unread(self, spec: TaskSpec, after: Residency) -> frozenset[ComponentKey]:
        """Return the components and LoRAs of a task that a worker with these weights need not read."""
        entries = {entry.component: entry for entry in after.entries}
        found: set[ComponentKey] = set()
        for use in spec.uses:
            entry, known = entries.get(use.component), self._costs.components.get(use.component)
            if entry is None or known is None or entry.patch_digest != use.patch_digest:
                continue
            if entry.resident_bytes >= known.weight_bytes:
                found.update((use.component, *use.adapters))
        return frozenset(found)

    def note_found(self, worker: Worker, cost_class: CostClass) -> None:
        """A run on the worker has read all files of its class."""
        if self._costs.nodes.lacking and (machine := self._costs.nodes.of(worker.spec)) is not None:
            machine.has_all(cost_class.files)
            self.update(machine.node)

    def try_again(self, at: float) -> None:
        """Somebody may have copied the missing files."""
        if self._costs.nodes.lacking:
            for node in self._costs.nodes.try_again(at):
                self.update(node)

    def update(self, node: NodeId) -> None:
        """Tell the worker index whether the machine has limits."""
        is_restricted = node in self.draining or node in self._costs.nodes.lacking
        self._worker_table.worker_index.restrict(node, is_restricted)
