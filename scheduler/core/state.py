"""The scheduler core: events in, commands out. No clock, no I/O, no randomness, no torch, no ray.

`SchedulerState.handle(event) -> list[Command]` is the only entry point; nothing else changes the state. It never raises
because of the content of an event (a malformed job is resolved as failed, outdated messages are dropped); an
AssertionError is a bug.

Commands, which the shell carries out in the order of the list:

    StartWorker    after `delay_seconds` start the worker; answer with one WorkerUp or StartFailed of that incarnation
    EndWorker      end that incarnation if it still exists; no answer is expected, later messages from it are dropped.
                   It may be running a task (one that hangs): that run is given up with it
    RunInGang      send the task to one of the workers that share its run, likewise; answer with one RunEnded of that
                   worker, or its WorkerDown. Only the result of the first member is held. Each member's state is held
                   under the same id, in place of one with no more steps
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

from math import inf

from modelpool.pool.values.specs.spec import (
    NO_NODE,
    JobId,
    NodeId,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
)
from modelpool.scheduler.autoscaling.autoscaler import Autoscaler
from modelpool.scheduler.core.gang_starts import GangStarts
from modelpool.scheduler.core.gangs import Gangs
from modelpool.scheduler.core.leaving import Leaving
from modelpool.scheduler.core.maintenance import Maintenance
from modelpool.scheduler.core.membership import Membership
from modelpool.scheduler.core.node_limits import NodeLimits
from modelpool.scheduler.core.pass_breaks import PassBreaks
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.core.refutation import Refutation
from modelpool.scheduler.core.remembering import remember
from modelpool.scheduler.core.snapshot import Snapshot, take_snapshot
from modelpool.scheduler.core.starts import Starts
from modelpool.scheduler.core.timeouts import Timeouts
from modelpool.scheduler.core.wakeups import Ticks
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.pinned_loads import PinnedLoads
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cordons import unavailable
from modelpool.scheduler.model.file_verdicts import FileVerdicts
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.kept_states import KeptState, kept_state, state_id
from modelpool.scheduler.model.messages import (
    CancelRequested,
    Command,
    ComponentsKnown,
    Cordoned,
    DisruptionsAllowed,
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
    StartFailed,
    StateKept,
    Submitted,
    TaskRevoked,
    Tick,
    Uncordoned,
    WeightsLoaded,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.story_lines import StoryLine
from modelpool.scheduler.model.workers import Worker, WorkerTable


class SchedulerState:
    """The complete state of the scheduler. Changed only by `handle`; attributes are for reading."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self._out: list[Command] = []
        #: the latest `at` of an event
        self.at = 0.0
        #: when the pool ends; None while it is to continue. From the notice on, nothing starts
        self.ends_at: float | None = None
        #: as the last event says (`Submitted`)
        self.others_follow = False
        self.log = Story(self.config.story_length)
        self.costs = Costs(self.config.patch_switch_seconds)
        self.worker_table = WorkerTable(self.config, self.log, self._out)
        self.demand = Demand(
            self.config,
            self.log,
            self.costs,
            self._out,
            lambda s: self.membership.why_unfit(s),
            lambda s: self.recovery.refusal(s, self.at),
        )
        self.recovery = Recovery(self.config, self.log, self.worker_table, self.demand)
        self.timeouts = Timeouts(self.config, self.log, self.worker_table, self.demand, self._out)
        self.preemption = Preemption(self.config, self.costs, self.log, self.worker_table, self.demand, self._out)
        self.pass_breaks = PassBreaks(self.config, self.costs, self.worker_table, self.demand, self.preemption)
        self.leaving = Leaving(self.costs, self.worker_table, self.demand, self.preemption, self._out)
        self.ticks = Ticks(self._out)
        self.node_limits = NodeLimits(self.costs, self.worker_table, self.ticks)
        #: the sets of components that must stay resident
        self.pinned_loads = PinnedLoads(self.costs, self.worker_table, self.log, self._out)
        verdicts = FileVerdicts()
        #: what operators request: cordons, drains, restarts
        self.maintenance = Maintenance(self.worker_table, self.leaving, self.preemption, self.log, verdicts.pending)
        #: decides how many nodes exist; None without groups
        self.autoscaler: Autoscaler | None = None
        if self.config.groups:
            self.autoscaler = Autoscaler(
                self.config,
                self.worker_table,
                self.demand,
                self.costs,
                self.pinned_loads.replicas,
                self.node_limits.draining,
                verdicts.pending,
            )
        self.membership = Membership(
            self.costs, self.worker_table, self.demand, self.recovery, self.autoscaler, self._out
        )
        self.starts = Starts(
            self.config,
            self.costs,
            self.log,
            self.worker_table,
            self.demand,
            self.recovery,
            self.membership,
            self.pinned_loads,
            self.ticks,
            self._out,
        )
        #: runs that several workers share, and the decisions about them
        self.gangs, self.gang_starts = self._gangs(verdicts)
        self.starts.gang_starts = self.gang_starts
        self.starts.pass_breaks = self.pass_breaks
        self.refutation = Refutation(
            verdicts,
            self.costs,
            self.log,
            self.worker_table,
            self.demand,
            self.node_limits,
            self.membership,
            self.starts.send_ahead,
            self._out,
        )

    def _gangs(self, verdicts: FileVerdicts) -> tuple[Gangs, GangStarts]:
        table, demand, membership = self.worker_table, self.demand, self.membership
        limits, out = self.node_limits, self._out
        gangs = Gangs(self.costs, self.log, table, demand, self.recovery, membership, limits, verdicts, out)
        membership.take_gang_losses = gangs.take_losses
        return gangs, GangStarts(self.costs, table, demand, membership, self.preemption, gangs)

    def handle(self, event: Event) -> list[Command]:
        """Apply the event; return the commands, in order."""
        self.at = self.demand.at = self.demand.backlog.at = self.costs.at = max(self.at, event.at)
        self.starts.switch_budget.pass_time(
            self.at, self.worker_table.worker_index.count, self.worker_table.worker_index.idle_count
        )
        if self.demand.shareable or self.gang_starts.load.is_known:
            self.gang_starts.pass_time(self.at)
        self.log.begin(event, self.at)
        self.others_follow = isinstance(event, Submitted | StateKept) and event.others_follow
        self._apply(event)
        self._decide(event)
        self._request_ticks(event)
        if self.gangs.runs:
            self.gangs.spread_stops()
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
                self.node_limits.try_again(self.at)
                submitted_at = self.at if event.submitted_at is None else min(event.submitted_at, self.at)
                self.demand.submit(event.job, self.membership.hopeless(), submitted_at)
            case CancelRequested():
                self.demand.cancel(event.job_id)
            case StateKept():
                self._state_kept(event)
            case FilesJudged():
                self.refutation.files_judged(event)
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
                self.membership.changed()
            case NodeDraining():
                self.node_limits.drain(event.node, event.deadline, self.at)
            case Cordoned():
                self.maintenance.cordon(event, self.at)
                self.membership.changed()
            case Uncordoned():
                self.maintenance.uncordon(event)
                self.membership.changed()
            case RestartRequested():
                self.maintenance.restart(event)
                self.membership.changed()
            case DisruptionsAllowed():
                self.worker_table.cordons.obstacle = event.obstacle
            case WorkerUp():
                self.membership.up(event, self.node_limits.draining.get(event.worker.node))
            case WorkerDown():
                self.membership.down(event)
            case StartFailed():
                self.membership.start_failed(event)
            case PinComponents():
                self.pinned_loads.pin(event.components, event.replicas, event.file_names)
            case WeightsLoaded():
                self._weights_loaded(event)
            case Remembered():
                remember(self, event.memory, event.gap_seconds)
                if event.memory.cordons:
                    self.membership.changed()
            case PoolEnding():
                self.ends_at = event.deadline
            case Tick():
                self.ticks.arrived()
                self._end_hanging_runs()
                if self.node_limits.draining:
                    self.membership.leave_idle()
                    if self.node_limits.forget_drained(self.at) and self.autoscaler is not None:
                        self.autoscaler.nodes_left(self.at)  # they count as unavailable no more

    def _decide(self, event: Event) -> None:
        """Decide what follows: nodes, runs, preemption, tasks sent ahead, and loads."""
        if self.refutation.verdicts.pending:
            self.refutation.refute_lost_workers()
        if self.autoscaler is not None and self.ends_at is None:
            self.membership.scale(event)
        if self.worker_table.cordons:
            self._maintain(event)
        self.demand.fair_queue.settle(self.at)
        if self.others_follow:
            return  # all else is decided with the last one
        # the ends of the others follow at once, and with them what may start
        in_parts = self.ends_at is None and isinstance(event, RunEnded) and self.starts.is_reported_in_parts(event)
        if self.ends_at is None:
            if self.config.preemption and self.worker_table.open_passes:
                self.pass_breaks.stop_passes(self.at)
            if not in_parts:
                self.starts.start_ready()
            if self.config.preemption:
                self.preemption.preempt(self.at)
            if self.demand.shareable:
                self.gang_starts.resize(self.at)
        else:
            self.leaving.stop_what_outlasts(self.ends_at, self.at)
        if self.starts.send_ahead.seconds and not in_parts:
            self.starts.plan_ahead(self.ends_at is not None)
        if self.node_limits.draining:
            self._leave_drained(event)
        verdicts = self.refutation.verdicts
        while verdicts.pending and self.refutation.refute_lost_workers():  # the steps above have ended them
            self.demand.fair_queue.settle(self.at)
            if self.ends_at is None:
                self.starts.start_ready()
        if self.ends_at is None and not in_parts:
            self.starts.prepare_loads(isinstance(event, Submitted))
            if self.pinned_loads.sets and (load_at := self.pinned_loads.plan(self.at)) < inf:
                self.ticks.request(load_at - self.at, self.at)

    def _request_ticks(self, event: Event) -> None:
        """Request the next looks at what time alone changes."""
        if (next_check := self.demand.fair_queue.next_check) < inf:
            self.ticks.request(next_check - self.at, self.at)
        if (overdue := self.timeouts.watch(self.at, isinstance(event, Tick))) < inf:
            self.ticks.request(overdue - self.at, self.at)
        if self.gangs.runs and (hangs_at := self.gangs.next_check(self.config.stop_grace_seconds)) < inf:
            self.ticks.request(hangs_at - self.at, self.at)
        if self.worker_table.open_passes and self.ends_at is None and (stop_at := self.pass_breaks.next_at) < inf:
            self.ticks.request(stop_at - self.at, self.at)
        if self.demand.shareable and self.ends_at is None and (resize_at := self.gang_starts.next_at(self.at)) < inf:
            self.ticks.request(resize_at - self.at, self.at)
        if self.autoscaler is not None and self.autoscaler.next_at < inf and self.ends_at is None:
            self.ticks.request(self.autoscaler.next_at - self.at, self.at)

    def unavailable_nodes(self) -> set[NodeId]:
        """Return the machines that are drained, end, or are given up."""
        return unavailable(self.worker_table.cordons, self.worker_table.workers.values(), self.node_limits.draining)

    def snapshot(self) -> Snapshot:
        """Return counts, queues and residency as a frozen value, for users."""
        return take_snapshot(self)

    def story(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """Return the kept story lines of the job, oldest first: its transitions, its tasks', and the events behind
        them."""
        return self.log.of_job(job_id)

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
                self.starts.start_queued(worker)
            if not worker.wanted:
                self.membership.update_capacities()
            self.recovery.came_back(task, None, note)
            if not worker.wanted:
                self.membership.recheck_waiting()

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.worker_table.current(report.worker_id, report.incarnation)
        if worker is not None and (gang := self.gangs.of_report(worker, report)) is not None:
            self.gangs.member_ended(worker, gang, report)
            return
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
            self.membership.end_lost(worker, report.error)
            return
        inputs = (task.origins, self.demand.results.origins_of(task.spec.needs))
        origins = self.refutation.verdicts.origins_of(report, inputs)
        counts = origins is not None and not task.is_refuted
        if report.error is None and counts:
            self.starts.learn(task, worker, report)
            self.recovery.ended_well(task)
            self.node_limits.note_found(worker, task.cost_class)
        else:
            self.costs.run_failed(worker)
            self.node_limits.note_missing(worker, report.error, self.at, task.spec, report.residency)
        self.demand.fair_queue.pay(task, report.cost)
        capacity_bytes = worker.capacity_bytes
        self.worker_table.run_ended(worker, report, self.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self.membership.update_capacities()
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
            self.starts.start_queued(worker)
        if pool_changed or (report.error is not None and report.error.components):
            self.membership.recheck_waiting()

    def _drop_run(self, task: Task, worker: Worker, report: TaskReport) -> None:
        """A run ended that read a file or a result which is not the expected one, or stopped with a state that may be
        made with one: nothing of it counts."""
        if report.error is None:
            self.demand.results.stray(task.name)
        elif report.has_state:
            self._stray_state(task.name, task)
        self.recovery.does_not_count(task, f"what {worker.worker_id} made does not count")

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

    def _end_hanging_runs(self) -> None:
        """Ask runs that take too long to stop; end the workers of those that do not stop."""
        for worker, message in self.timeouts.request_stops(self.at):
            self.membership.end_lost(worker, RunError(RunErrorKind.WORKER_LOST, message))
        for worker, message in self.gangs.hanging(self.at, self.config.stop_grace_seconds):
            self.membership.end_lost(worker, RunError(RunErrorKind.WORKER_LOST, message))

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        """A load of pinned weights ended."""
        worker = self.worker_table.current(event.worker_id, event.incarnation)
        if worker is None or not worker.live:
            return
        self.node_limits.note_missing(worker, event.error, self.at)
        capacity_bytes = worker.capacity_bytes
        self.pinned_loads.ended(worker, event, self.at)
        if worker.capacity_bytes != capacity_bytes:
            self.membership.update_capacities()
            self.membership.recheck_waiting()

    def _leave_drained(self, event: Event) -> None:
        """Stop runs on machines that end, and copy off what only they have. All results are looked at only when a
        notice arrives: there may be many."""
        if isinstance(event, NodeDraining):
            stop_at = self.leaving.prepare(self.node_limits.draining, self.at)
        else:
            stop_at = self.leaving.stop_runs(self.node_limits.draining, self.at)
        if isinstance(event, RunEnded):
            self.leaving.copy_result_of(event.report.task_id, self.node_limits.draining)
        # a worker may become idle, or start, after the deadline of its machine
        if isinstance(event, (RunEnded, TaskRevoked, WorkerUp)):
            self.membership.leave_idle()
        if stop_at < inf:
            self.ticks.request(stop_at - self.at, self.at)

    def _maintain(self, event: Event) -> None:
        """Carry out what operators have requested."""
        if isinstance(event, RunEnded):
            self.maintenance.copy_result_of(event.report.task_id)
        expired, has_left, next_at = self.maintenance.step(self.at)
        for worker in expired:
            error = RunError(RunErrorKind.WORKER_LOST, f"{worker.worker_id} leaves, and its run has not ended in time")
            self.membership.end_lost(worker, error, LossCause.KILLED)
        if has_left:
            self.membership.changed()
        if self.autoscaler is not None and (has_left or expired):
            self.autoscaler.nodes_left(self.at)
        if next_at < inf:
            self.ticks.request(next_at - self.at, self.at)
