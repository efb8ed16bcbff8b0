"""Sends a busy worker its next task shortly before the end of its run, so that it need not wait for a message.

The core plans two tasks of a worker at most: the one that runs, and a queued one. Rules
1. A worker is sent a queued task if its run should end within `send_ahead_seconds`, and if placement would start that
   task there now if the run had ended. Not for runs that are so long that the message does not matter.
2. Only tasks whose weights are all resident then, and of the highest priority that waits: a load may be worth less
   after the run than it seems now. No urgent task waits, and none that one worker is reserved for. Not with batches,
   whose mates gather as late as possible.
3. A queued task is asked back if no job needs it, a task of higher priority or an urgent one waits that fits there, its
   worker will end, or another worker is idle while the run before it takes longer than expected. After that the worker
   is sent no other before the end of its run.
4. Until the answer, it counts as queued. One that is not revoked in time runs: it cannot be told from one that was not
   asked back.

Pure state; no clock.
"""

from __future__ import annotations

from math import inf

from modelpool.pool.specs.spec import TaskId
from modelpool.scheduler.placement.rules import PlacementDecision
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.messages import Command, RevokeTask
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.workers import Worker, WorkerTable

#: busy workers, earliest end first, that are considered after each event, and those that placement is asked for
MOST_CONSIDERED = 64
MOST_ASKED = 4
#: runs longer than this many times `send_ahead_seconds` get no tick of their own: a message is less than a thousandth
#: of them
LONG_RUNS = 40.0


class SendAhead:
    """Chooses the workers that are sent a queued task, and asks tasks back. Appends its commands to `out`."""

    def __init__(
        self, config: SchedulerConfig, story: Story, worker_table: WorkerTable, demand: Demand, out: list[Command]
    ) -> None:
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._out = out
        #: 0: nothing is sent ahead
        self.seconds = config.send_ahead_seconds if config.batch_limit == 1 else 0.0

    def candidates(self, at: float) -> list[Worker]:
        """Return workers that may be sent a queued task now."""
        found: list[Worker] = []
        if not self.seconds or not self._demand.backlog.count or len(self._demand.pinned):
            return found
        for end, _, worker in self._worker_table.worker_index.busy[:MOST_CONSIDERED]:
            if end - at > self.seconds:
                break
            is_free = worker.queued is None and not worker.is_barred and worker.drain_deadline is None
            if is_free and at - end <= self.seconds:
                found.append(worker)
                if len(found) == MOST_ASKED:
                    break
        return found

    def next_at(self, at: float) -> float:
        """Return when the next run is so near its end that its worker may be sent a task; infinity if none is."""
        if not self.seconds or not self._demand.backlog.count:
            return inf
        asked = 0
        for end, _, worker in self._worker_table.worker_index.busy[:MOST_CONSIDERED]:
            if end - at > self.seconds and worker.queued is None and worker.task_id is not None:
                if end - self._demand.tasks[worker.task_id].started_at <= LONG_RUNS * self.seconds:
                    return end - self.seconds
                asked += 1
                if asked == MOST_ASKED:
                    break
        return inf

    def accepts(self, decision: PlacementDecision, worker: Worker) -> bool:
        """Return whether this decision, which placement makes if the run of `worker` has ended, may be sent ahead."""
        task, backlog = decision.task, self._demand.backlog
        if decision.worker is not worker or decision.why.chosen.extra_seconds or decision.spent_seconds:
            return False
        if decision.preload_first is not None or task.memory_failures or task.cost_class.kind.ratio is None:
            return False
        if backlog.urgent and task not in backlog.urgent:
            return False
        oldest = backlog.oldest(worker.capacity_bytes or 0)
        return oldest is None or oldest.priority <= task.priority

    def revoke_outdated(self, at: float, is_ending: bool) -> float:
        """Ask queued tasks back that should not start there any more. Returns when to check again."""
        unneeded, self._demand.unneeded = self._demand.unneeded, []
        for task_id in unneeded:
            self._revoke_unneeded(task_id)
        next_check = inf
        for worker in self._worker_table.with_queued.values():
            queued = worker.queued
            assert queued is not None, f"{worker.name} has no queued task"
            if queued.is_revoked:
                continue
            reason = self._reason(worker, self._demand.tasks[queued.task_id], at, is_ending)
            if reason:
                self._revoke(worker, reason)
            elif self._worker_table.worker_index.idle_count and worker.expected_end is not None:
                next_check = min(next_check, worker.expected_end + self.seconds)
        return next_check

    def _reason(self, worker: Worker, task: Task, at: float, is_ending: bool) -> str:
        """Return why the queued task of a worker should not start there; "" if it should."""
        if is_ending:
            return "the pool ends"
        if not worker.wanted or worker.drain_deadline is not None:
            return f"{worker.worker_id} will end"
        backlog = self._demand.backlog
        is_late = worker.expected_end is None or at >= worker.expected_end + self.seconds
        if is_late and self._worker_table.worker_index.idle_count:
            return f"{worker.worker_id} is busy for longer than expected, and another worker is idle"
        if backlog.count and self._demand.fair_queue.has_priorities:
            oldest = backlog.oldest(worker.capacity_bytes or 0)
            if oldest is not None and oldest.priority > task.priority:
                return f"{oldest.name} waits, of priority {oldest.priority}"
        if backlog.urgent and task.urgent_by == inf and not (task.goes_first or task.overdue):
            for _, _, urgent in backlog.urgent.now(at):
                if urgent.priority >= task.priority and urgent.cost_class.needed_bytes <= (worker.capacity_bytes or 0):
                    return f"{urgent.name} is urgent"
        return ""

    def _revoke_unneeded(self, task_id: TaskId) -> None:
        task = self._demand.tasks.get(task_id)
        worker = None if task is None or task.worker_id is None else self._worker_table.workers.get(task.worker_id)
        queued = None if worker is None else worker.queued
        if worker is not None and queued is not None and queued.task_id == task_id and not queued.is_revoked:
            self._revoke(worker, "no job needs it")

    def _revoke(self, worker: Worker, reason: str) -> None:
        queued = worker.queued
        assert queued is not None, f"{worker.name} has no queued task"
        task = self._demand.tasks[queued.task_id]
        queued.is_revoked = worker.is_barred = True
        self._story.note(task, f"asked back from {worker.worker_id}: {reason}")
        self._out.append(RevokeTask(worker.worker_id, worker.incarnation, queued.task_id, task.attempt))
