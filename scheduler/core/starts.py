"""Sends tasks to workers: ready tasks to idle ones, and to busy ones what they run next.

Placement (`scheduler.decisions.placement`) decides which task runs where, and `send_ahead` which busy workers are sent
tasks; `Starts` carries both out in the tables and assumes the residency after each load. Reports confirm or correct it.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import NO_NODE, ComponentKey, OomStep, Stage, TaskReport, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.gang_starts import GangStarts
from modelpool.scheduler.core.joins import Joins
from modelpool.scheduler.core.membership import Membership
from modelpool.scheduler.core.pass_breaks import PassBreaks
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.core.send_ahead import Calls, SendAhead, soonest_free
from modelpool.scheduler.core.wakeups import Ticks
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.batching import Batching, may_share
from modelpool.scheduler.decisions.placement.eviction_hints import hint, with_pins
from modelpool.scheduler.decisions.placement.pinned_loads import PinnedLoads
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.placement.prefetch import PrefetchPlanner
from modelpool.scheduler.decisions.placement.preload import PreloadPlanner
from modelpool.scheduler.decisions.placement.registry import PLACEMENTS
from modelpool.scheduler.decisions.placement.switch_budget import SwitchBudget
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import ALONE, Task, TaskStatus
from modelpool.scheduler.model.messages import BatchMate, Command, Event, RunEnded, RunLink, RunTask, StopTask
from modelpool.scheduler.model.placement_record import PlacementRule, TaskStart, Why
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import QueuedTask, Worker, WorkerState, WorkerTable


class Starts:
    """The tasks on their way to workers. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        story: Story,
        worker_table: WorkerTable,
        demand: Demand,
        recovery: Recovery,
        membership: Membership,
        pinned_loads: PinnedLoads,
        ticks: Ticks,
        out: list[Command],
    ) -> None:
        self._config = config
        self._costs = costs
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._recovery = recovery
        self._membership = membership
        self._pinned_loads = pinned_loads
        self._ticks = ticks
        self._out = out
        self._placement = PLACEMENTS[config.placement]
        self._batching = Batching(config.batch_limit)
        self._prefetch_planner = PrefetchPlanner(costs, demand, worker_table.worker_index, out)
        self._preload_planner = PreloadPlanner(config, costs, demand, worker_table, story, out)
        self.send_ahead = SendAhead(config, costs, self._batching, story, worker_table, demand, out)
        self._joins = Joins(worker_table, demand, self._join, out)
        #: several workers for one run; set by the core
        self.gang_starts: GangStarts | None = None
        #: short tasks that go before passes; set by the core
        self.pass_breaks: PassBreaks | None = None
        #: for loads that serve long-waiting tasks
        self.switch_budget = SwitchBudget(config.switch_share)

    def start_ready(self) -> None:
        """Send ready tasks to running passes that they may join, and to idle workers."""
        backlog = self._demand.backlog
        if self._worker_table.open_passes:
            self._join_ready()
        if self._demand.pinned.count:
            self._start_pinned()
            if (pinned_until := self._recovery.time_passed(self._demand.at)) < inf:
                self._ticks.request(pinned_until - self._demand.at, self._demand.at)
            # released tasks may start now, or may be held back by their user's limit
            self._demand.fair_queue.settle(self._demand.at)
        workers = self._worker_table.worker_index
        if len(backlog.shared_only) or (self.gang_starts is not None and self.gang_starts.held_for is not None):
            self._start_shared_only()
        while workers.idle_count and backlog.count:
            query = self._query()
            decision = self._placement(query)
            if decision is None:
                self._schedule_tick()
                return
            breaks = self.pass_breaks
            if breaks is not None and breaks.texts_first(decision.task, decision.worker, self._demand.at):
                continue
            if decision.task.degrees != ALONE and self.gang_starts is not None:
                decision = self.gang_starts.widened(query, decision)
            if query.switch_seconds > 0.0 and decision.spent_seconds == 0.0:
                self.switch_budget.nothing_due(self._demand.at)
            self._start(decision)
            if self._worker_table.open_passes:
                self._join_ready()

    def _start_shared_only(self) -> None:
        """Start tasks that never run on one worker, and what fits before the run of the first one that waits."""
        gang_starts = self.gang_starts
        assert gang_starts is not None, "the core shares runs"
        while (decision := gang_starts.shared_only(self._query())) is not None:
            self._start(decision)
        while (decision := gang_starts.in_the_gap(self._query())) is not None:
            self._start(decision)

    def prepare_loads(self, job_came: bool) -> None:
        """Have machines read, and workers upload, what tasks will need next."""
        if job_came:
            self._prefetch_planner.job_came()
        self._preload_planner.plan_all(job_came)

    def learn(self, task: Task, worker: Worker, report: TaskReport) -> None:
        """Learn from a run; for a batch once, with its first report, which has the switches."""
        if report.cost.batched == 1 or worker.pass_key or len(worker.task_ids) == worker.members:
            spec = task.spec
            if report.cost.steps_before:  # the steps of its cost count: it may have resumed from a state unknown here
                spec = replace(spec, run_seconds=task.full_run_seconds)
            if spec.batch_size > 1:  # its seconds are of a whole pass
                report = replace(report, cost=report.cost.whole)
            self._costs.learn(spec, task.cost_class, worker, report)
        if worker.members > 1:
            self._batching.learn(task, worker, report.cost)

    def is_reported_in_parts(self, event: Event) -> bool:
        """Whether this is the end of one task of a batch that has succeeded: the ends of the others follow at once.
        What they lead to can then share runs, and starts with the last of them."""
        if not isinstance(event, RunEnded) or event.report.error is not None:
            return False
        worker = self._worker_table.current(event.report.worker_id, event.report.incarnation)
        if worker is None or worker.members == 1 or worker.task_id is None or worker.pass_key:
            return False
        return len(worker.task_ids) < worker.members

    def plan_ahead(self, is_ending: bool) -> None:
        """Ask queued tasks back that should not start where they are, and send each worker with a run that ends soon
        the task that placement would start there then."""
        check_at = self.send_ahead.revoke_outdated(self._demand.at, is_ending)
        if not is_ending:
            calls = Calls(self.send_ahead.seconds)
            if candidates := self.send_ahead.candidates(self._demand.at):
                self._fill_queues(candidates, calls)
            while (follower := self.send_ahead.follower(self._demand.at)) is not None:
                task, worker = follower
                note = "its input is computed there"
                self._queue(make_decision(self._query(), task, worker, PlacementRule.RESIDENT, note), calls)
            check_at = min(check_at, self.send_ahead.next_at(self._demand.at))
        if check_at < inf:
            self._ticks.request(check_at - self._demand.at, self._demand.at)

    def _fill_queues(self, candidates: list[Worker], calls: Calls) -> None:
        """Send tasks to busy workers in turns, each the one that placement would start there if it were idle."""
        table, idle = self._worker_table, None
        while candidates and self._demand.backlog.count:
            worker = candidates[0] if len(candidates) == 1 else soonest_free(candidates)
            if worker is not idle:
                if idle is not None:
                    table.stop_pretending(idle)
                table.pretend_idle(worker)
                idle = worker
            decision = self._placement(self._query())
            if decision is None or not self.send_ahead.accepts(decision, worker):
                candidates.remove(worker)
                continue
            self._queue(decision, calls)
            if not self.send_ahead.has_room(worker, self._demand.at):
                candidates.remove(worker)
        if idle is not None:
            table.stop_pretending(idle)

    def start_queued(self, worker: Worker) -> None:
        """The run of the worker has ended: it has started its next queued task, unless that is revoked."""
        queued, was_barred = self._worker_table.unqueue(worker), worker.is_barred
        task = self._demand.tasks[queued.task_id]
        start = self._task_start(task, worker, queued.why)
        if task.follows:  # a task in front of it has failed, or was revoked
            self._story.note(task, f"will not start on {worker.worker_id}, without {', '.join(task.follows)}")
        if task.status is TaskStatus.QUEUED:
            self._story.move(task, TaskStatus.RUNNING, start)
        else:  # it was asked back, perhaps too late
            self._story.note(task, start)
            self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        if task.is_refuted and task.status is TaskStatus.RUNNING:
            self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        task.started_at = self._demand.at
        worker.residency_before = worker.residency
        assert worker.residency is not None, f"{worker.name} is not up"
        extra_seconds = self._costs.extra_seconds(task.spec, task.cost_class, worker)
        self._costs.run_started(task.cost_class, worker)
        assumed = worker.residency
        if self._costs.load_estimate(task.cost_class, worker) is not None:  # else it will run out of memory
            assumed = self._costs.residency_after(task.cost_class, worker)
        expected_end = self._demand.at + queued.seconds + (extra_seconds or 0.0)
        self._worker_table.run_started(worker, task.name, assumed, expected_end, decodes=queued.decodes)
        # whether a revoked task runs is not known, and one without its inputs does not: nothing can be sent
        worker.is_barred = queued.is_revoked or bool(task.follows)
        if was_barred and not worker.is_barred:  # else none was asked back
            worker.is_barred = any(other.is_revoked for other in worker.queue)
        self._prefetch_planner.run_started(worker)
        decision = PlacementDecision(task, worker, queued.seconds, queued.why)
        self._preload_planner.run_started(worker, task.cost_class, decision)

    def _queue(self, decision: PlacementDecision, calls: Calls) -> None:
        """Send the task to a busy worker, which starts it after its run and the queued tasks that it has."""
        task, worker = decision.task, decision.worker
        ready_at = task.ready_at
        joins = calls.join(worker, task, decision.seconds)
        if task.status is TaskStatus.BLOCKED:
            task.follows = tuple([need for need in task.spec.needs if need not in self._demand.results.held])
        else:
            self._leave_backlog(task, worker)
        self._give(task, worker)
        before = worker.queue[-1].task_id if worker.queue else worker.task_id
        self._story.move(task, TaskStatus.QUEUED, f"queued on {worker.worker_id}, after {before}")
        self._demand.fair_queue.start(task)
        decodes = _decodes_with(task.spec, worker)
        reads_decoded = any(self._demand.tasks[need].spec.stage is Stage.DECODE for need in task.follows)
        overlaps = worker.overlaps_decode and not reads_decoded
        queued = QueuedTask(task.name, decision.seconds, decision.why, ready_at, joins, decodes, overlaps)
        self._worker_table.queue(worker, queued)
        self._out.append(
            RunTask(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                task_id=task.name,
                attempt=task.attempt,
                why=decision.why,
                oom_steps=task.oom_steps,
                resume=task.kept is not None,
                queued=True,
                link=RunLink.CALL if joins else RunLink.NONE,
                follows=task.follows,
                provisional=bool(task.origins),
            )
        )

    def _query(self) -> PlacementQuery:
        workers = self._worker_table.worker_index
        account = self.switch_budget
        seconds = account.allowed_seconds(self._demand.at)
        backlog, config = self._demand.backlog, self._config
        return PlacementQuery(
            self._demand.at, backlog, workers, self._costs, config, seconds, account.wait_factor, account.seconds
        )

    def _start_pinned(self) -> None:
        """Start tasks that wait for one worker each, if it is idle; restart its process first if needed."""
        for worker in self._worker_table.usable(WorkerState.IDLE):
            task = self._first_pinned(worker)
            if task is None or not self._demand.fair_queue.may_start(task):
                continue
            if task.recycle_first:
                task.recycle_first, task.next_oom_step = False, None
                task.oom_steps += (OomStep.RECYCLE,)
                self._worker_table.recycle(worker, f"recycled for {task.name}")
                self._membership.update_capacities()
                continue
            before = "ran out of memory" if task.memory_failures else "crashed a worker"
            self._start(
                make_decision(
                    self._query(), task, worker, PlacementRule.PINNED, f"it {before} before, and waited for this worker"
                )
            )

    def _first_pinned(self, worker: Worker) -> Task | None:
        """Return the first task that waits for this worker alone and can run there. Those before it that cannot no
        longer wait for it."""
        while (task := self._demand.pinned.first(worker.worker_id)) is not None:
            can_run = self._costs.extra_seconds(task.spec, task.cost_class, worker) is not None and 1 in task.degrees
            if can_run or not self._demand.fair_queue.may_start(task):
                return task
            self._story.note(task, f"no longer waits for {worker.worker_id}, which cannot run it now")
            self._demand.unpin(task)
        return None

    def _schedule_tick(self) -> None:
        """Ready tasks wait for busy workers while others are idle: check again when one should be free."""
        waits = []
        for end, _, worker in self._worker_table.worker_index.busy:
            waits.append(worker.wait_seconds(self._demand.at) or 0.0)
            if end >= self._demand.at:
                break  # the others are free later
        if not waits:
            return  # no task waits for a run of unknown length: the ready ones fit on no idle worker
        self._ticks.request(min(waits), self._demand.at)

    def _start(self, decision: PlacementDecision) -> None:
        """Send the task and assume the residency after its load; the report confirms or corrects it."""
        task, worker, spec = decision.task, decision.worker, decision.task.spec
        assert worker.residency is not None, f"{worker.name} is not up"
        if decision.others:
            self._start_gang(decision)
            return
        task.degree, task.resume_degree = 1, 0
        wanted = self._batching.batch_mates(self._query(), decision) if self._batching.limit_of(spec) > 1 else ()
        if task.pinned_to is None:
            self._leave_backlog(task, worker)
            self.switch_budget.spend(decision.spent_seconds)
        else:
            self._demand.pinned.remove(task)
            task.pinned_to = None
            if task.next_oom_step is not None:
                task.oom_steps += (task.next_oom_step,)
                task.next_oom_step = None
        self._assign(task, decision)
        batch_mates = [batch_mate for batch_mate in wanted if self._join_batch(batch_mate, decision)] if wanted else []
        # weights without an available file could not be loaded again
        fresh = bool(task.memory_failures) and not self._costs.nodes.are_missing(
            task.cost_class.files, worker.spec, self._demand.at
        )
        if fresh:
            worker.update_residency(Residency(worker.residency.capacity_bytes))
        needed = hint(task, worker, self._costs, self._demand, self._worker_table.worker_index)
        pins = self._pinned_loads.replicas
        if pins and self._costs.makes_room(task.cost_class, worker):
            needed = with_pins(needed, worker, pins, self._worker_table.worker_index)
        self._costs.run_started(task.cost_class, worker)
        assumed = self._costs.residency_after(task.cost_class, worker, EvictionHints(needed) if needed else NO_HINTS)
        expected_end = self._demand.at + decision.seconds if task.cost_class.kind.ratio is not None else None
        if batch_mates and expected_end is not None:
            together_seconds = self._costs.batch_seconds(spec, task.cost_class, worker, 1 + len(batch_mates))
            expected_end += together_seconds - self._costs.resident_seconds(spec, task.cost_class, worker)
        mates = tuple([batch_mate.name for batch_mate in batch_mates])
        decodes = None if mates else _decodes_with(spec, worker)
        may_open = spec.pass_key and len(mates) + 1 < spec.batch_size and not fresh and may_share(task)
        open_for = spec if may_open and self._config.joins else None
        self._worker_table.run_started(worker, spec.task_id, assumed, expected_end, mates, decodes, open_for)
        self._out.append(
            RunTask(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                task_id=spec.task_id,
                attempt=task.attempt,
                why=decision.why,
                needed_next=needed,
                fresh=fresh,
                oom_steps=task.oom_steps,
                batch_mates=tuple([BatchMate(batch_mate.name, batch_mate.attempt) for batch_mate in batch_mates])
                if batch_mates
                else (),
                resume=task.kept is not None,
                provisional=bool(task.origins),
                link=RunLink.NONE if open_for is None else RunLink.OPEN,
            )
        )
        self._prefetch_planner.run_started(worker)
        self._preload_planner.run_started(worker, task.cost_class, decision)

    def _join_ready(self) -> None:
        if self._demand.backlog.count:
            self._joins.join_ready(self._query)

    def _join(self, decision: PlacementDecision, passes_over: bool) -> None:
        """Send a task to the worker, which runs a pass that it joins."""
        if passes_over:
            self._leave_backlog(decision.task, decision.worker)
        else:
            self._demand.backlog.remove(decision.task)
        self._assign(decision.task, decision)

    def _start_gang(self, decision: PlacementDecision) -> None:
        """Send the task to all workers that share its run."""
        task = decision.task
        self._leave_backlog(task, decision.worker)
        self.switch_budget.spend(decision.spent_seconds)
        self._assign(task, decision)
        assert self.gang_starts is not None, "the core shares runs"
        workers = (decision.worker, *decision.others)
        index, pins = self._worker_table.worker_index, self._pinned_loads.replicas
        needed = [hint(task, worker, self._costs, self._demand, index) for worker in workers]
        if pins:
            needed = [with_pins(of_one, worker, pins, index) for of_one, worker in zip(needed, workers, strict=True)]
        self.gang_starts.gangs.start(decision, needed)

    def _leave_backlog(self, task: Task, worker: Worker) -> None:
        """Take a task that goes to the worker out of the backlog."""
        workers = float(self._worker_table.worker_index.count)
        if worker.spec is not None and worker.spec.node in self._worker_table.worker_index.restricted:
            workers = inf  # what it passes over may be what this machine cannot run: that does not count
        elif worker.held_for is not None:
            workers = inf  # nor what would take longer than this worker may
        self._demand.backlog.start(task, worker.capacity_bytes or 0, workers, self._config.overtaking_limit)

    def _assign(self, task: Task, decision: PlacementDecision) -> None:
        """A task that waits nowhere any more is assigned to the worker."""
        self._give(task, decision.worker)
        self._story.move(task, TaskStatus.RUNNING, self._task_start(task, decision.worker, decision.why))
        self._demand.fair_queue.start(task)

    def _give(self, task: Task, worker: Worker) -> None:
        """The worker has the task from now on, for another attempt."""
        if task.is_for_pass:
            task.goes_first = False
        task.attempt += 1
        task.queue_seconds = task.waited_seconds(self._demand.at)
        task.ready_at = None
        task.cancel_requested_at = task.pause_requested_at = None
        task.is_refuted = False
        task.origins = self._demand.results.origins_of(task.spec.needs)
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        task.cost_class.on_workers += 1
        task.started_at = self._demand.at

    def _task_start(self, task: Task, worker: Worker, why: Why) -> TaskStart:
        node = NO_NODE if worker.spec is None else worker.spec.node
        return TaskStart(worker.worker_id, worker.incarnation, task.attempt, why, node)

    def _join_batch(self, batch_mate: Task, decision: PlacementDecision) -> bool:
        """Add a task to the batch of the chosen one, unless its user is at the limit by now."""
        if batch_mate.held_back or not self._demand.fair_queue.may_start(batch_mate):
            return False
        self._demand.backlog.remove(batch_mate)
        self._story.note(batch_mate, f"runs with {decision.task.name}")
        self._assign(batch_mate, decision)
        return True


def _decodes_with(spec: TaskSpec, worker: Worker) -> ComponentKey | None:
    """Return the weights with which a task decodes, if the worker may begin the next tasks meanwhile."""
    overlaps = worker.overlaps_decode and spec.stage is Stage.DECODE and spec.uses
    return spec.uses[0].component if overlaps else None
