"""The workers of the pool come, are lost and go: what that means for tasks, and for what the pool can run at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from modelpool.pool.values.specs.spec import RunError, RunErrorKind, TaskId, TaskSpec
from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.core.unplaceable import why_too_few, why_unavailable, why_unfit
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.messages import (
    Command,
    EndWorker,
    Event,
    LossCause,
    StartFailed,
    StopTask,
    WorkerDown,
    WorkerUp,
)
from modelpool.scheduler.model.workers import Worker, WorkerState, WorkerTable


class Membership:
    """The changes of the worker table that concern tasks. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        costs: Costs,
        worker_table: WorkerTable,
        demand: Demand,
        recovery: Recovery,
        autoscaler: Autoscaler | None,
        out: list[Command],
    ) -> None:
        self._costs = costs
        self._worker_table = worker_table
        self._demand = demand
        self._recovery = recovery
        self._autoscaler = autoscaler
        self._out = out
        #: most memory of a wanted worker, and its name; None while one of them was never up
        self.largest: tuple[int, str] | None = None if autoscaler is None else autoscaler.largest()
        #: takes up lost members of gangs (`scheduler.core.gangs`)
        self.take_gang_losses: Callable[[], None] = lambda: None
        #: memory that all waiting tasks were checked against; None if that was not possible
        self._checked_bytes: int | None = None

    def up(self, event: WorkerUp, drain_deadline: float | None) -> None:
        """A worker has started, on a machine that ends at `drain_deadline`."""
        if self._autoscaler is not None:
            self._autoscaler.came_up(event.worker, self._demand.at, is_new=event.residency is None)
        lost = self._worker_table.up(event.worker, self._demand.at, drain_deadline, event.residency)
        if self._costs.nodes.lacking and (machine := self._costs.nodes.of(event.worker)) is not None:
            machine.forget_differing(self._demand.at)  # it watches no file yet
        if event.worker.cached_files:
            self._costs.worker_up(event.worker)
        for past in event.past_runs:
            self._costs.learn_past(past, event.worker)
        message = f"worker {event.worker.worker_id} restarted"
        self.changed(lost, RunError(RunErrorKind.WORKER_LOST, message))

    def down(self, event: WorkerDown) -> None:
        """A worker is gone."""
        worker = self._worker_table.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status not in (WorkerState.GIVEN_UP, WorkerState.DRAINED):
            cause = event.cause
            if worker.drain_deadline is not None and not cause.is_external:
                cause = LossCause.PREEMPTED  # a machine that is drained ends its processes in many ways
            if self._autoscaler is not None and worker.group:
                self._autoscaler.lost(worker, cause)
            lost = self._worker_table.lost(worker, event.reason, cause)
            message = f"worker {event.worker_id} was lost ({cause.value}): {event.reason}"
            self.changed(lost, RunError(RunErrorKind.WORKER_LOST, message), cause)

    def end_lost(self, worker: Worker, error: RunError, cause: LossCause = LossCause.CRASH) -> None:
        """End an unusable worker, and count it as lost."""
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self.changed(self._worker_table.lost(worker, error.message, cause), error, cause)

    def start_failed(self, event: StartFailed) -> None:
        """A worker did not start."""
        worker = self._worker_table.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is WorkerState.STARTING:
            if self._autoscaler is not None and worker.group:
                self._autoscaler.start_failed(worker, event.cause, event.reason, self._demand.at)
            self._worker_table.lost(worker, event.reason, event.cause)
            self.changed()

    def scale(self, event: Event) -> None:
        """Request and give up nodes, if there are groups."""
        autoscaler = self._autoscaler
        if autoscaler is None or not autoscaler.step(event, self._demand.at):
            return
        expired, autoscaler.expired = autoscaler.expired, []
        for worker in expired:
            error = RunError(RunErrorKind.WORKER_LOST, "max_cost is spent")
            self.end_lost(worker, error, LossCause.KILLED)
        self.changed()

    def leave_idle(self) -> None:
        """Move idle workers off machines after their deadline."""
        if self._worker_table.end_drained(self._demand.at):
            if self._autoscaler is not None:
                self._autoscaler.nodes_left(self._demand.at)
            self.changed()

    def changed(
        self, lost: Sequence[TaskId] = (), error: RunError | None = None, cause: LossCause = LossCause.CRASH
    ) -> None:
        """Workers came or went, `lost` tasks with one of them by `error` and `cause`: run these again, and check all
        waiting tasks."""
        self.update_capacities()
        returned, self._worker_table.returned = self._worker_table.returned, []
        may_have_started = [queued for queued in returned if queued.may_have_started]
        for queued in returned:  # first: it has not failed, whatever the loss means for the others
            task = self._demand.tasks.get(queued.task_id)
            if task is not None and task.on_worker:
                task.alone = task.alone or queued.may_have_started
                self._recovery.came_back(task, queued.ready_at, "its worker was lost before it started")
        if self._worker_table.gang_losses:
            self.take_gang_losses()
        if self._costs.fetched.disks:
            self._costs.keep_disks(self._worker_table.nodes())
        if error is not None:
            for name in lost:
                task = self._demand.tasks.get(name)  # it may have been removed with the job of another
                if task is not None and task.follows:  # it was believed to run
                    self._recovery.came_back(task, None, "its worker was lost before it said that it does not start")
                elif task is not None and task.on_worker:
                    is_shared = len(lost) > 1 or bool(may_have_started)
                    self._recovery.ended_badly(task, error, self._demand.at, is_shared, cause, bool(may_have_started))
            # the end of one task's jobs may stop the others, which no longer run
            self._out[:] = [c for c in self._out if not (isinstance(c, StopTask) and c.task_id in lost)]
            self.update_capacities()  # the loss may have been forgiven
        self.recheck_waiting()

    def update_capacities(self) -> None:
        """The memory of workers, or their number, has changed."""
        self._demand.backlog.set_capacities(self._worker_table.worker_index.capacities)
        link_bytes_per_second = min(
            (w.link_bytes_per_second for w in self._worker_table.workers.values() if w.live), default=inf
        )
        count = self._worker_table.worker_index.count
        self._demand.fair_queue.pool_changed(count, link_bytes_per_second, self._demand.at)
        if self._autoscaler is not None:
            self.largest = self._autoscaler.largest()
        else:
            largest = self._worker_table.largest()
            self.largest = None if largest is None else (largest.capacity_bytes or 0, largest.worker_id)

    def recheck_waiting(self) -> None:
        """Check whether the waiting tasks can still run, and end the jobs of those that cannot."""
        self._recovery.workers_changed()
        largest_bytes = None if self.largest is None else self.largest[0]
        is_less = largest_bytes is not None and (self._checked_bytes is None or largest_bytes < self._checked_bytes)
        if is_less or self._costs.nodes.lacking or self._demand.shared_only:
            self._demand.fail_unfit()
        self._checked_bytes = largest_bytes
        hopeless = self.hopeless()
        if hopeless is not None:
            self._demand.fail_all(RunError(RunErrorKind.WORKER_LOST, hopeless))

    def hopeless(self) -> str | None:
        """Return why no task can ever run; None if one can."""
        return self._worker_table.hopeless() if self._autoscaler is None else self._autoscaler.hopeless()

    def why_unfit(self, spec: TaskSpec) -> RunError | None:
        """Return why no wanted worker can run the task: it fits on none, or each of their machines lacks a file. None
        if one can, or may be able to: it was never up."""
        error = why_unfit(spec, self.largest)
        if error is None and spec.degrees[0] > 1 and self._autoscaler is None:
            error = why_too_few(spec, self._worker_table.workers.values())
        if error is None and self._costs.nodes.lacking:
            workers = [worker for worker in self._worker_table.workers.values() if worker.wanted]
            error = why_unavailable(spec, workers, self._costs.nodes, self._demand.at)
        return error
