"""Runs that take too long, or do not stop when they are asked to. Knows no placement.

All tasks of a run have one time-out. A run is asked to stop when it is over time; one that nobody needs any more was
asked before. A run that has been asked for all of its tasks and does not stop hangs: its worker is of no use.
"""

from __future__ import annotations

from math import inf

from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import Task, TaskStatus
from modelpool.scheduler.tables.messages import Command, StopTask
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.workers import Fleet, Worker


class Timeouts:
    """Looks after what runs. Methods append the commands that they cause to `out`."""

    def __init__(self, config: SchedulerConfig, story: Story, fleet: Fleet, demand: Demand, out: list[Command]) -> None:
        self._config = config
        self._story = story
        self._fleet = fleet
        self._demand = demand
        self._out = out

    def time_up_at(self, task: Task) -> float:
        """When something is done about a running task that is not over by then; never comes for one that was not asked
        to stop, without a time-out. The same for all tasks of a run, which stops when all of them were asked to."""
        assert task.worker_id is not None, f"{task.name} runs nowhere"
        worker = self._fleet.workers[task.worker_id]
        asked = [self._demand.tasks[name].asked_to_stop_at for name in worker.task_ids]
        if inf not in asked:
            return max(asked) + self._config.stop_grace_seconds
        if self._config.run_timeout_seconds is None:
            return inf
        return task.started_at + worker.members * self._config.run_timeout_seconds

    def ask_to_stop(self, at: float) -> list[tuple[Worker, str]]:
        """Ask runs to stop that take too long. Returns the workers whose runs did not, and what is to be said of it."""
        hanging: list[tuple[Worker, str]] = []
        for worker in self._fleet.workers.values():
            tasks = [self._demand.tasks[name] for name in worker.task_ids]
            if not tasks or at < self.time_up_at(tasks[0]):
                continue
            ran_seconds = at - tasks[0].started_at
            if all(task.asked_to_stop_at < inf for task in tasks):
                message = f"{tasks[0].name} ran for {ran_seconds:.0f} s on {worker.worker_id} and did not stop"
                hanging.append((worker, message))
                continue
            for task in tasks:
                task.timed_out_at = at
                self._story.note(task, f"asked to stop after {ran_seconds:.0f} s")
                if task.status is TaskStatus.RUNNING:  # else it was asked before
                    self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        return hanging

    def watch(self, at: float, is_tick: bool) -> float:
        """When the first run must be over; infinity where that is no news. What `out` asks to stop is asked now. All
        runs are looked at only where one may have come due."""
        stopped = [self._demand.tasks[c.task_id] for c in self._out if isinstance(c, StopTask)]
        for task in stopped:
            if task.timed_out_at is None:
                task.stop_asked_at = at
        if not (stopped or is_tick or self._config.run_timeout_seconds is not None):
            return inf
        names = [worker.task_id for worker in self._fleet.workers.values() if worker.task_id is not None]
        return min((self.time_up_at(self._demand.tasks[name]) for name in names), default=inf)
