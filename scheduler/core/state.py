"""The scheduler core: events in, commands out. No clock, no I/O, no randomness, no torch, no ray.

`SchedulerState.handle(event) -> list[Command]` is the only entry point; nothing else changes the state. It never raises
because of the content of an event (a malformed job is resolved as failed, outdated messages are dropped); an
AssertionError is a bug.

Commands, which the shell carries out in the order of the list:

    StartWorker    after `delay_seconds` start the worker; answer with one WorkerUp or StartFailed of that incarnation
    EndWorker      end that incarnation if it still exists; no answer is expected, later messages from it are dropped.
                   It may be running a task (one that hangs): that run is given up with it
    RunTask        send the task with its inputs, all of which the shell holds; answer with one RunEnded, or WorkerDown.
                   Queued ones start when the run of their worker has ended, one after the other, without another
                   command. RunEnded comes in that order; it may be late for those that join others
    RevokeTask     take a queued task back; answer with one TaskRevoked, unless it has started
    StopTask       ask the run to stop at its next step; its RunEnded (usually CANCELLED) still follows. If the run has
                   ended already, do nothing. With keep_state its result may be the state of the run
    Prefetch       have the worker's machine read the files of these components; no answer, and none of it is required
    Preload        have the worker upload the tasks' weights during its current run; likewise
    LoadWeights    load pinned weights on an idle worker; answer with one WeightsLoaded, or WorkerDown. A RunTask sent
                   there, or EndWorker, ends it
    DropWeights    take all weights off the GPU when its run has ended; no answer
    CopyResult     copy the result, or the state of that id, to a machine that stays; ResultLost if that is impossible
    ReleaseResult  forget the result, of a run or provided; ids that the shell does not hold are ignored
    ResolveJob     inform the driver. `result` is handed over now: its ReleaseResult may be the next command
    ScheduleTick   answer with one Tick after that time

Events, which the shell feeds one at a time, from one thread, with `at` never falling:

    Submitted        before it, hold the `given` results under their ids. Ids of live and recently ended jobs are
                     ignored
    CancelRequested  ends in ResolveJob(CANCELLED), at once or when the run has ended; ignored for unknown and ended
                     jobs
    WorkersWanted    the complete list each time. A worker that was given up gets another chance when it is left out
                     and then named again
    WorkerUp         residency starts empty, except for a worker of an earlier controller, which is idle and has what
                     its residency lists; sizes of these components may be unknown. For a live worker it counts as its
                     loss
    WorkerDown       once, for any reason why a live incarnation is gone; not after EndWorker. RunEnded of its task may
                     come late and is dropped
    NodeDraining     at any time, also for machines without workers, and again when the deadline changes
    Cordoned         likewise, and for workers; Uncordoned and RestartRequested also for unknown ones
    DisruptionsAllowed  when that changes; until the first, they are
    RunEnded         before it, hold the result of a successful run under the task's id; the core keeps or releases it.
                     One with WORKER_LOST means that the worker is lost: the core ends it; no WorkerDown need follow.
                     Before one with a state, hold the state under its id (`state_id`), in place of an earlier one
    TaskRevoked      answers a RevokeTask, at once; it may come after the RunEnded of the run before. Or says, after
                     that, that a queued task does not start, as what it `follows` has not succeeded
    StateKept        before it, hold the state likewise, in a place that outlives the worker
    FilesJudged      for a live worker. Results that were made with a file that is not the expected one are computed
                     again, and what its machine holds of it is not used any more
    WeightsLoaded    also if the load was ended early; dropped if its worker is gone
    Remembered       at most once, soon after the start
    PoolEnding       once; RunEnded of what runs still follows
    Tick             answers a ScheduleTick, one each; nothing else has happened
    ResultLost       the shell no longer holds the result: forget it; no ReleaseResult follows for this copy

The inputs, payload and wanted sizes of a task are needed while a job that names it is not resolved; equal task ids of
several jobs are one task and run once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from math import inf

from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    ComponentKey,
    FileVerdict,
    JobId,
    NodeId,
    OomStep,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
from modelpool.scheduler.core.leaving import Leaving
from modelpool.scheduler.core.maintenance import Maintenance
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.core.remembering import remember
from modelpool.scheduler.core.send_ahead import Calls, SendAhead, soonest_free
from modelpool.scheduler.core.snapshot import Snapshot, take_snapshot
from modelpool.scheduler.core.timeouts import Timeouts
from modelpool.scheduler.core.unavailable import why_unavailable
from modelpool.scheduler.core.unfit import why_unfit
from modelpool.scheduler.core.wakeups import Ticks
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.batching import Batching
from modelpool.scheduler.decisions.placement.eviction_hints import hint, with_pins
from modelpool.scheduler.decisions.placement.pinned_loads import PinnedLoads
from modelpool.scheduler.decisions.placement.prefetch import PrefetchPlanner
from modelpool.scheduler.decisions.placement.preload import PreloadPlanner
from modelpool.scheduler.decisions.placement.registry import PLACEMENTS
from modelpool.scheduler.decisions.placement.rules import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.placement.switch_budget import SwitchBudget
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cordons import unavailable
from modelpool.scheduler.model.file_verdicts import FileVerdicts, Origin, Origins
from modelpool.scheduler.model.jobs import Task, TaskStatus
from modelpool.scheduler.model.kept_states import KeptState, kept_state, state_id
from modelpool.scheduler.model.messages import (
    BatchMate,
    CancelRequested,
    Command,
    ComponentsKnown,
    Cordoned,
    DisruptionsAllowed,
    DropWeights,
    EndWorker,
    Event,
    FilesJudged,
    LossCause,
    NodeDraining,
    PinComponents,
    PoolEnding,
    PruneComponents,
    ReleaseResult,
    Remembered,
    RestartRequested,
    ResultLost,
    RunEnded,
    RunTask,
    StartFailed,
    StateKept,
    StopTask,
    Submitted,
    TaskRevoked,
    Tick,
    Uncordoned,
    WeightsLoaded,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.model.nodes import UNAVAILABLE_SECONDS
from modelpool.scheduler.model.placement_record import PlacementRule, TaskStart, Why
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.story_lines import StoryLine
from modelpool.scheduler.model.workers import QueuedTask, Worker, WorkerState, WorkerTable

#: drain notices that are remembered, for workers that start on such a machine
MOST_DRAINING = 4096
#: time after its deadline at which a notice is forgotten: if the machine still runs, it was not drained
DRAINED_SECONDS = 120.0


class SchedulerState:
    """The complete state of the scheduler. Changed only by `handle`; attributes are for reading."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self._out: list[Command] = []
        self._placement = PLACEMENTS[self.config.placement]
        #: the latest `at` of an event
        self.at = 0.0
        self.log = Story(self.config.story_length)
        self.costs = Costs(self.config.patch_switch_seconds)
        self.worker_table = WorkerTable(self.config, self.log, self._out)
        self.demand = Demand(
            self.config, self.log, self.costs, self._out, self.why_unfit, lambda s: self.recovery.refusal(s, self.at)
        )
        self.recovery = Recovery(self.config, self.log, self.worker_table, self.demand)
        self.timeouts = Timeouts(self.config, self.log, self.worker_table, self.demand, self._out)
        self.prefetch_planner = PrefetchPlanner(self.costs, self.demand, self.worker_table.worker_index, self._out)
        self.preload_planner = PreloadPlanner(
            self.config, self.costs, self.demand, self.worker_table, self.log, self._out
        )
        self.preemption = Preemption(self.config, self.costs, self.log, self.worker_table, self.demand, self._out)
        self.batching = Batching(self.config.batch_limit)
        self.send_ahead = SendAhead(
            self.config, self.costs, self.batching, self.log, self.worker_table, self.demand, self._out
        )
        self.leaving = Leaving(self.costs, self.worker_table, self.demand, self.preemption, self._out)
        #: most memory of a wanted worker, and its name; None while one of them was never up
        self.largest: tuple[int, str] | None = None
        #: for loads that serve long-waiting tasks
        self.switch_budget = SwitchBudget(self.config.switch_share)
        self.ticks = Ticks(self._out)
        #: what workers have found out about the files that they use
        self.verdicts = FileVerdicts()
        #: machines with a drain notice, and when they end; the oldest notices are forgotten
        self.draining: dict[NodeId, float] = {}
        #: when the pool ends; None while it is to continue. From the notice on, nothing starts
        self.ends_at: float | None = None
        #: what operators request: cordons, drains, restarts
        self.maintenance = Maintenance(
            self.worker_table, self.leaving, self.preemption, self.log, self.verdicts.pending
        )
        #: the sets of components that must stay resident
        self.pinned_loads = PinnedLoads(self.costs, self.worker_table, self.log, self._out)
        #: decides how many nodes exist; None without groups
        self.autoscaler: Autoscaler | None = None
        if self.config.groups:
            self.autoscaler = Autoscaler(
                self.config,
                self.worker_table,
                self.demand,
                self.costs,
                self.pinned_loads.replicas,
                self.draining,
                self.verdicts.pending,
            )
        if self.autoscaler is not None:
            self.largest = self.autoscaler.largest()
        #: memory that all waiting tasks were checked against; None if that was not possible
        self._checked_bytes: int | None = None

    def handle(self, event: Event) -> list[Command]:
        """Apply the event; return the commands, in order."""
        self.at = self.demand.at = self.demand.backlog.at = self.costs.at = max(self.at, event.at)
        self.switch_budget.pass_time(
            self.at, self.worker_table.worker_index.count, self.worker_table.worker_index.idle_count
        )
        self.log.begin(event, self.at)
        self._apply(event)
        self._decide(event)
        self._request_ticks(event)
        while self.verdicts.pending and self._refute_lost_workers():  # which the steps above have ended
            self.demand.fair_queue.settle(self.at)
            if self.ends_at is None:
                self._start_ready_tasks()
        self._out += [ReleaseResult(task_id) for task_id in self.demand.results.sweep()]
        commands = self._out.copy()
        self._out.clear()
        return commands

    def _apply(self, event: Event) -> None:
        """Take what has happened into the tables."""
        match event:
            case RunEnded():
                self._run_ended(event)
            case TaskRevoked():
                self._task_revoked(event)
            case Submitted():
                if self.costs.nodes.lacking:
                    for node in self.costs.nodes.try_again(self.at):
                        self._update_restriction(node)
                submitted_at = self.at if event.submitted_at is None else min(event.submitted_at, self.at)
                self.demand.submit(event.job, self._hopeless(), submitted_at)
            case CancelRequested():
                self.demand.cancel(event.job_id)
            case StateKept():
                self._state_kept(event)
            case FilesJudged():
                self._files_judged(event)
            case ResultLost():
                self.demand.result_lost(event.task_id)
            case ComponentsKnown():
                self.costs.know(event.components)
                self.pinned_loads.sizes_changed()
            case PruneComponents():
                held = (key for worker in self.worker_table.workers.values() for key in worker.entries)
                self.costs.prune((*held, *self.pinned_loads.replicas))
            case WorkersWanted():
                self.worker_table.want(event.worker_ids)
                self._workers_changed()
            case NodeDraining():
                self._node_draining(event)
            case Cordoned():
                self.maintenance.cordon(event, self.at)
                self._workers_changed()
            case Uncordoned():
                self.maintenance.uncordon(event)
                self._workers_changed()
            case RestartRequested():
                self.maintenance.restart(event)
                self._workers_changed()
            case DisruptionsAllowed():
                self.worker_table.cordons.obstacle = event.obstacle
            case WorkerUp():
                if self.autoscaler is not None:
                    self.autoscaler.came_up(event.worker, self.at, is_new=event.residency is None)
                deadline = self.draining.get(event.worker.node)
                lost = self.worker_table.up(event.worker, self.at, deadline, event.residency)
                if self.costs.nodes.lacking and (machine := self.costs.nodes.of(event.worker)) is not None:
                    machine.forget_differing(self.at)  # it watches no file yet
                if event.worker.cached_files:
                    self.costs.worker_up(event.worker)
                for past in event.past_runs:
                    self.costs.learn_past(past, event.worker)
                message = f"worker {event.worker.worker_id} restarted"
                self._workers_changed(lost, RunError(RunErrorKind.WORKER_LOST, message))
            case WorkerDown():
                self._worker_down(event)
            case StartFailed():
                self._start_failed(event)
            case PinComponents():
                self.pinned_loads.pin(event.components, event.replicas)
            case WeightsLoaded():
                self._weights_loaded(event)
            case Remembered():
                remember(self, event.memory, event.gap_seconds)
                if event.memory.cordons:
                    self._workers_changed()
            case PoolEnding():
                self.ends_at = event.deadline
            case Tick():
                self.ticks.arrived()
                self._end_hanging_runs()
                if self.draining:
                    self._end_drained()

    def _decide(self, event: Event) -> None:
        """Decide what follows: nodes, runs, preemption, tasks sent ahead, and loads."""
        if self.verdicts.pending:
            self._refute_lost_workers()
        if self.autoscaler is not None and self.ends_at is None:
            self._scale(self.autoscaler, event)
        if self.worker_table.cordons:
            self._maintain(event)
        self.demand.fair_queue.settle(self.at)
        if self.ends_at is None:
            if not self._is_reported_in_parts(event):
                self._start_ready_tasks()
            if self.config.preemption:
                self.preemption.preempt(self.at)
        else:
            self.leaving.stop_what_outlasts(self.ends_at, self.at)
        if self.send_ahead.seconds:
            self._plan_ahead()
        if self.draining:
            self._leave_drained(event)
        if self.ends_at is None:
            if isinstance(event, Submitted):
                self.prefetch_planner.job_came()
            self.preload_planner.plan_all(isinstance(event, Submitted))
            if self.pinned_loads.sets and (load_at := self.pinned_loads.plan(self.at)) < inf:
                self.ticks.request(load_at - self.at, self.at)

    def _request_ticks(self, event: Event) -> None:
        """Request the next looks at what time alone changes."""
        if (next_check := self.demand.fair_queue.next_check) < inf:
            self.ticks.request(next_check - self.at, self.at)
        if (overdue := self.timeouts.watch(self.at, isinstance(event, Tick))) < inf:
            self.ticks.request(overdue - self.at, self.at)
        if self.autoscaler is not None and self.autoscaler.next_at < inf and self.ends_at is None:
            self.ticks.request(self.autoscaler.next_at - self.at, self.at)

    def unavailable_nodes(self) -> set[NodeId]:
        """Return the machines that are drained, end, or are given up."""
        return unavailable(self.worker_table.cordons, self.worker_table.workers.values(), self.draining)

    def snapshot(self) -> Snapshot:
        """Return counts, queues and residency as a frozen value, for users."""
        return take_snapshot(self)

    def story(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """Return the kept story lines of the job, oldest first: its transitions, its tasks', and the events behind
        them."""
        return self.log.of_job(job_id)

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _start_ready_tasks(self) -> None:
        backlog = self.demand.backlog
        if len(self.demand.pinned):
            self._start_pinned()
            if (pinned_until := self.recovery.time_passed(self.at)) < inf:
                self.ticks.request(pinned_until - self.at, self.at)
            self.demand.fair_queue.settle(
                self.at
            )  # released tasks may start now, or may be held back by their user's limit
        workers = self.worker_table.worker_index
        while workers.idle_count and backlog.count:
            query = self._query()
            decision = self._placement(query)
            if decision is None:
                self._schedule_tick()
                return
            if query.switch_seconds > 0.0 and decision.spent_seconds == 0.0:
                self.switch_budget.nothing_due(self.at)
            self._start(decision)

    def _is_reported_in_parts(self, event: Event) -> bool:
        """Whether this is the end of one task of a batch that has succeeded: those of the others follow at once. What
        they lead to can then share runs, and starts with the last of them."""
        if self.batching.limit == 1 or not isinstance(event, RunEnded) or event.report.error is not None:
            return False
        worker = self.worker_table.current(event.report.worker_id, event.report.incarnation)
        return worker is not None and worker.task_id is not None and len(worker.task_ids) < worker.members

    def _plan_ahead(self) -> None:
        """Ask queued tasks back that should not start where they are, and send workers whose run ends soon the task
        that placement would start there then."""
        check_at = self.send_ahead.revoke_outdated(self.at, self.ends_at is not None)
        if self.ends_at is None:
            candidates, calls = self.send_ahead.candidates(self.at), Calls(self.send_ahead.seconds)
            while candidates and self.demand.backlog.count:
                worker = soonest_free(candidates)
                self.worker_table.pretend_idle(worker)
                decision = self._placement(self._query())
                self.worker_table.stop_pretending(worker)
                if decision is None or not self.send_ahead.accepts(decision, worker):
                    candidates.remove(worker)
                    continue
                self._queue(decision, calls)
                if not self.send_ahead.has_room(worker, self.at):
                    candidates.remove(worker)
            while (follower := self.send_ahead.follower(self.at)) is not None:
                task, worker = follower
                note = "its input is computed there"
                self._queue(make_decision(self._query(), task, worker, PlacementRule.RESIDENT, note), calls)
            check_at = min(check_at, self.send_ahead.next_at(self.at))
        if check_at < inf:
            self.ticks.request(check_at - self.at, self.at)

    def _queue(self, decision: PlacementDecision, calls: Calls) -> None:
        """Send the task to a busy worker, which starts it after its run and the queued tasks that it has."""
        task, worker = decision.task, decision.worker
        ready_at = task.ready_at
        joins = calls.join(worker, task, decision.seconds)
        if task.status is TaskStatus.BLOCKED:
            task.follows = tuple([need for need in task.spec.needs if need not in self.demand.results.held])
        else:
            self._leave_backlog(task, worker)
        self._give(task, worker)
        before = worker.queue[-1].task_id if worker.queue else worker.task_id
        self.log.move(task, TaskStatus.QUEUED, f"queued on {worker.worker_id}, after {before}")
        self.demand.fair_queue.start(task)
        decodes = _decodes_with(task.spec, worker)
        reads_decoded = any(self.demand.tasks[need].spec.stage is Stage.DECODE for need in task.follows)
        overlaps = worker.overlaps_decode and not reads_decoded
        queued = QueuedTask(task.name, decision.seconds, decision.why, ready_at, joins, decodes, overlaps)
        self.worker_table.queue(worker, queued)
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
                joins=joins,
                follows=task.follows,
                provisional=bool(task.origins),
            )
        )

    def _start_queued(self, worker: Worker) -> None:
        """The run of the worker has ended: it has started its next queued task, unless that is revoked."""
        queued = self.worker_table.unqueue(worker)
        task = self.demand.tasks[queued.task_id]
        start = self._task_start(task, worker, queued.why)
        if task.follows:  # a task in front of it has failed, or was revoked
            self.log.note(task, f"will not start on {worker.worker_id}, without {', '.join(task.follows)}")
        if task.status is TaskStatus.QUEUED:
            self.log.move(task, TaskStatus.RUNNING, start)
        else:  # it was asked back, perhaps too late
            self.log.note(task, start)
            self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        if task.is_refuted and task.status is TaskStatus.RUNNING:
            self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))
        task.started_at = self.at
        worker.residency_before = worker.residency
        assert worker.residency is not None, f"{worker.name} is not up"
        extra_seconds = self.costs.extra_seconds(task.spec, task.cost_class, worker)
        self.costs.run_started(task.cost_class, worker)
        assumed = worker.residency
        if self.costs.load_estimate(task.cost_class, worker) is not None:  # else it will run out of memory
            assumed = self.costs.residency_after(task.cost_class, worker)
        expected_end = self.at + queued.seconds + (extra_seconds or 0.0)
        self.worker_table.run_started(worker, task.name, assumed, expected_end, decodes=queued.decodes)
        # whether a revoked task runs is not known, and one without its inputs does not: nothing can be sent
        worker.is_barred = queued.is_revoked or bool(task.follows) or any(other.is_revoked for other in worker.queue)
        self.prefetch_planner.run_started(worker)
        decision = PlacementDecision(task, worker, queued.seconds, queued.why)
        self.preload_planner.run_started(worker, task.cost_class, decision)

    def _task_revoked(self, event: TaskRevoked) -> None:
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        task = self.demand.tasks.get(event.task_id)
        if worker is None or task is None or task.attempt != event.attempt or task.worker_id != worker.worker_id:
            return
        note = f"revoked on {worker.worker_id}"
        queued = self.worker_table.unqueue_revoked(worker, task.name)
        if queued is not None:
            self.recovery.came_back(task, queued.ready_at, note)
        elif worker.task_id == task.name:  # the run before it ended meanwhile
            self.costs.run_failed(worker)
            self.worker_table.run_revoked(worker, self.at)
            if worker.queue:
                if worker.queue[0].joins:  # it is the first of that call now
                    worker.queue[0].joins = False
                self._start_queued(worker)
            if not worker.wanted:
                self._update_capacities()
            self.recovery.came_back(task, None, note)
            if not worker.wanted:
                self._recheck_waiting()

    def _query(self) -> PlacementQuery:
        workers = self.worker_table.worker_index
        account = self.switch_budget
        seconds = account.allowed_seconds(self.at)
        backlog, config = self.demand.backlog, self.config
        return PlacementQuery(
            self.at, backlog, workers, self.costs, config, seconds, account.wait_factor, account.seconds
        )

    def _start_pinned(self) -> None:
        """Start tasks that wait for one worker each, if it is idle; restart its process first if needed."""
        for worker in self.worker_table.usable(WorkerState.IDLE):
            task = self._first_pinned(worker)
            if task is None or not self.demand.fair_queue.may_start(task):
                continue
            if task.recycle_first:
                task.recycle_first, task.next_oom_step = False, None
                task.oom_steps += (OomStep.RECYCLE,)
                self.worker_table.recycle(worker, f"recycled for {task.name}")
                self._update_capacities()
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
        while (task := self.demand.pinned.first(worker.worker_id)) is not None:
            can_run = self.costs.extra_seconds(task.spec, task.cost_class, worker) is not None
            if can_run or not self.demand.fair_queue.may_start(task):
                return task
            self.log.note(task, f"no longer waits for {worker.worker_id}, which cannot run it now")
            self.demand.unpin(task)
        return None

    def _schedule_tick(self) -> None:
        """Ready tasks wait for busy workers while others are idle: check again when one should be free."""
        waits = []
        for end, _, worker in self.worker_table.worker_index.busy:
            waits.append(worker.wait_seconds(self.at) or 0.0)
            if end >= self.at:
                break  # the others are free later
        if not waits:
            return  # no task waits for a run of unknown length: the ready ones fit on no idle worker
        self.ticks.request(min(waits), self.at)

    def _start(self, decision: PlacementDecision) -> None:
        """Send the task and assume the residency after its load; the report confirms or corrects it."""
        task, worker, spec = decision.task, decision.worker, decision.task.spec
        assert worker.residency is not None, f"{worker.name} is not up"
        wanted = self.batching.batch_mates(self._query(), decision) if self.batching.limit > 1 else ()
        if task.pinned_to is None:
            self._leave_backlog(task, worker)
            self.switch_budget.spend(decision.spent_seconds)
        else:
            self.demand.pinned.remove(task)
            task.pinned_to = None
            if task.next_oom_step is not None:
                task.oom_steps += (task.next_oom_step,)
                task.next_oom_step = None
        self._assign(task, decision)
        batch_mates = [batch_mate for batch_mate in wanted if self._join_batch(batch_mate, decision)] if wanted else []
        # weights whose files are unavailable could not be loaded again
        fresh = bool(task.memory_failures) and not self._lacks_files(task, worker)
        if fresh:
            worker.update_residency(Residency(worker.residency.capacity_bytes))
        needed = hint(task, worker, self.costs, self.demand, self.worker_table.worker_index)
        pins = self.pinned_loads.replicas
        if pins and self.costs.makes_room(task.cost_class, worker):
            needed = with_pins(needed, worker, pins, self.worker_table.worker_index)
        self.costs.run_started(task.cost_class, worker)
        assumed = self.costs.residency_after(task.cost_class, worker, EvictionHints(needed) if needed else NO_HINTS)
        expected_end = self.at + decision.seconds if task.cost_class.kind.ratio is not None else None
        if batch_mates and expected_end is not None:
            together_seconds = self.costs.batch_seconds(spec, task.cost_class, worker, 1 + len(batch_mates))
            expected_end += together_seconds - self.costs.resident_seconds(spec, task.cost_class, worker)
        mates = tuple([batch_mate.name for batch_mate in batch_mates])
        decodes = None if mates else _decodes_with(spec, worker)
        self.worker_table.run_started(worker, spec.task_id, assumed, expected_end, mates, decodes)
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
            )
        )
        self.prefetch_planner.run_started(worker)
        self.preload_planner.run_started(worker, task.cost_class, decision)

    def _lacks_files(self, task: Task, worker: Worker) -> bool:
        """Whether a file that the task uses is unavailable on the machine of `worker`."""
        node = self.costs.nodes.of(worker.spec) if self.costs.nodes.lacking else None
        return node is not None and node.unavailable_of(task.cost_class.files, self.at) is not None

    def _leave_backlog(self, task: Task, worker: Worker) -> None:
        """Take a task that goes to the worker out of the backlog."""
        workers = float(self.worker_table.worker_index.count)
        if worker.spec is not None and worker.spec.node in self.worker_table.worker_index.restricted:
            workers = inf  # what it passes over may be what this machine cannot run: that does not count
        self.demand.backlog.start(task, worker.capacity_bytes or 0, workers, self.config.overtaking_limit)

    def _assign(self, task: Task, decision: PlacementDecision) -> None:
        """A task that waits nowhere any more is assigned to the worker."""
        self._give(task, decision.worker)
        self.log.move(task, TaskStatus.RUNNING, self._task_start(task, decision.worker, decision.why))
        self.demand.fair_queue.start(task)

    def _give(self, task: Task, worker: Worker) -> None:
        """The worker has the task from now on, for another attempt."""
        task.attempt += 1
        task.queue_seconds = task.waited_seconds(self.at)
        task.ready_at = None
        task.cancel_requested_at = task.pause_requested_at = None
        task.is_refuted = False
        task.origins = self.demand.results.origins_of(task.spec.needs)
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        task.cost_class.on_workers += 1
        task.started_at = self.at

    def _task_start(self, task: Task, worker: Worker, why: Why) -> TaskStart:
        node = NO_NODE if worker.spec is None else worker.spec.node
        return TaskStart(worker.worker_id, worker.incarnation, task.attempt, why, node)

    def _join_batch(self, batch_mate: Task, decision: PlacementDecision) -> bool:
        """Add a task to the batch of the chosen one, unless its user is at the limit by now."""
        if batch_mate.held_back or not self.demand.fair_queue.may_start(batch_mate):
            return False
        self.demand.backlog.remove(batch_mate)
        self.log.note(batch_mate, f"runs with {decision.task.name}")
        self._assign(batch_mate, decision)
        return True

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.worker_table.current(report.worker_id, report.incarnation)
        task_id = report.task_id
        task = self.demand.tasks.get(task_id)
        is_there = worker is not None and (task_id == worker.task_id or task_id in worker.batch_mates)
        if worker is None or task is None or not is_there or task.attempt != report.attempt:
            if report.error is None:
                self.demand.results.stray(task_id)  # the run was given up; its result arrived all the same
            elif report.has_state:
                self._stray_state(task_id, task)
            return
        if report.error is not None and report.error.kind is RunErrorKind.WORKER_LOST:
            # the worker reports its own end, and that none of them has started, except behind a decode: errors of the
            # device come late
            for queued in worker.queue:
                queued.joins = False
            self._end_lost_worker(worker, report.error)
            return
        inputs = (task.origins, self.demand.results.origins_of(task.spec.needs))
        origins = self.verdicts.origins_of(report, inputs)
        counts = origins is not None and not task.is_refuted
        if report.error is None and counts:
            self._learn(task, worker, report)
            self.recovery.ended_well(task)
            if self.costs.nodes.lacking and (machine := self.costs.nodes.of(worker.spec)) is not None:
                machine.has_all(task.cost_class.files)
                self._update_restriction(machine.node)
        else:
            self.costs.run_failed(worker)
            if (
                report.error is not None
                and report.error.components
                and (machine := self.costs.nodes.of(worker.spec)) is not None
            ):
                machine.lacks(report.error.components, report.error.message, self.at)
                self._update_restriction(machine.node)
                self.ticks.request(UNAVAILABLE_SECONDS, self.at)
        self.demand.fair_queue.pay(task, report.cost)
        capacity_bytes = worker.capacity_bytes
        self.worker_table.run_ended(worker, report, self.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self._update_capacities()
        node = NO_NODE if worker.spec is None else worker.spec.node
        kept = kept_state(report, node)
        if origins is None or not counts or (origins and kept is not None):
            self._drop_run(task, worker, report)
        elif report.error is None:
            self.demand.task_succeeded(task, report.result_bytes, node, origins)
        elif kept is not None:
            self.recovery.stopped(task, kept)
        else:
            self.recovery.ended_badly(task, report.error, self.at, worker.members > 1)
        if worker.queue and worker.task_id is None:
            self._start_queued(worker)
        if pool_changed or (report.error is not None and report.error.components):
            self._recheck_waiting()

    def _drop_run(self, task: Task, worker: Worker, report: TaskReport) -> None:
        """A run ended that read a file or a result which is not the expected one, or stopped with a state that may be
        made with one: nothing of it counts."""
        if report.error is None:
            self.demand.results.stray(task.name)
        elif report.has_state and task.kept is None:
            self._out.append(ReleaseResult(state_id(task.name)))
        self.recovery.does_not_count(task, f"what {worker.worker_id} made does not count")

    def _files_judged(self, event: FilesJudged) -> None:
        """A worker knows of files whether they are the expected ones."""
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        if worker is None or not worker.live:
            return
        machine = self.costs.nodes.of(worker.spec)
        right, wrong = list[Origin](), list[Origin]()
        differing: dict[ComponentKey, None] = {}
        for file in event.files:
            is_right = file.verdict is FileVerdict.RIGHT
            origin = self.verdicts.note((event.worker_id, event.incarnation), file.state, is_right)
            (right if is_right else wrong).append(origin)
            if machine is not None and is_right:
                machine.is_right(file.components)
            elif file.verdict in (FileVerdict.DIFFERS, FileVerdict.UNREADABLE):
                differing.update(dict.fromkeys(file.components))
                if machine is not None:
                    machine.differs(file)
        if right:
            self.demand.files_right(frozenset(right))
        near = [other for other in self.worker_table.workers.values() if self._shares_files(other, worker)]
        if wrong:
            reason = next(file.reason for file in event.files if file.verdict is not FileVerdict.RIGHT)
            self._refute(frozenset(wrong), near, differing, reason)
        if machine is not None:
            self._update_restriction(machine.node)
            for other in near:
                other.files_changed()
        if wrong:
            for other in near if differing else [worker]:
                self._drop_weights(other)
        if not self.demand.results.origins_from(event.worker_id, event.incarnation):
            self.verdicts.pending.pop((event.worker_id, event.incarnation), None)
        self._recheck_waiting()

    def _shares_files(self, worker: Worker, other: Worker) -> bool:
        """Whether both are up on one machine."""
        if worker is other or worker.spec is None or other.spec is None or not worker.live:
            return worker is other
        return bool(worker.spec.node) and worker.spec.node == other.spec.node

    def _refute(self, wrong: Origins, near: Sequence[Worker], differing: Container[ComponentKey], reason: str) -> None:
        """States of files are not the expected ones: drop the results that were made with them, and stop the runs of
        what read these, and of what uses the `differing` files on the workers `near` them."""
        removed = self.demand.results.made_with(wrong)
        lost = set(removed)
        for worker in self.worker_table.workers.values():
            is_near = worker in near
            queued = {entry.task_id: entry for entry in worker.queue}
            refuted: set[TaskId] = set()
            for task_id in (*worker.task_ids, *queued):
                task = self.demand.tasks[task_id]
                uses = is_near and any(key in differing for key in task.cost_class.files)
                reads = not (lost.isdisjoint(task.spec.needs) and wrong.isdisjoint(task.origins))
                if not uses and not reads and refuted.isdisjoint(task.follows):
                    continue
                refuted.add(task_id)
                if task.is_refuted:
                    continue
                was_asked = task.status is TaskStatus.STOPPING or task.timed_out_at is not None
                task.is_refuted = True
                self.log.note(task, f"does not count: {reason}")
                if task_id in queued:
                    self.send_ahead.ask_back(worker, queued[task_id], "it does not count")
                elif not was_asked:
                    self._out.append(StopTask(worker.worker_id, worker.incarnation, task_id, task.attempt))
        self.demand.remove_results(removed)

    def _refute_lost_workers(self) -> bool:
        """Nobody finds out any more with which files workers that are gone have made results. Returns whether there are
        any such workers."""
        lost = self.verdicts.lost(self._is_live)
        for worker_id, incarnation in lost:
            wrong = self.demand.results.origins_from(worker_id, incarnation)
            if wrong:
                self._refute(wrong, (), (), f"{worker_id} was lost before its files were known")
        return bool(lost)

    def _is_live(self, worker_id: WorkerId, incarnation: int) -> bool:
        worker = self.worker_table.current(worker_id, incarnation)
        return worker is not None and worker.live

    def _drop_weights(self, worker: Worker) -> None:
        """Have a worker take all weights off its GPU: at once if it is idle, else when its run has ended."""
        self._out.append(DropWeights(worker.worker_id, worker.incarnation))
        if worker.is_idle and worker.loading is None and worker.residency is not None:
            self.worker_table.assume(worker, Residency(worker.residency.capacity_bytes))

    def _state_kept(self, event: StateKept) -> None:
        """A run saved its state. It also counts if the run was lost in between: any state of a task will do."""
        task = self.demand.tasks.get(event.task_id)
        kept = KeptState(event.step, event.steps, event.state_bytes)
        if task is None or not 0 < kept.step < kept.steps or task.is_refuted:
            self._stray_state(event.task_id, task)
        else:
            self.demand.set_state(task, kept)
            self.log.note(task, f"its state after step {kept.step} of {kept.steps} is saved")

    def _stray_state(self, task_id: TaskId, task: Task | None) -> None:
        """The shell received a state that no run needs: release it unless a known one of the same id is held."""
        if task is None or task.kept is None:
            self._out.append(ReleaseResult(state_id(task_id)))

    def _learn(self, task: Task, worker: Worker, report: TaskReport) -> None:
        """Learn from a run; for a batch once, with its first report, which has the switches."""
        if report.cost.batched == 1 or len(worker.task_ids) == worker.members:
            spec = task.spec
            if report.cost.steps_before:  # the steps of its cost count: it may have resumed from a state unknown here
                spec = replace(spec, run_seconds=task.full_run_seconds)
            self.costs.learn(spec, task.cost_class, worker, report)
        if worker.members > 1:
            self.batching.learn(task, worker, report.cost)

    def _end_hanging_runs(self) -> None:
        """Ask runs that take too long to stop; end the workers of those that do not stop."""
        for worker, message in self.timeouts.request_stops(self.at):
            self._end_lost_worker(worker, RunError(RunErrorKind.WORKER_LOST, message))

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _scale(self, autoscaler: Autoscaler, event: Event) -> None:
        """Request and give up nodes."""
        if not autoscaler.step(event, self.at):
            return
        expired, autoscaler.expired = autoscaler.expired, []
        for worker in expired:
            error = RunError(RunErrorKind.WORKER_LOST, "max_cost is spent")
            self._end_lost_worker(worker, error, LossCause.KILLED)
        self._workers_changed()

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        """A load of pinned weights ended."""
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        if worker is None or not worker.live:
            return
        error = event.error
        if error is not None and error.components and (machine := self.costs.nodes.of(worker.spec)) is not None:
            machine.lacks(error.components, error.message, self.at)
            self._update_restriction(machine.node)
            self.ticks.request(UNAVAILABLE_SECONDS, self.at)
        capacity_bytes = worker.capacity_bytes
        self.pinned_loads.ended(worker, event, self.at)
        if worker.capacity_bytes != capacity_bytes:
            self._update_capacities()
            self._recheck_waiting()

    def _hopeless(self) -> str | None:
        """Return why no task can ever run; None if one can."""
        return self.worker_table.hopeless() if self.autoscaler is None else self.autoscaler.hopeless()

    def _worker_down(self, event: WorkerDown) -> None:
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status not in (WorkerState.GIVEN_UP, WorkerState.DRAINED):
            cause = event.cause
            if worker.drain_deadline is not None and not cause.is_external:
                cause = LossCause.PREEMPTED  # a machine that is drained ends its processes in many ways
            if self.autoscaler is not None and worker.group:
                self.autoscaler.lost(worker, cause)
            lost = self.worker_table.lost(worker, event.reason, cause)
            message = f"worker {event.worker_id} was lost ({cause.value}): {event.reason}"
            self._workers_changed(lost, RunError(RunErrorKind.WORKER_LOST, message), cause)

    def _end_lost_worker(self, worker: Worker, error: RunError, cause: LossCause = LossCause.CRASH) -> None:
        """End an unusable worker, and count it as lost."""
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self._workers_changed(self.worker_table.lost(worker, error.message, cause), error, cause)

    def _start_failed(self, event: StartFailed) -> None:
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is WorkerState.STARTING:
            if self.autoscaler is not None and worker.group:
                self.autoscaler.start_failed(worker, event.cause, event.reason, self.at)
            self.worker_table.lost(worker, event.reason, event.cause)
            self._workers_changed()

    def _node_draining(self, event: NodeDraining) -> None:
        """Note until when the workers of a machine may run; they take only what ends before. A machine without a name
        cannot be told from others."""
        if not event.node:
            return
        self.draining.pop(event.node, None)
        deadline = None if event.deadline == inf else event.deadline
        if deadline is not None:
            self.draining[event.node] = deadline
            if len(self.draining) > MOST_DRAINING:
                oldest = next(iter(self.draining))
                del self.draining[oldest]
                self._update_restriction(oldest)
            self.ticks.request(deadline - self.at, self.at)
        self.worker_table.drain(event.node, deadline)
        self._update_restriction(event.node)

    def _leave_drained(self, event: Event) -> None:
        """Stop runs on machines that end, and copy off what only they have. All results are looked at only when a
        notice arrives: there may be many."""
        if isinstance(event, NodeDraining):
            stop_at = self.leaving.prepare(self.draining, self.at)
        else:
            stop_at = self.leaving.stop_runs(self.draining, self.at)
        if isinstance(event, RunEnded):
            self.leaving.copy_result_of(event.report.task_id, self.draining)
        # a worker may become idle, or start, after the deadline of its machine
        if isinstance(event, (RunEnded, TaskRevoked, WorkerUp)):
            self._leave_idle()
        if stop_at < inf:
            self.ticks.request(stop_at - self.at, self.at)

    def _end_drained(self) -> None:
        """Leave machines whose deadline has passed, and forget notices of machines that should be gone long since."""
        self._leave_idle()
        for node in [node for node, deadline in self.draining.items() if deadline + DRAINED_SECONDS <= self.at]:
            del self.draining[node]
            self.worker_table.drain(node, None)
            self._update_restriction(node)
        if self.draining:
            due = [at if at > self.at else at + DRAINED_SECONDS for at in self.draining.values()]
            self.ticks.request(min(due) - self.at, self.at)

    def _leave_idle(self) -> None:
        """Move idle workers off machines whose deadline has passed."""
        if self.worker_table.end_drained(self.at):
            if self.autoscaler is not None:
                self.autoscaler.nodes_left(self.at)
            self._workers_changed()

    def _maintain(self, event: Event) -> None:
        """Carry out what operators have requested."""
        if isinstance(event, RunEnded):
            self.maintenance.copy_result_of(event.report.task_id)
        expired, has_left, next_at = self.maintenance.step(self.at)
        for worker in expired:
            error = RunError(RunErrorKind.WORKER_LOST, f"{worker.worker_id} leaves, and its run has not ended in time")
            self._end_lost_worker(worker, error, LossCause.KILLED)
        if has_left:
            self._workers_changed()
        if self.autoscaler is not None and (has_left or expired):
            self.autoscaler.nodes_left(self.at)
        if next_at < inf:
            self.ticks.request(next_at - self.at, self.at)

    def _update_restriction(self, node: NodeId) -> None:
        is_restricted = node in self.draining or node in self.costs.nodes.lacking
        self.worker_table.worker_index.restrict(node, is_restricted)

    def _workers_changed(
        self, lost: Sequence[TaskId] = (), error: RunError | None = None, cause: LossCause = LossCause.CRASH
    ) -> None:
        """Workers came or went, `lost` tasks with one of them by `error` and `cause`: run these again, and check all
        waiting tasks."""
        self._update_capacities()
        returned, self.worker_table.returned = self.worker_table.returned, []
        may_have_started = [queued for queued in returned if queued.may_have_started]
        for queued in returned:  # first: it has not failed, whatever the loss means for the others
            task = self.demand.tasks.get(queued.task_id)
            if task is not None and task.on_worker:
                task.alone = task.alone or queued.may_have_started
                self.recovery.came_back(task, queued.ready_at, "its worker was lost before it started")
        if self.costs.fetched.disks:
            self.costs.keep_disks(self.worker_table.nodes())
        if error is not None:
            for name in lost:
                task = self.demand.tasks.get(name)  # it may have been removed with the job of another
                if task is not None and task.follows:  # it was believed to run
                    self.recovery.came_back(task, None, "its worker was lost before it said that it does not start")
                elif task is not None and task.on_worker:
                    is_shared = len(lost) > 1 or bool(may_have_started)
                    self.recovery.ended_badly(task, error, self.at, is_shared, cause, bool(may_have_started))
            # the end of one task's jobs may stop the others, which no longer run
            self._out[:] = [c for c in self._out if not (isinstance(c, StopTask) and c.task_id in lost)]
            self._update_capacities()  # the loss may have been forgiven
        self._recheck_waiting()

    def _update_capacities(self) -> None:
        self.demand.backlog.set_capacities(self.worker_table.worker_index.capacities)
        link_bytes_per_second = min(
            (w.link_bytes_per_second for w in self.worker_table.workers.values() if w.live), default=inf
        )
        self.demand.fair_queue.pool_changed(self.worker_table.worker_index.count, link_bytes_per_second, self.at)
        if self.autoscaler is not None:
            self.largest = self.autoscaler.largest()
        else:
            largest = self.worker_table.largest()
            self.largest = None if largest is None else (largest.capacity_bytes or 0, largest.worker_id)

    def _recheck_waiting(self) -> None:
        self.recovery.workers_changed()
        largest_bytes = None if self.largest is None else self.largest[0]
        is_less = largest_bytes is not None and (self._checked_bytes is None or largest_bytes < self._checked_bytes)
        if is_less or self.costs.nodes.lacking:
            self.demand.fail_unfit()
        self._checked_bytes = largest_bytes
        hopeless = self._hopeless()
        if hopeless is not None:
            self.demand.fail_all(RunError(RunErrorKind.WORKER_LOST, hopeless))

    def why_unfit(self, spec: TaskSpec) -> RunError | None:
        """Return why no wanted worker can run the task: it fits on none, or each of their machines lacks a file. None
        if one can, or may be able to: it was never up."""
        error = why_unfit(spec, self.largest)
        if error is None and self.costs.nodes.lacking:
            workers = [worker for worker in self.worker_table.workers.values() if worker.wanted]
            error = why_unavailable(spec, workers, self.costs.nodes, self.at)
        return error


def _decodes_with(spec: TaskSpec, worker: Worker) -> ComponentKey | None:
    """Return the weights with which a task decodes, if the worker may begin the next tasks meanwhile."""
    return spec.uses[0].component if worker.overlaps_decode and spec.stage is Stage.DECODE else None
