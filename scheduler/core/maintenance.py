"""`Maintenance`: carries out what operators request: cordons and drains machines, and restarts workers.

Rules
1. Nothing is placed on a cordoned worker, and tasks queued there are asked back. What runs continues, and weights
   stay.
2. A worker that is drained or restarted runs to its end what ends by the deadline. Sampling runs that do not are
   stopped with their state, as late as possible, and continue elsewhere. What has not ended by the deadline is given up
   with its worker, and runs again: the deadline is the operator's.
3. Once nothing runs there, a worker of a drained machine ends: for good if it was requested from a group of nodes, or
   else until the machine is uncordoned. One that is restarted is replaced at once.
4. A worker that computes the hashes of files for which results wait does not end before its deadline.

Pure state; no clock.
"""

from __future__ import annotations

from collections.abc import Container
from math import inf

from modelpool.pool.values.specs.spec import NodeId, TaskId, WorkerId
from modelpool.scheduler.core.leaving import Leaving
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.model.cordons import Cordon, Cordons
from modelpool.scheduler.model.file_verdicts import Incarnation
from modelpool.scheduler.model.messages import Cordoned, RestartRequested, Uncordoned
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import Worker, WorkerTable


class Maintenance:
    """The requests of operators that are in force."""

    def __init__(
        self,
        worker_table: WorkerTable,
        leaving: Leaving,
        preemption: Preemption,
        story: Story,
        unverified: Container[Incarnation],
    ) -> None:
        """`unverified`: workers that compute hashes of files for which results wait; kept up to date by the caller."""
        self._worker_table = worker_table
        self._leaving = leaving
        self._preemption = preemption
        self._story = story
        self._unverified = unverified

    @property
    def cordons(self) -> Cordons:
        """The cordons and drains in force."""
        return self._worker_table.cordons

    def cordon(self, event: Cordoned, at: float) -> None:
        """Cordon a machine or a worker. A second cordon keeps the time of the first."""
        known = self.cordons.nodes.get(event.node) or self.cordons.workers.get(event.worker_id)
        since = at if known is None else known.since
        self.cordons.add(event.node, event.worker_id, Cordon(since, event.deadline))
        self.refresh()
        if event.node and event.deadline is not None:
            self._leaving.copy_results({event.node: event.deadline})

    def uncordon(self, event: Uncordoned) -> None:
        """Withdraw a cordon; workers that have ended because of it start again."""
        self.cordons.remove(event.node, event.worker_id)
        self.refresh()

    def restart(self, event: RestartRequested) -> None:
        """Have a worker that is up replaced; others start anyway, or are wanted no more."""
        worker = self._worker_table.workers.get(event.worker_id)
        if worker is not None and worker.live and worker.wanted:
            self.cordons.restarts[event.worker_id] = event.deadline
            self._story.note(worker, "is restarted by the operator, when its run has ended")
            self.refresh()

    def remember(
        self, nodes: dict[NodeId, Cordon], workers: dict[WorkerId, Cordon], restarts: dict[WorkerId, float]
    ) -> None:
        """Take over what was in force in an earlier core, unless something newer is."""
        cordons = self.cordons
        cordons.nodes, cordons.workers = {**nodes, **cordons.nodes}, {**workers, **cordons.workers}
        for worker_id, deadline in restarts.items():
            worker = self._worker_table.workers.get(worker_id)
            if worker is None or worker.spec is None or worker.was_taken_over:
                cordons.restarts.setdefault(worker_id, deadline)
        self.refresh()

    def refresh(self) -> None:
        """Have all workers follow the cordons."""
        for worker in list(self._worker_table.workers.values()):
            self._worker_table.follow_cordons(worker)

    def step(self, at: float) -> tuple[list[Worker], bool, float]:
        """Carry out all orders that are due. Returns the workers with runs that have not ended by the deadline, for the
        caller to end, whether workers left, and when to look again."""
        expired, has_left, next_at = list[Worker](), False, inf
        for worker in list(self._worker_table.workers.values()):
            deadline = worker.leave_by
            if deadline is None or not worker.live:
                continue
            if worker.task_id is not None or worker.gang is not None or worker.queue:
                if at >= deadline:
                    expired.append(worker)
                    continue
                next_at = min(next_at, deadline)
                lead = self._worker_table.stands_for(worker)
                stop_at = inf if lead is None else self._leaving.stop_at(lead, deadline, at)
                if stop_at <= at and lead is not None:
                    self._preemption.pause(lead, f"as {worker.worker_id} leaves in {deadline - at:.1f} s", at)
                else:
                    next_at = min(next_at, stop_at)
            elif (worker.worker_id, worker.incarnation) in self._unverified and at < deadline:
                next_at = min(next_at, deadline)
            else:
                has_left = True
                self._leave(worker)
        return expired, has_left, next_at

    def copy_result_of(self, task_id: TaskId) -> None:
        """A run of the task ended: copy its result, or its state, if it is on a machine that is drained."""
        drained = self.cordons.drained()
        if drained:
            self._leaving.copy_result_of(task_id, drained)

    def _leave(self, worker: Worker) -> None:
        if worker.drains:
            self._worker_table.end_for_drain(worker)
        else:
            self._worker_table.recycle(worker, "restarted by the operator")
