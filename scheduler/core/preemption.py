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

from dataclasses import dataclass
from itertools import islice

from modelpool.pool.values.specs.spec import Stage
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.kept_states import step_seconds
from modelpool.scheduler.model.messages import Command, StopTask
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import Worker, WorkerTable

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
        # these checks take constant time, and are the last ones for most events
        if not backlog.count or not busy or busy[-1][0] - at <= self._config.preemption_wait_seconds:
            return
        if not self._demand.fair_queue.has_priorities:
            return
        longest = [worker for _, _, worker in islice(reversed(busy), MOST_WORKERS) if worker.task_id is not None]
        stopping = [_Stopping(self._priority(worker), worker) for worker in longest if self._is_stopping(worker)]
        victims = [victim for worker in longest if (victim := self._as_victim(worker, at)) is not None]
        victims.sort(key=_victim_order)
        if not victims:
            return
        soon, ahead_seconds = self._soon_free(at), 0.0
        largest_bytes = max((victim.worker.capacity_bytes or 0 for victim in victims), default=0)
        for line in backlog.first_lines(largest_bytes, MOST_WAITING):
            for task in line.tasks.first(MOST_WAITING):
                if not victims or task.priority <= victims[0].priority:
                    break  # the others of the line have no higher priority
                served = next((one for one in stopping if _fits(task, one.worker, one.priority)), None)
                if served is not None:
                    stopping.remove(served)  # that run is stopped for this task, or one like it
                    continue
                waits = [seconds for seconds, worker in soon if task.cost_class.needed_bytes <= _capacity(worker)]
                if waits and min(waits) + ahead_seconds / len(soon) <= self._config.preemption_wait_seconds:
                    ahead_seconds += self._costs.resident_seconds(task.spec, task.cost_class, victims[0].worker)
                    continue
                victim = next((one for one in victims if self._pays(task, one)), None)
                if victim is not None:
                    victims.remove(victim)
                    self.pause(victim.worker, f"for {task.name}, of priority {task.priority}", at)
                    for name in victim.worker.task_ids:
                        self._demand.tasks[name].preemptions += 1

    def pause(self, worker: Worker, reason: str, at: float) -> None:
        """Ask the run of a worker to stop with its state. Tasks that were asked to stop before are not asked again."""
        for name in worker.task_ids:
            task = self._demand.tasks[name]
            if not task.is_stopping:
                task.pause_requested_at = at
                self._story.note(task, f"asked to stop with its state {reason}")
                self._out.append(StopTask(worker.worker_id, worker.incarnation, name, task.attempt, keep_state=True))

    def _as_victim(self, worker: Worker, at: float) -> _Victim | None:
        """The run of `worker`, if it may be stopped; None if it ends soon or has to continue."""
        wait_seconds = worker.wait_seconds(at)
        if wait_seconds is None or (worker.expected_end or 0.0) - at <= self._config.preemption_wait_seconds:
            return None
        members = [self._demand.tasks[name] for name in worker.task_ids]
        if not all(self._may_stop(member) for member in members) or self._is_stopping(worker):
            return None
        first = members[0]
        run_seconds = self._costs.resident_seconds(first.spec, first.cost_class, worker)
        # weights that make room for the other task are loaded again: at most all that the run uses
        reload_bytes = sum(self._costs.components[use.component].upload_bytes for use in first.spec.uses)
        cost_seconds = step_seconds(first.spec, run_seconds, first.remaining)
        cost_seconds += reload_bytes / worker.link_bytes_per_second
        return _Victim(max(member.priority for member in members), wait_seconds, cost_seconds, worker)

    def _pays(self, task: Task, victim: _Victim) -> bool:
        """Whether stopping that run lets `task` start sooner by more than it costs."""
        worker = victim.worker
        if not _fits(task, worker, victim.priority) or victim.wait_seconds <= victim.cost_seconds:
            return False
        return self._costs.extra_seconds(task.spec, task.cost_class, worker) is not None

    def _soon_free(self, at: float) -> list[tuple[float, Worker]]:
        """Some workers that are free soon without a preemption, and when."""
        index, most_seconds = self._worker_table.worker_index, self._config.preemption_wait_seconds
        found = [(0.0, worker) for worker in index.some_idle(MOST_WORKERS)]
        for end, _, worker in islice(index.busy, MOST_WORKERS):
            if end - at > most_seconds:
                break
            seconds = worker.wait_seconds(at)
            if seconds is not None and seconds <= most_seconds:
                found.append((seconds, worker))
        return found

    def _may_stop(self, task: Task) -> bool:
        return (
            task.spec.stage is Stage.SAMPLE
            and not task.is_stopping
            and task.preemptions < self._config.preemption_limit
        )

    def _is_stopping(self, worker: Worker) -> bool:
        """Whether its run ends soon because it was asked to."""
        return all(self._demand.tasks[name].is_stopping for name in worker.task_ids)

    def _priority(self, worker: Worker) -> int:
        """The priority of its run: the highest of its tasks."""
        return max((self._demand.tasks[name].priority for name in worker.task_ids), default=0)


@dataclass(slots=True)
class _Stopping:
    """A run that was asked to stop."""

    priority: int
    worker: Worker


@dataclass(slots=True)
class _Victim:
    """A run that may be stopped.

    wait_seconds  until it ends by itself
    cost_seconds  of stopping it
    """

    priority: int
    wait_seconds: float
    cost_seconds: float
    worker: Worker


def _victim_order(victim: _Victim) -> tuple[int, float]:
    return victim.priority, -victim.wait_seconds


def _fits(task: Task, worker: Worker, priority: int) -> bool:
    """Whether `task` may take the place of a run of `priority` on `worker`."""
    return priority < task.priority and task.cost_class.needed_bytes <= _capacity(worker)


def _capacity(worker: Worker) -> int:
    return worker.capacity_bytes or 0
