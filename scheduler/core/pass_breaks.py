"""Lets passes wait, and stop, for short tasks: texts of requests that could join them, and decodes.

A pass that begins with free rows takes as long as a full one. So before it begins, the ready texts are encoded of
requests that fill its rows, if that takes less time together than the requests would wait for the next pass.

A worker that samples in a pass runs nothing else until the pass ends. So where no other worker is free, the text of a
new request would wait for the whole pass, and the request with it, though the pass has a free row; and an image that
has left the pass would wait for its decode. All rows stop with their states instead, the short tasks run, and the rows
go on in the next pass, with the requests that join.

A pass that runs is stopped only if
1. it is open, all its tasks may stop with their states, none is near its deadline, and no priority is above the short
   tasks';
2. each short task is an encode before a sampling that can join the pass then, or the last stage of an image, and no
   other worker would complete it sooner;
3. the short tasks together come sooner by more time than the rows lose together: the short tasks, their loads, and the
   states (`SWITCH_SECONDS`). The rest of a step delays the short tasks, and is not lost;
4. it has run so long that what its stops cost takes at most `MOST_LOST` of the time: the states, and loads of its
   weights. The short tasks have to run in any case: counted as well, they kept a loaded GPU from its texts until the
   pass had ended with few rows;
5. no other task goes first there by its priority, deadline, share or time of waiting: the rows could not go on at once,
   nor could others join (`scheduler.decisions.placement.joining`, rule 2).

A stop with a free row also serves texts ahead: of requests that take rows which become free later, as many as the pass
has rows, if they take together less than `MOST_LOST` of a pass. Without them a row would be empty from its end to the
next stop. What could join waits until this is decided: a row that joins at the step at which the others stop computes
that step alone.

Nor do texts go before a task that goes first itself.

Pure state; no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from modelpool.pool.values.specs.spec import Stage, TaskId, TaskSpec
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.batching import may_share
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.decisions.queue.shares import share_window_end
from modelpool.scheduler.decisions.queue.urgent import AT_ONCE
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.kept_states import step_seconds
from modelpool.scheduler.model.workers import Worker, WorkerTable

#: to save the states of a pass and to begin again from them, with the messages
SWITCH_SECONDS = 0.1
#: part of a worker's time that stops may take
MOST_LOST = 0.1
#: lines and tasks of each that are considered, and other workers
MOST_LINES = 16
MOST_EACH = 8
MOST_WORKERS = 16
#: passes that are considered at an event, the oldest first
MOST_PASSES = 8


class PassBreaks:
    """Selects the texts that go before a pass, and the passes to stop, through `preemption`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        worker_table: WorkerTable,
        demand: Demand,
        preemption: Preemption,
    ) -> None:
        self._config = config
        self._costs = costs
        self._worker_table = worker_table
        self._demand = demand
        self._preemption = preemption
        #: when a pass may be stopped that has not run long enough yet; infinity if none waits for that
        self.next_at = inf

    def stop_passes(self, at: float) -> None:
        """Stop passes for the short tasks that wait now. Call before ready tasks are started, and join."""
        self.next_at = inf
        passes = list(islice(self._worker_table.open_passes.values(), MOST_PASSES))
        if not passes or not self._has_short(max(worker.capacity_bytes or 0 for worker in passes)):
            return
        for worker in passes:
            members = [self._demand.tasks[name] for name in worker.task_ids]
            wait_seconds = worker.wait_seconds(at)
            if wait_seconds is None or not self._may_stop(worker, members):
                continue
            may_stop_at = min(member.started_at for member in members) + SWITCH_SECONDS / MOST_LOST
            if may_stop_at > at:  # not even for a task that takes no time
                self.next_at = min(self.next_at, may_stop_at)
            else:
                self._stop(worker, members, wait_seconds, at)

    def _has_short(self, capacity_bytes: int) -> bool:
        """Whether a task without steps waits, in the first lines."""
        lines = self._demand.backlog.first_lines(capacity_bytes, MOST_LINES)
        return any(line.head.spec.stage is not Stage.SAMPLE for line in lines)

    def texts_first(self, first: Task, worker: Worker, at: float) -> bool:
        """Have the texts go first of requests that would fill the pass that `first` begins on an idle worker. Return
        whether there are any; each goes first once, and `first` waits at most as often as its pass has rows."""
        if not first.spec.pass_key or not may_share(first) or first.texts_before >= first.spec.batch_size:
            return False
        if first in self._demand.backlog.urgent:
            return False
        rows = first.spec.batch_size - max(1, self._ready_like(first))
        if rows <= 0:
            return False
        served = self._served(worker, first, rows, first.priority, at)
        pass_seconds = self._costs.resident_seconds(first.spec, first.cost_class, worker)
        waiting = first.spec.batch_size - rows
        if len(served.joins) * pass_seconds <= (waiting + len(served.joins)) * served.seconds:
            return False
        first.texts_before += 1
        self._have_go_first(self._with_texts_ahead(worker, first, served, rows, first.priority, at))
        return True

    def _ready_like(self, first: Task) -> int:
        """Return how many tasks are ready for the pass that `first` begins, or has begun, at most its rows."""
        lines = self._demand.backlog.of_component(first.spec.uses[0].component, MOST_LINES)
        tasks = (task for line in lines for task in line.tasks.first(first.spec.batch_size))
        like = sum(self._are_alike(task.spec, first.spec) for task in tasks)
        return min(like, first.spec.batch_size)

    def _are_alike(self, one: TaskSpec, other: TaskSpec) -> bool:
        """Whether two tasks may be in a pass at the same time; without joins, if they may begin it together."""
        return one.pass_key == other.pass_key and (self._config.joins or one.together == other.together)

    def _have_go_first(self, served: _Served) -> None:
        for task in served.tasks:
            task.goes_first = True
            self._demand.backlog.urgent.add(task, AT_ONCE)

    def _stop(self, worker: Worker, members: list[Task], wait_seconds: float, at: float) -> None:
        """Stop the pass of a worker, if it pays and it has run long enough."""
        priority = max(member.priority for member in members)
        free_rows = max(0, worker.free_rows - self._ready_like(members[0]))
        served = self._served(worker, members[0], free_rows, priority, at)
        if not served.tasks:
            return
        lost_seconds = SWITCH_SECONDS + served.seconds
        begins_after = self._rest_of_step(worker, members) + lost_seconds
        sooner = served.count * (min(wait_seconds, served.elsewhere_seconds) - begins_after)
        if sooner <= len(members) * lost_seconds or not self._goes_on(worker, members, served, at):
            return
        stop_seconds = SWITCH_SECONDS + served.reload_seconds + served.lone_seconds
        may_stop_at = min(member.started_at for member in members) + stop_seconds / MOST_LOST
        if may_stop_at > at:
            self.next_at = min(self.next_at, may_stop_at)
            return
        ahead = self._with_texts_ahead(worker, members[0], served, free_rows, priority, at) if free_rows else served
        if self._goes_on(worker, members, ahead, at):
            served = ahead
        others = f", and {len(served.tasks) - 1} more" if len(served.tasks) > 1 else ""
        self._preemption.pause(worker, f"for {served.tasks[0].name}{others}, which take {served.seconds:.2f} s", at)
        self._have_go_first(served)

    def _with_texts_ahead(
        self, worker: Worker, first: Task, served: _Served, free_rows: int, priority: int, at: float
    ) -> _Served:
        """Return what goes before a pass, with texts for rows that become free later, if they take little time."""
        more = self._served(worker, first, free_rows + first.spec.batch_size, priority, at)
        pass_seconds = self._costs.resident_seconds(first.spec, first.cost_class, worker)
        return more if more.seconds - served.seconds <= MOST_LOST * pass_seconds else served

    def _may_stop(self, worker: Worker, members: list[Task]) -> bool:
        """Rule 1, without the priorities."""
        if worker.queue or worker.drain_deadline is not None or not worker.takes_tasks:
            return False
        return all(
            member.spec.stage is Stage.SAMPLE and not member.is_stopping and member.urgent_by == inf
            for member in members
        )

    def _goes_on(self, worker: Worker, members: list[Task], served: _Served, at: float) -> bool:
        """Rule 5."""
        backlog, capacity_bytes = self._demand.backlog, worker.capacity_bytes or 0
        oldest, window_seconds = backlog.oldest(capacity_bytes), self._config.share_window_seconds
        if any(task not in served.tasks for _, _, task in islice(backlog.urgent.now(at), MOST_EACH)):
            return False
        if oldest is None:
            return True
        if oldest in served.tasks:  # what runs has its share, too
            oldest = min(members, key=lambda member: member.virtual_start)
        elif oldest.priority > members[0].priority or oldest.waited_seconds(at) > window_seconds:
            return False
        latest = share_window_end(oldest.order, window_seconds * self._worker_table.worker_index.count)
        latest = max(oldest.virtual_start, latest)
        return all(task.virtual_start <= latest for task in (*members, *served.tasks))

    def _served(self, worker: Worker, first: Task, rows: int, priority: int, at: float) -> _Served:
        """Return the short tasks that wait for a pass that `first` begins, or has begun, and that has so many free
        rows, as far as rule 2 holds for them. On an idle worker decodes wait for no pass."""
        served = _Served()
        waiting = [task for task in self._waiting(worker) if task.priority >= priority]
        ready = {task.name for task in waiting}
        for task in waiting:
            if task.spec.stage is Stage.ENCODE:
                joining = self._joining(task, first.spec, ready, served.joins) if rows else None
                if joining is None or (joining not in served.joins and len(served.joins) == rows):
                    continue
                served.joins[joining] = None
            elif worker.is_idle or not self._completes(task):
                continue
            else:
                served.ends += 1
            extra_seconds = self._costs.extra_seconds(task.spec, task.cost_class, worker) or 0.0
            seconds = extra_seconds + self._costs.resident_seconds(task.spec, task.cost_class, worker)
            if served.begins_pass(task):
                served.seconds += seconds
                if not self._follows_samplings(task):
                    served.lone_seconds += seconds
            if task.cost_class.needed_bytes + first.cost_class.needed_bytes > (worker.capacity_bytes or 0):
                served.reloads = True
            served.elsewhere_seconds = min(served.elsewhere_seconds, self._elsewhere(task, worker, at))
            served.tasks.append(task)
        if served.reloads:  # the weights of the pass are loaded again: at most all that it uses
            reload_bytes = sum(self._costs.components[use.component].upload_bytes for use in first.spec.uses)
            served.reload_seconds = reload_bytes / worker.link_bytes_per_second
            served.seconds += served.reload_seconds
        return served

    def _waiting(self, worker: Worker) -> Iterator[Task]:
        """Ready tasks without steps that were on no worker yet and that this one can run, of the first lines."""
        for line in self._demand.backlog.first_lines(worker.capacity_bytes or 0, MOST_LINES):
            if line.head.spec.stage is Stage.SAMPLE:
                continue
            if self._costs.extra_seconds(line.head.spec, line.cost_class, worker) is None:
                continue
            for task in line.tasks.first(MOST_EACH):
                is_new = not task.attempt and not task.goes_first
                if is_new and not task.held_back and self._demand.fair_queue.may_start(task):
                    yield task

    def _joining(self, task: Task, first: TaskSpec, ready: set[TaskId], chosen: dict[TaskId, None]) -> TaskId | None:
        """Return the sampling that reads this encode and can join such a pass as soon as its encodes are
        there, one of `chosen` if any; None if there is none."""
        found: TaskId | None = None
        for job_id in islice(task.demand, MOST_EACH):
            for spec in self._demand.jobs[job_id].spec.tasks:
                if not self._are_alike(spec, first) or task.name not in spec.needs:
                    continue
                if all(need in ready or need in self._demand.results.held for need in spec.needs):
                    if spec.task_id in chosen:
                        return spec.task_id
                    found = found or spec.task_id
        return found

    def _completes(self, task: Task) -> bool:
        """Whether a job has its result when the task has ended."""
        return any(self._demand.jobs[job_id].spec.wanted == task.name for job_id in islice(task.demand, MOST_EACH))

    def _follows_samplings(self, task: Task) -> bool:
        """Whether a job of the task samples: as many such tasks come as samplings, and any number of others."""
        specs = (spec for job_id in islice(task.demand, MOST_EACH) for spec in self._demand.jobs[job_id].spec.tasks)
        return any(spec.stage is Stage.SAMPLE for spec in specs)

    def _elsewhere(self, task: Task, worker: Worker, at: float) -> float:
        """Return the seconds until another worker would start the task, with its weights."""
        index, least = self._worker_table.worker_index, inf
        others = [*index.some_idle(MOST_WORKERS), *(other for _, _, other in islice(index.busy, MOST_WORKERS))]
        for other in others:
            wait_seconds = other.wait_seconds(at)
            if other is not worker and other.takes_tasks and wait_seconds is not None and wait_seconds < least:
                extra_seconds = self._costs.extra_seconds(task.spec, task.cost_class, other)
                if extra_seconds is not None:
                    least = min(least, wait_seconds + extra_seconds)
        return least

    def _rest_of_step(self, worker: Worker, members: list[Task]) -> float:
        """Return the most seconds that a step of the pass takes."""
        return max(
            step_seconds(
                member.spec,
                self._costs.resident_seconds(member.spec, member.cost_class, worker),
                member.remaining,
            )
            for member in members
        )


