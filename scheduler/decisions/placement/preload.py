"""Preload: which weights of the next tasks a worker should upload while it runs another task.

Rules
1. A worker that begins a run is sent tasks with loads that fit into its length; a busy worker that was sent none
   is considered again when a job is submitted. A preload holds for this run only; the next run is planned again.
2. Followers of the run itself come first, then waiting tasks, in order, each with its followers.
3. A line is considered if the work for resident weights will be done before its load would be, or if its first task
   waited for many times the length of its load. It is preloaded if that is worth more than nothing: what the run hides
   of the load, less the probability that the evicted weights are needed first
   (`scheduler.decisions.placement.preload_value`).
4. Nothing is preloaded that other workers, which have it or preload it too, should finish before this one could begin
   it: no second copy that no task waits for. Nor at the cost of waiting tasks with resident weights, or of tasks that
   the worker has queued: their weights are not evicted and get no other patches. A preload for a long-waiting task is
   used before the next one for that reason.
5. Nothing of which the run hides only a small part. Only files in host memory: a run must not wait for its disk. No
   preload during runs that stream, which need the link themselves, or of unknown length.
6. What will have arrived by the end of the run is assumed to be resident (`pool.weights.plan.preload_plan`, over the
   link); the report of the run corrects that. So a hidden load costs nothing in later decisions, and a half-hidden one
   half.
7. The placement defers a load for a long-waiting task if it can overlap a run (`PlacementDecision.preload_first`): that
   preload comes before all others, and whatever its value is: the load would evict the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, TaskId, WorkerId
from modelpool.pool.weights.plan.preload_plan import PreloadPlan, RunningLease
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.eviction_hints import expected
from modelpool.scheduler.decisions.placement.overlap import (
    held_during_run,
    is_load_available,
    may_preload,
    plan_preload,
    waiting_work,
    would_switch_patches,
)
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision
from modelpool.scheduler.decisions.placement.preload_value import PreloadUses, Victim, preload_value
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.messages import Command, Preload
from modelpool.scheduler.model.placement_record import PreloadNote
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import PendingPreload, Worker, WorkerTable

#: tasks in one preload command
MOST_TASKS = 3
#: lines of waiting tasks, in order, that are considered
MOST_LINES = 8
#: readers of a result, and holders of a component, that are considered
MOST_READERS = 4
MOST_HOLDERS = 8
#: busy workers, earliest end first, of which one is sent a preload when a job is submitted
MOST_NOTIFIED = 4
#: a worker that would load for more than this part of the load is no better place
MOST_OF_LOAD = 0.5
#: factor on the hidden seconds: a preload takes memory, and what it evicts is loaded again
COUNTED = 3.0
#: smaller savings are not worth a message
LEAST_SAVED_SECONDS = 0.005
#: nor is a run that hides less than this part of a load. On the zipf rows and the batch of benchmarks/scheduling.py
#: loads take about as long at 0.05 as at 0.25 (up to 7% longer, or less), at 0.5 up to 14% longer; but where runs are
#: short compared with loads (benchmarks/against_ray.py) two workers get 40 requests a second at 0.02, 37 at 0.1, 35 at
#: 0.25
LEAST_PART = 0.05
#: work for resident weights, as a multiple of the next load: below it the load begins. On the trace of
#: benchmarks/against_ray.py, at 1 four workers load half as often again for no more throughput; at 0.5 two are slower
WORK_LEFT = 0.6
#: a line is preloaded regardless of remaining work if its first task waited this many times the length of its load ...
WAIT_FACTOR = 20.0
#: ... unless this many preloads were not used yet
MOST_UNUSED = 1


class PreloadPlanner:
    """Sends preload commands to workers. Appends them to `out`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        demand: Demand,
        worker_table: WorkerTable,
        story: Story,
        out: list[Command],
    ) -> None:
        self._config = config
        self._costs = costs
        self._demand = demand
        self._worker_table = worker_table
        self._story = story
        self._out = out
        #: workers that began a run since the last call of `plan_all`, with the task that was deferred for it
        self._started: list[tuple[Worker, Task | None]] = []
        #: workers that were sent a preload since their run began
        self._notified: set[WorkerId] = set()
        self._uses = PreloadUses()

    def run_started(self, worker: Worker, cost_class: CostClass, decision: PlacementDecision) -> None:
        """A worker began a run, and the residency after it is assumed."""
        if not self._config.upload_ahead:
            return
        self._notified.discard(worker.worker_id)
        if worker.preloaded:
            self._learn(worker, cost_class)
        if worker.expected_end is None or self._streams(worker, cost_class):
            worker.loaded_at = None
            return
        worker.loaded_at = self._costs.at + decision.why.chosen.extra_seconds
        self._started.append((worker, decision.preload_first))

    def _streams(self, worker: Worker, cost_class: CostClass) -> bool:
        """Whether the run that began on the worker streams: by what it is assumed to leave there, since a component of
        one pass also streams where weights that are needed more often stay instead."""
        entries, components = worker.entries, self._costs.components
        for key in cost_class.components:
            entry = entries.get(key)
            if entry is None or entry.resident_bytes < components[key].weight_bytes:
                return True
        return False

    def _learn(self, worker: Worker, begun: CostClass) -> None:
        """A run of `begun` was placed on the worker, and the residency after it is assumed: learn from the preloads
        that it uses, or that are of no use any more."""
        pending = dict[CostClass, PendingPreload]()
        for cost_class, preloaded in worker.preloaded.items():
            if cost_class is begun:
                seconds = self._costs.at - preloaded.sent_at
                self._uses.was_used(cost_class.kind, seconds, preloaded.expected_seconds)
            elif cost_class.tasks and not worker.entries.keys().isdisjoint(cost_class.components):
                pending[cost_class] = preloaded
            else:
                self._uses.of(cost_class.kind).was_not_used()
        worker.preloaded = pending

    def plan_all(self, job_came: bool) -> None:
        """All that can start has started: plan preloads for workers that began a run, and for another one if a job was
        submitted."""
        for worker, deferred in self._started:
            if not worker.is_idle and worker.live:
                self._notify(worker, deferred)
        self._started.clear()
        if job_came and self._demand.backlog.count:
            for _, _, worker in self._worker_table.worker_index.busy[:MOST_NOTIFIED]:
                if worker.worker_id not in self._notified and worker.loaded_at is not None:
                    self._notify(worker)
                    return

    def _notify(self, worker: Worker, deferred: Task | None = None) -> None:
        """Plan preloads for the worker, and assume their result."""
        assert worker.expected_end is not None, f"the run of {worker.name} has no expected end"
        assert worker.loaded_at is not None, f"{worker.name} streams"
        window_seconds = worker.expected_end - max(self._costs.at, worker.loaded_at)
        if window_seconds < LEAST_SAVED_SECONDS or not worker.takes_tasks:
            return
        sooner: dict[ComponentKey, None] = {}
        for cost_class in worker.preloaded:
            for key in cost_class.components:
                sooner[key] = None
        found, here_seconds = self._candidates(worker, window_seconds, sooner)
        if deferred is not None and deferred.ready_at is not None:
            found = [deferred, *(task for task in found if task.cost_class is not deferred.cost_class)]
        else:
            deferred = None
        tasks: list[Task] = []
        for task in found:
            if is_load_available(self._costs, worker, task.cost_class) and not would_switch_patches(
                worker, task.cost_class, sooner
            ):
                tasks.append(task)
                if len(tasks) == MOST_TASKS:
                    break
        if tasks:
            self._bring(worker, tasks, window_seconds, here_seconds, sooner, deferred)

    def _bring(
        self,
        worker: Worker,
        tasks: Sequence[Task],
        window_seconds: float,
        here_seconds: float,
        sooner: Mapping[ComponentKey, None],
        deferred: Task | None,
    ) -> None:
        """Send each task of which something fits next to the run, in memory and time, if that is worth the weights
        that are evicted for it."""
        costs, entries = self._costs, worker.entries
        assert worker.task_id is not None, f"{worker.name} runs nothing"
        running = self._demand.tasks[worker.task_id]
        coming = {key for task in tasks for key in task.cost_class.components}
        kept = tuple([key for key in sooner if key in entries and key not in coming])
        held, task_ids, stays_bytes = (
            held_during_run(worker, running.cost_class, running.spec.multiple(worker.members), kept),
            list[TaskId](),
            0,
        )
        for key in held.components:
            entry = entries.get(key)
            if entry is not None:
                stays_bytes += entry.resident_bytes
        if stays_bytes + held.run_bytes >= (worker.capacity_bytes or 0):
            return  # the steps below are slower than this check
        least_bytes, run_left_seconds = LEAST_SAVED_SECONDS * worker.link_bytes_per_second, window_seconds
        needed: tuple[ComponentKey, ...] | None = None
        for task in tasks:
            if window_seconds < LEAST_SAVED_SECONDS:
                break
            if not may_preload(costs, worker, held, task.cost_class, least_bytes):
                continue
            hints = NO_HINTS
            if costs.makes_room(task.cost_class, worker):
                if needed is None:
                    needed = expected(running, worker, costs, self._demand, self._worker_table.worker_index)
                hints = EvictionHints(needed)
            ahead = plan_preload(costs, worker, held, task.cost_class, hints)
            upload_bytes, patch_seconds = ahead.upload_bytes, ahead.switches * costs.patch_seconds(worker)
            hidden_bytes = int((window_seconds - patch_seconds) * worker.link_bytes_per_second)
            hidden_bytes = min(hidden_bytes, upload_bytes)
            if hidden_bytes < least_bytes:
                continue
            until_seconds = run_left_seconds if task.ready_at is None else here_seconds
            if task is not deferred:
                is_worth_it = self._value(worker, task, ahead, hidden_bytes, until_seconds) > 0.0
                self._uses.of(task.cost_class.kind).decided(is_worth_it)
                if not is_worth_it:
                    continue
            if needed is None:
                needed = expected(running, worker, costs, self._demand, self._worker_table.worker_index)
            assert worker.residency is not None, f"{worker.name} is not up"
            self._worker_table.assume(worker, ahead.after(worker.residency, hidden_bytes))
            before = worker.preloaded.get(task.cost_class)
            worker.preloaded[task.cost_class] = (
                PendingPreload(hidden_bytes, costs.at, until_seconds)
                if before is None
                else replace(before, hidden_bytes=before.hidden_bytes + hidden_bytes)
            )
            task_ids.append(task.spec.task_id)
            self._story.note(task, PreloadNote(hidden_bytes, worker.worker_id))
            window_seconds -= patch_seconds + upload_bytes / worker.link_bytes_per_second
            held = RunningLease(held.components.union(task.cost_class.components), held.run_bytes)
        if task_ids and needed is not None:
            self._notified.add(worker.worker_id)
            self._out.append(Preload(worker.worker_id, worker.incarnation, tuple(task_ids), needed, kept))

    def _value(self, worker: Worker, task: Task, plan: PreloadPlan, hidden_bytes: int, until_seconds: float) -> float:
        """`preload_value` of bringing this much of the plan for a task that should begin after that time."""
        kind, holders = task.cost_class.kind, self._worker_table.worker_index.holders
        costs, link_bytes_per_second = self._costs, worker.link_bytes_per_second
        delay = self._uses.delay(kind)
        victims: list[Victim] = []
        for move in plan.evict:
            key = move.component
            # demand is shared by those that have the weights
            seconds = delay * until_seconds / max(1, len(holders.get(key, ())))
            probability = costs.rates.needed_within(key, seconds, costs.at)
            spec = costs.components.get(key)
            reload_bytes = move.bytes if spec is None else move.bytes * spec.upload_bytes / spec.weight_bytes
            victims.append(Victim(probability, reload_bytes / link_bytes_per_second))
        return preload_value(hidden_bytes / link_bytes_per_second, self._uses.of(kind).used_part, victims)

    def _candidates(
        self, worker: Worker, window_seconds: float, sooner: dict[ComponentKey, None]
    ) -> tuple[list[Task], float]:
        """Return tasks to preload, the first to be tried first, and the seconds until the first waiting one should
        begin. Adds to `sooner` the components that are needed before them."""
        backlog, costs = self._demand.backlog, self._costs
        left_seconds, most_seconds, found = 0.0, window_seconds / LEAST_PART, dict[CostClass, Task]()
        for queued in worker.queue:  # they start there before any other
            left_seconds += queued.seconds
            for key in self._demand.tasks[queued.task_id].cost_class.components:
                sooner[key] = None
        for task in self._readers(worker):
            extra = costs.extra_seconds(task.spec, task.cost_class, worker)
            if extra == 0.0:
                left_seconds += costs.resident_seconds(task.spec, task.cost_class, worker)
                for key in task.cost_class.components:
                    sooner[key] = None
            elif extra is None or extra > most_seconds:
                continue
            elif not self._is_sooner_elsewhere(task, 1, worker, extra, window_seconds):
                found[task.cost_class] = task
        if not backlog.count:
            return list(found.values()), window_seconds + left_seconds
        for cost_class in worker.preloaded:
            line = backlog.line(cost_class)
            if line is not None:
                extra = costs.extra_seconds(line.head.spec, cost_class, worker)
                if extra and extra <= most_seconds:
                    found[cost_class] = line.head
        work_seconds, wanted = waiting_work(costs, backlog, self._worker_table.worker_index, worker)
        left_seconds += work_seconds
        sooner.update(wanted)
        wait_factor = WAIT_FACTOR if len(worker.preloaded) < MOST_UNUSED else inf
        here_seconds = window_seconds + left_seconds
        is_work_left = left_seconds >= WORK_LEFT * most_seconds
        for line in backlog.first_lines(worker.capacity_bytes or 0, MOST_LINES):
            head = line.head
            waited_seconds = 0.0 if head.batch else head.waited_seconds(costs.at)
            # the loads considered are within these bounds: none of these tasks is due
            is_never_due = is_work_left and waited_seconds < wait_factor * LEAST_SAVED_SECONDS
            for task in () if is_never_due else (head, *self._readers_of(head)):
                extra = costs.extra_seconds(task.spec, task.cost_class, worker)
                if extra is None or not LEAST_SAVED_SECONDS <= extra <= most_seconds:
                    continue
                is_due = left_seconds < WORK_LEFT * extra or waited_seconds >= wait_factor * extra
                if is_due and not self._is_sooner_elsewhere(task, len(line.tasks), worker, extra, here_seconds):
                    found.setdefault(task.cost_class, task)
            if found:
                break
            for key in head.cost_class.components:
                sooner[key] = None
        return list(found.values()), here_seconds

    def _readers(self, worker: Worker) -> Iterable[Task]:
        """The tasks that read the results of the current run of the worker."""
        tasks = self._demand.tasks
        if not worker.batch_mates:
            return () if worker.task_id is None else self._readers_of(tasks[worker.task_id])
        return [reader for task_id in worker.task_ids for reader in self._readers_of(tasks[task_id])]

    def _readers_of(self, task: Task) -> Iterable[Task]:
        """The first tasks that read its result and do not run yet."""
        readers = self._demand.results.readers.get(task.spec.task_id)
        if readers is None or self._config.batch_limit > 1:
            return ()  # batched tasks wait for others of their cost class, on any worker
        tasks, left, found = self._demand.tasks, MOST_READERS, list[Task]()
        for task_id in readers:
            reader = tasks[task_id]
            if reader.worker_id is None and reader.spec.batch_size == 1:
                found.append(reader)
            left -= 1
            if not left:
                break
        return found

    def _is_sooner_elsewhere(
        self, task: Task, count: int, worker: Worker, load_seconds: float, here_seconds: float
    ) -> bool:
        """Whether workers that have most of its weights, or are loading or preloading them, should finish `count` such
        tasks before this worker could finish the first, which it could begin in `here_seconds`."""
        costs, cost_class = self._costs, task.cost_class
        if not cost_class.components:
            return False
        holders = self._worker_table.worker_index.holders.get(cost_class.components[0])
        if holders is None:
            return False
        run_seconds = costs.resident_seconds(task.spec, cost_class, worker)
        stay_together = (
            self._config.batch_limit > 1 or task.spec.batch_size > 1
        )  # a line in two places forms smaller batches
        until_seconds = here_seconds + COUNTED * load_seconds + run_seconds
        for place, other in enumerate(holders):
            if place == MOST_HOLDERS:
                break
            if other is worker:
                continue
            extra, wait = costs.extra_seconds(task.spec, cost_class, other), other.wait_seconds(costs.at)
            if extra is None or wait is None:
                continue
            if extra > MOST_OF_LOAD * load_seconds and cost_class not in other.preloaded:
                continue
            if stay_together or run_seconds <= 0.0:
                return True
            count -= max(0, int((until_seconds - wait - extra) / run_seconds))
            if count <= 0:
                return True
        return False
