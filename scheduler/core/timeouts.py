"""Timeouts: stops runs that take too long, and finds those that do not stop when asked. Knows no placement.

All tasks of a run have one timeout. A run is asked to stop when it exceeds it; a run that no job needs any more was
asked earlier. A run that does not stop after all its tasks were asked to stop hangs: its worker is unusable.
"""

from __future__ import annotations

from math import inf

from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Task, TaskStatus
from modelpool.scheduler.model.messages import Command, StopTask
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import Worker, WorkerTable


class Timeouts:
    """Watches the running tasks. Methods append the commands that they cause to `out`."""

    def __init__(
        self, config: SchedulerConfig, story: Story, worker_table: WorkerTable, demand: Demand, out: list[Command]
    ) -> None:
        self._config = config
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._out = out

    def time_up_at(self, task: Task) -> float:
        """Time of the next action on the run of a task, if it has not ended by then; infinity for one that has no
        timeout and was not asked to stop. Equal for all tasks of a run, which stops when all were asked to: those that
        joined later are asked later."""
        assert task.worker_id is not None, f"{task.name} runs nowhere"
        return self._due(self._worker_table.workers[task.worker_id])

    def _due(self, worker: Worker) -> float:
        """As `time_up_at`, of the run of a worker, which is not idle. Asked of every worker at every tick."""
        is_limited, latest, soonest = self._config.run_timeout_seconds is not None, 0.0, inf
        for name in worker.task_ids:
            task = self._demand.tasks[name]
            asked_at = task.stop_requested_at
            if asked_at < inf:
                latest = max(latest, asked_at)
            elif is_limited:
                soonest = min(soonest, self._timeout_at(task, worker))
            else:
                return inf
        return soonest if soonest < inf else latest + self._config.stop_grace_seconds

    def _timeout_at(self, task: Task, worker: Worker) -> float:
        """Time at which a task has run for too long; infinity if it has no timeout."""
        if self._config.run_timeout_seconds is None:
            return inf
        return task.started_at + max(worker.members, task.spec.batch_size) * self._config.run_timeout_seconds

    def request_stops(self, at: float) -> list[tuple[Worker, str]]:
        """Ask runs that take too long to stop. Returns the workers with runs that did not, with a message."""
        hanging: list[tuple[Worker, str]] = []
        for worker in self._worker_table.workers.values():
            if worker.task_id is None or at < self._due(worker):
                continue
            tasks = [self._demand.tasks[name] for name in worker.task_ids]
            ran_seconds = at - tasks[0].started_at
            if all(task.stop_requested_at < inf for task in tasks):
                message = f"{tasks[0].name} ran for {ran_seconds:.0f} s on {worker.worker_id} and did not stop"
                hanging.append((worker, message))
                continue
            for task in tasks:
                if worker.pass_key and (task.stop_requested_at < inf or at < self._timeout_at(task, worker)):
                    continue  # it was asked before, or joined later
                task.timed_out_at = at
                self._story.note(task, f"asked to stop after {ran_seconds:.0f} s")
                if task.status is TaskStatus.RUNNING and not task.is_refuted:  # otherwise it was asked before
                    self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        return hanging

    def watch(self, at: float, is_tick: bool) -> float:
        """Time by which the first run must have ended; infinity if unchanged. The runs that `out` asks to stop are
        asked now. All runs are checked only if one may be due."""
        # a run that keeps its state stops between two steps, which may take minutes: that it hangs is not concluded
        stopped = [self._demand.tasks[c.task_id] for c in self._out if isinstance(c, StopTask) and not c.keep_state]
        for task in stopped:
            if task.timed_out_at is None:
                task.cancel_requested_at = at
        if not (stopped or is_tick or self._config.run_timeout_seconds is not None):
            return inf
        workers = [worker for worker in self._worker_table.workers.values() if worker.task_id is not None]
        return min([self._due(worker) for worker in workers], default=inf)
