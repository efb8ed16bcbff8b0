"""Stops long runs for waiting tasks of higher priority. The stopped tasks keep their states and resume later.

A run is stopped only if
1. all of its tasks have a lower priority than a waiting task that fits there, and none was stopped
   `preemption_limit` times before;
2. it is a sampling run: other stages cannot stop with a state;
3. without that, the waiting task would wait longer than `preemption_wait_seconds` for any worker;
4. it would wait longer than the preemption costs: the rest of a step, and loading the weights of the stopped run again.

Of several such runs, the one of the lowest priority is stopped, of these the one that would take longest. A waiting
task has at most one run stopped for it, and each stop counts against the limit of the stopped task, so the number of
preemptions is bounded.

Runs of unknown length, the first of their kind on a GPU, are not stopped. Pure state; no clock.
"""

from __future__ import annotations

from itertools import islice

from modelpool.pool.specs.spec import Stage
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import Task, TaskStatus
from modelpool.scheduler.tables.kept_states import step_seconds
from modelpool.scheduler.tables.messages import Command, StopTask
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.workers import Worker, WorkerTable

#: waiting tasks that are considered, in order; each may have a run stopped for it
MOST_WAITING = 8
#: workers that are considered, the longest runs first
MOST_WORKERS = 64


class Preemption:
    """Selects the runs to stop. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        story: Story,
        worker_table: WorkerTable,
        demand: Demand,
        out: list[Command],
    ) -> None:
        self._config = config
        self._costs = costs
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._out = out

    def preempt(self, at: float) -> None:
        """Stop runs for the tasks that wait now. Call after ready tasks were started."""
        index, backlog = self._worker_table.worker_index, self._demand.backlog
        busy = index.busy
        # both checks take constant time, and end it for most events
        if not backlog.count or not busy or busy[-1][0] - at <= self._config.preemption_wait_seconds:
            return
        if not self._demand.fair_queue.has_priorities:
            return
        longest = [worker for _, _, worker in islice(reversed(busy), MOST_WORKERS)]
        stopping = {worker: self._lowest(worker) for worker in longest if self._is_stopping(worker)}
        largest_bytes = max((worker.capacity_bytes or 0 for worker in longest), default=0)
        for line in backlog.first_lines(largest_bytes, MOST_WAITING):
            for task in line.tasks.first(MOST_WAITING):
                served = next((w for w in stopping if self._may_serve(task, w, stopping[w])), None)
                if served is not None:
                    del stopping[served]  # that run is stopped for this task, or one like it
                    continue
                victim = self._victim(task, longest, at)
                if victim is None:
                    break  # the others of the line have no higher priority
                longest.remove(victim)
                self.pause(victim, f"for {task.name}, of priority {task.priority}", at)
                for name in victim.task_ids:
                    self._demand.tasks[name].preemptions += 1

    def pause(self, worker: Worker, reason: str, at: float) -> None:
        """Ask the run of a worker to stop with its state, unless it was asked before."""
        for name in worker.task_ids:
            task = self._demand.tasks[name]
            if task.pause_requested_at is not None:
                continue
            task.pause_requested_at = at
            if task.status is TaskStatus.RUNNING:  # otherwise it was asked to stop, without its state
                self._story.note(task, f"asked to stop with its state {reason}")
                self._out.append(StopTask(worker.worker_id, worker.incarnation, name, task.attempt, keep_state=True))

    def _victim(self, task: Task, workers: list[Worker], at: float) -> Worker | None:
        """The worker whose run is stopped for `task`; None if none is."""
        found: tuple[int, float] | None = None
        victim: Worker | None = None
        for worker in workers:
            rank = self._rank(task, worker, at)
            if rank is not None and (found is None or rank < found):
                found, victim = rank, worker
        if victim is None or self._waits_shortly(task, victim, at):
            return None
        return victim

    def _rank(self, task: Task, worker: Worker, at: float) -> tuple[int, float] | None:
        """The order in which the run of `worker` is stopped for `task`, lowest first; None if it is not."""
        wait_seconds = worker.wait_seconds(at)
        if wait_seconds is None or (worker.expected_end or 0.0) - at <= self._config.preemption_wait_seconds:
            return None
        if task.cost_class.needed_bytes > (worker.capacity_bytes or 0) or self._is_stopping(worker):
            return None
        members = [self._demand.tasks[name] for name in worker.task_ids]
        lowest = max(member.priority for member in members)
        if lowest >= task.priority or any(not self._may_stop(member) for member in members):
            return None
        first = members[0]
        run_seconds = self._costs.resident_seconds(first.spec, first.cost_class, worker)
        load = self._costs.load_estimate(task.cost_class, worker)
        if load is None:
            return None
        # weights that make room for the task are loaded again; at most all that the run uses
        evicted_bytes = sum(self._costs.components[use.component].upload_bytes for use in first.spec.uses)
        reload_seconds = evicted_bytes / worker.link_bytes_per_second
        if wait_seconds <= step_seconds(first.spec, run_seconds, first.remaining) + reload_seconds:
            return None
        return lowest, -wait_seconds

    def _waits_shortly(self, task: Task, victim: Worker, at: float) -> bool:
        """Whether another worker takes the task soon without a preemption."""
        most_seconds = self._config.preemption_wait_seconds
        index = self._worker_table.worker_index
        for worker in index.some_idle(MOST_WORKERS):
            if task.cost_class.needed_bytes <= (worker.capacity_bytes or 0):
                return True
        for end, _, worker in islice(index.busy, MOST_WORKERS):
            if end - at > most_seconds:
                return False
            seconds = worker.wait_seconds(at)
            if (
                seconds is not None
                and seconds <= most_seconds
                and task.cost_class.needed_bytes <= (worker.capacity_bytes or 0)
            ):
                return True
        return False

    def _may_stop(self, task: Task) -> bool:
        return (
            task.spec.stage is Stage.SAMPLE
            and task.status is TaskStatus.RUNNING
            and task.preemptions < self._config.preemption_limit
        )

    def _is_stopping(self, worker: Worker) -> bool:
        """Whether its run ends soon because it was asked to."""
        tasks = [self._demand.tasks[name] for name in worker.task_ids]
        return all(task.pause_requested_at is not None or task.status is TaskStatus.STOPPING for task in tasks)

    def _lowest(self, worker: Worker) -> int:
        return max((self._demand.tasks[name].priority for name in worker.task_ids), default=0)

    def _may_serve(self, task: Task, worker: Worker, priority: int) -> bool:
        return priority < task.priority and task.cost_class.needed_bytes <= (worker.capacity_bytes or 0)