@dataclass(slots=True)
class _Served:
    """What a pass is stopped for.

    tasks              in the order in which they wait
    joins              samplings that can join then
    ends               jobs that have their results then
    seconds            of the tasks, with their loads and the loads after them
    elsewhere_seconds  until another worker would start the first of them
    reloads            they need memory that the weights of the pass have
    reload_seconds     to load these weights again
    lone_seconds       of the tasks, of those that no sampling needs or is needed by
    passes             tasks in the last pass of each kind with a batch size
    """

    tasks: list[Task] = field(default_factory=list)
    joins: dict[TaskId, None] = field(default_factory=dict)
    ends: int = 0
    seconds: float = 0.0
    elsewhere_seconds: float = inf
    reloads: bool = False
    reload_seconds: float = 0.0
    lone_seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=dict)

    def begins_pass(self, task: Task) -> bool:
        """Add a task to the passes of its kind; return whether it begins one, and does not share one that takes as
        long without it."""
        if task.spec.batch_size <= 1 or not may_share(task):
            return True
        place = self.passes.get(task.spec.together, 0)
        self.passes[task.spec.together] = (place + 1) % task.spec.batch_size
        return place == 0

    @property
    def count(self) -> int:
        """Samplings and results that come sooner."""
        return len(self.joins) + self.ends
