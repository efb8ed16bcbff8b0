"""The scheduler core: events in, commands out. No clock, no I/O, no randomness, no torch, no ray.

`SchedulerState.handle(event) -> list[Command]` is the one door; nothing else changes the state. It never raises for
what an event says (a malformed job is resolved as failed, stale news is dropped); an AssertionError is our mistake.

What the shell does. Commands are carried out in the order of the list.

    StartWorker    after `delay_seconds` start the worker; answer with one WorkerUp or StartFailed of that incarnation
    EndWorker      end that incarnation if it still exists; no answer is expected, later news of it is dropped. It may
                   run a task (one that hangs): that run is given up with it
    RunTask        send the task with its inputs, all of which the shell holds; answer with one RunEnded, or WorkerDown
    StopTask       ask the run to stop at its next step; its RunEnded (usually CANCELLED) still comes. It may be over
                   already: then do nothing
    Prefetch       have the machine of the worker read these components' files ahead; nothing answers, and none of it
                   need be done
    UploadAhead    have the worker bring the task's weights beside the run that it is at; the same holds for it
    ReleaseResult  forget the result, made or given; ids that the shell does not hold are ignored
    ResolveJob     tell the driver. `result` is handed over now: its ReleaseResult may be the next command
    LookAgain      answer with one Tick after that time

What the shell feeds. One event at a time, from one thread, `at` never falling.

    Submitted      before it, hold the `given` results under their ids. A job id that is live or ended lately is ignored
    CancelAsked    ends in ResolveJob(CANCELLED), at once or when the run has ended; ignored for unknown and ended jobs
    WorkersWanted  the whole list each time. A worker that was given up gets a new chance when it is left out and then
                   named again
    WorkerUp       residency starts empty. For a live worker it counts as its loss
    WorkerDown     once, for whatever reason a live incarnation is gone; not after EndWorker. RunEnded of its task may
                   come late and is dropped
    RunEnded       before it, hold the result of a run without error under the task's id; the core keeps or releases it
                   One with WORKER_LOST says that the worker is over: the core ends it; no WorkerDown need follow
    Tick           answers a LookAgain, one each; nothing else has happened
    ResultLost     the shell no longer holds the result: forget it; no ReleaseResult follows for this copy

The inputs, payload and wanted sizes of a task are needed while a job that names it is not resolved; equal task ids of
several jobs are one task and run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from modelpool.pool.plan.residency import Residency
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import JobId, RunError, RunErrorKind, Rung, TaskId, TaskReport, TaskSpec
from modelpool.scheduler.core.recovery import Recovery
from modelpool.scheduler.core.snapshot import Snapshot, take_snapshot
from modelpool.scheduler.core.timeouts import Timeouts
from modelpool.scheduler.core.unfit import why_unfit
from modelpool.scheduler.core.wakeups import Ticks
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.batching import Batching
from modelpool.scheduler.placement.eviction_hints import hint
from modelpool.scheduler.placement.prefetch import ReadingAhead
from modelpool.scheduler.placement.preload import UploadingAhead
from modelpool.scheduler.placement.registry import PLACEMENTS
from modelpool.scheduler.placement.rules import Choice, Question, choice_of
from modelpool.scheduler.placement.switch_budget import SwitchAccount
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import Task, TaskStatus
from modelpool.scheduler.tables.messages import (
    CancelAsked,
    Command,
    ComponentsKnown,
    EndWorker,
    Event,
    Mate,
    ReleaseResult,
    ResultLost,
    RunEnded,
    RunTask,
    StartFailed,
    StopTask,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.tables.placement_record import Rule, Start
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.story_lines import StoryLine
from modelpool.scheduler.tables.workers import Fleet, Worker, WorkerStatus


class SchedulerState:
    """All that the scheduler knows. Changed by `handle` and by nothing else; attributes are for reading."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self._out: list[Command] = []
        self._placement = PLACEMENTS[self.config.placement]
        #: the latest `at` of an event
        self.at = 0.0
        self.log = Story(self.config.story_length)
        self.costs = Costs(self.config.patch_switch_seconds)
        self.fleet = Fleet(self.config, self.log, self._out)
        self.demand = Demand(
            self.config, self.log, self.costs, self._out, self.why_unfit, lambda s: self.recovery.refusal(s, self.at)
        )
        self.recovery = Recovery(self.config, self.log, self.fleet, self.demand)
        self.timeouts = Timeouts(self.config, self.log, self.fleet, self.demand, self._out)
        self.reading_ahead = ReadingAhead(self.costs, self.demand, self.fleet.whereabouts, self._out)
        self.uploading_ahead = UploadingAhead(self.config, self.costs, self.demand, self.fleet, self.log, self._out)
        #: most memory of a wanted worker, and its name; None while one of them never was up
        self.largest: tuple[int, str] | None = None
        self.batching = Batching(self.config.batch_limit)
        #: for loads that serve who waited long
        self.switching = SwitchAccount(self.config.switch_share)
        self.ticks = Ticks(self._out)
        #: what all waiting tasks were held against; None when that was not possible
        self._judged_bytes: int | None = None

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened; return what is to be done, in order."""
        self.at = self.demand.at = self.demand.backlog.at = self.costs.at = max(self.at, event.at)
        self.switching.pass_time(self.at, self.fleet.whereabouts.count, self.fleet.whereabouts.idle_count)
        self.log.begin(event, self.at)
        match event:
            case RunEnded():
                self._run_ended(event)
            case Submitted():
                self.demand.submit(event.job, self.fleet.hopeless())
            case CancelAsked():
                self.demand.cancel(event.job_id)
            case ResultLost():
                self.demand.result_lost(event.task_id)
            case ComponentsKnown():
                self.costs.know(event.components)
            case WorkersWanted():
                self.fleet.want(event.worker_ids)
                self._workers_changed()
            case WorkerUp():
                lost = self.fleet.up(event.worker, self.at)
                message = f"worker {event.worker.worker_id} started anew"
                self._workers_changed(lost, RunError(RunErrorKind.WORKER_LOST, message))
            case WorkerDown():
                self._worker_down(event)
            case StartFailed():
                self._start_failed(event)
            case Tick():
                self.ticks.came()
                self._end_what_hangs()
        self.demand.turns.settle(self.at)
        self._start_what_can()
        if isinstance(event, Submitted):
            self.reading_ahead.job_came()
        self.uploading_ahead.look(isinstance(event, Submitted))
        if (next_look := self.demand.turns.next_look) < inf:
            self.ticks.ask_after(next_look - self.at, self.at)
        if (overdue := self.timeouts.watch(self.at, isinstance(event, Tick))) < inf:
            self.ticks.ask_after(overdue - self.at, self.at)
        self._out += [ReleaseResult(task_id) for task_id in self.demand.results.sweep()]
        commands = self._out.copy()
        self._out.clear()
        return commands

    def snapshot(self) -> Snapshot:
        """Counts, queues and residency as a frozen value, for people."""
        return take_snapshot(self)

    def story(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """What is remembered of the job, oldest first: its moves, its tasks' moves, and the events behind them."""
        return self.log.of_job(job_id)

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        backlog = self.demand.backlog
        if len(self.demand.pinned):
            self._start_pinned()
            if (pinned_until := self.recovery.time_passed(self.at)) < inf:
                self.ticks.ask_after(pinned_until - self.at, self.at)
            self.demand.turns.settle(self.at)  # who was let go may start, or is held back by a limit no more
        workers = self.fleet.whereabouts
        while workers.idle_count and backlog.count:
            question = self._question()
            choice = self._placement(question)
            if choice is None:
                self._look_again()
                return
            if question.switch_seconds > 0.0 and choice.spent_seconds == 0.0:
                self.switching.looked(self.at)
            self._start(choice)

    def _question(self) -> Question:
        workers = self.fleet.whereabouts
        account = self.switching
        seconds = account.allowed_seconds(self.at)
        backlog, config = self.demand.backlog, self.config
        return Question(self.at, backlog, workers, self.costs, config, seconds, account.patience, account.seconds)

    def _start_pinned(self) -> None:
        """Start what waits for one worker each, where that is idle; first start its process anew where need be."""
        for worker in self.fleet.usable(WorkerStatus.IDLE):
            task = self.demand.pinned.first(worker.worker_id)
            if task is None or not self.demand.turns.may_start(task):
                continue
            if task.recycle_first:
                task.recycle_first, task.next_rung = False, None
                task.rungs += (Rung.RECYCLE,)
                self.fleet.recycle(worker, f"recycled for {task.name}")
                self._look_at_workers()
                continue
            before = "ran out of memory" if task.memory_failures else "took a worker down"
            self._start(
                choice_of(
                    self._question(), task, worker, Rule.PINNED, f"it {before} before, and waited for this worker"
                )
            )

    def _look_again(self) -> None:
        """Ready tasks wait for busy workers while others are idle: have that judged again when one should be free."""
        waits = []
        for end, _, worker in self.fleet.whereabouts.busy:
            waits.append(worker.wait_seconds(self.at) or 0.0)
            if end >= self.at:
                break  # the others are free later
        if not waits:
            return  # nothing waits for a run of unknown length: what is ready fits on no idle worker
        self.ticks.ask_after(min(waits), self.at)

    def _start(self, choice: Choice) -> None:
        """Send the task and assume what its weights do to the residency; the report confirms or corrects it."""
        task, worker, spec = choice.task, choice.worker, choice.task.spec
        assert worker.residency is not None, f"{worker.name} is not up"
        wanted = self.batching.mates(self._question(), choice) if self.batching.limit > 1 else ()
        if task.pinned_to is None:
            limit = self.config.overtaking_limit
            self.demand.backlog.start(task, worker.residency.capacity_bytes, self.fleet.whereabouts.count, limit)
            self.switching.spend(choice.spent_seconds)
        else:
            self.demand.pinned.remove(task)
            task.pinned_to = None
            if task.next_rung is not None:
                task.rungs += (task.next_rung,)
                task.next_rung = None
        self._put_on(task, choice)
        mates = [mate for mate in wanted if self._joins(mate, choice)] if wanted else []
        fresh = bool(task.memory_failures)
        if fresh:
            worker.believe(Residency(worker.residency.capacity_bytes))
        needed = hint(task, worker, self.costs, self.demand, self.fleet.whereabouts)
        self.costs.run_started(task.signature, worker)
        assumed = self.costs.residency_after(task.signature, worker, Outlook(needed) if needed else NO_OUTLOOK)
        expected_end = self.at + choice.seconds if task.signature.kind.ratio is not None else None
        if mates and expected_end is not None:
            together_seconds = self.costs.batch_seconds(spec, task.signature, worker, 1 + len(mates))
            expected_end += together_seconds - self.costs.resident_seconds(spec, task.signature, worker)
        self.fleet.run_started(worker, spec.task_id, assumed, expected_end, tuple([mate.name for mate in mates]))
        self._out.append(
            RunTask(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                task_id=spec.task_id,
                attempt=task.attempt,
                why=choice.why,
                needed_next=needed,
                fresh=fresh,
                rungs=task.rungs,
                mates=tuple([Mate(mate.name, mate.attempt) for mate in mates]) if mates else (),
            )
        )
        self.reading_ahead.run_started(worker)
        self.uploading_ahead.run_started(worker, task.signature, choice)

    def _put_on(self, task: Task, choice: Choice) -> None:
        """A task that waits nowhere any more is the worker's."""
        worker = choice.worker
        task.attempt += 1
        task.ready_at = None
        task.stop_asked_at = None
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        task.started_at = self.at
        start = Start(worker.worker_id, worker.incarnation, task.attempt, choice.why)
        self.log.move(task, TaskStatus.RUNNING, start)
        self.demand.turns.start(task)

    def _joins(self, mate: Task, choice: Choice) -> bool:
        """Put a task beside the chosen one, unless its user may have no more tasks on workers by now."""
        if mate.held_back or not self.demand.turns.may_start(mate):
            return False
        self.demand.backlog.remove(mate)
        self.log.note(mate, f"runs with {choice.task.name}")
        self._put_on(mate, choice)
        return True

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.current(report.worker_id, report.incarnation)
        task_id = report.task_id
        task = self.demand.tasks.get(task_id)
        is_there = worker is not None and (task_id == worker.task_id or task_id in worker.mates)
        if worker is None or task is None or not is_there or task.attempt != report.attempt:
            if report.error is None:
                self.demand.results.stray(task_id)  # the run was given up; its result came all the same
            return
        if report.error is not None and report.error.kind is RunErrorKind.WORKER_LOST:
            self._end_and_lose(worker, report.error)  # it says itself that it is over
            return
        if report.error is None:
            self._learn(task, worker, report)
            self.recovery.ended_well(task)
        self.demand.turns.pay(task, report.cost)
        capacity_bytes = worker.capacity_bytes
        self.fleet.run_ended(worker, report, self.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self._look_at_workers()
        if report.error is None:
            self.demand.made(task, report.result_bytes)
        else:
            self.recovery.ended_badly(task, report.error, self.at, worker.members > 1)
        if pool_changed:
            self._judge_waiting()

    def _learn(self, task: Task, worker: Worker, report: TaskReport) -> None:
        """Take in what a run took; one that was shared says it once, with its first report, which has the switches."""
        if report.cost.batched == 1 or len(worker.task_ids) == worker.members:
            self.costs.learn(task.spec, task.signature, worker, report)
        if worker.members > 1:
            self.batching.learn(task, worker, report.cost)

    def _end_what_hangs(self) -> None:
        """Ask runs to stop that take too long; end the workers of those that do not stop."""
        for worker, message in self.timeouts.ask_to_stop(self.at):
            self._end_and_lose(worker, RunError(RunErrorKind.WORKER_LOST, message))

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _worker_down(self, event: WorkerDown) -> None:
        worker = self.fleet.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is not WorkerStatus.GIVEN_UP:
            lost = self.fleet.lost(worker, event.reason)
            message = f"worker {event.worker_id} was lost: {event.reason}"
            self._workers_changed(lost, RunError(RunErrorKind.WORKER_LOST, message))

    def _end_and_lose(self, worker: Worker, error: RunError) -> None:
        """End a worker that is of no use any more, and count it as lost."""
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self._workers_changed(self.fleet.lost(worker, error.message), error)

    def _start_failed(self, event: StartFailed) -> None:
        worker = self.fleet.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is WorkerStatus.STARTING:
            self.fleet.lost(worker, event.reason)
            self._workers_changed()

    def _workers_changed(self, lost: Sequence[TaskId] = (), error: RunError | None = None) -> None:
        """Workers came or went, `lost` with one of them by `error`: run it again, and judge what waits anew."""
        self._look_at_workers()
        if error is not None:
            for name in lost:
                task = self.demand.tasks.get(name)  # one may have gone with the job of another
                if task is not None and task.on_worker:
                    self.recovery.ended_badly(task, error, self.at, len(lost) > 1)
            # what the end of one task's jobs says of the others: that they run nowhere is known
            self._out[:] = [c for c in self._out if not (isinstance(c, StopTask) and c.task_id in lost)]
            self._look_at_workers()  # the loss may have been forgiven
        self._judge_waiting()

    def _look_at_workers(self) -> None:
        self.demand.backlog.set_capacities(self.fleet.whereabouts.capacities)
        link_bytes_per_second = min(
            (w.link_bytes_per_second for w in self.fleet.workers.values() if w.live), default=inf
        )
        self.demand.turns.pool_changed(self.fleet.whereabouts.count, link_bytes_per_second, self.at)
        largest = self.fleet.largest()
        self.largest = None if largest is None else (largest.capacity_bytes or 0, largest.worker_id)

    def _judge_waiting(self) -> None:
        self.recovery.workers_changed()
        largest_bytes = None if self.largest is None else self.largest[0]
        if largest_bytes is not None and (self._judged_bytes is None or largest_bytes < self._judged_bytes):
            self.demand.fail_unfit()
        self._judged_bytes = largest_bytes
        hopeless = self.fleet.hopeless()
        if hopeless is not None:
            self.demand.fail_all(RunError(RunErrorKind.WORKER_LOST, hopeless))

    def why_unfit(self, spec: TaskSpec) -> RunError | None:
        """Why the task fits on no worker that is wanted; None when it fits, or may fit on one that was never up."""
        return why_unfit(spec, self.largest)
