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

from pool.errors import does_not_fit
from pool.outlook import NO_OUTLOOK, Outlook
from pool.residency import Residency, needed_bytes
from pool.spec import ComponentKey, JobId, RunError, RunErrorKind, Rung, TaskId, TaskSpec
from scheduler.config import SchedulerConfig
from scheduler.costs import Costs
from scheduler.demand import Demand
from scheduler.jobs import Task, TaskStatus
from scheduler.messages import (
    CancelAsked,
    Command,
    ComponentsKnown,
    EndWorker,
    Event,
    LookAgain,
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
from scheduler.outlook import MOST_WAITING, needed_next
from scheduler.placement import PLACEMENTS, Choice, Question, choice_of
from scheduler.recovery import Recovery
from scheduler.snapshot import Snapshot, take_snapshot
from scheduler.story import Story, StoryLine
from scheduler.why import Rule
from scheduler.workers import Fleet, Worker, WorkerStatus

#: between two looks at a run that is overdue
LEAST_TICK_SECONDS = 0.05


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
        #: most memory of a wanted worker, and its name; None while one of them never was up
        self.largest: tuple[int, str] | None = None
        #: when the `Tick`s are due that were asked for, soonest first
        self._ticks: list[float] = []
        #: what all waiting tasks were held against; None when that was not possible
        self._judged_bytes: int | None = None

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened; return what is to be done, in order."""
        self.at = max(self.at, event.at)
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
                self._ticks = self._ticks[1:]
                self._stop_what_hangs()
        self._start_what_can()
        self._watch_runs(isinstance(event, Tick))
        self._out += [ReleaseResult(task_id) for task_id in self.demand.results.sweep()]
        commands = list(self._out)
        self._out.clear()
        return commands

    def snapshot(self) -> Snapshot:
        """Counts, queues and residency as a frozen value, for people."""
        return take_snapshot(self)

    def story(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """What is remembered of the job, oldest first: its moves, its tasks' moves, and the events behind them."""
        return self.log.of_job(job_id)

    def deadline(self, task: Task) -> float:
        """When something is done about a running task that is not over by then; never comes for one that was not asked
        to stop, without a time-out."""
        asked = [at for at in (task.timed_out_at, task.stop_asked_at) if at is not None]
        if asked:
            return min(asked) + self.config.stop_grace_seconds
        if self.config.run_timeout_seconds is None:
            return float("inf")
        return task.started_at + self.config.run_timeout_seconds

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        backlog = self.demand.backlog
        if len(self.demand.pinned):
            self._start_pinned()
            self._tick_after_if_due(self.recovery.time_passed(self.at))
        if not len(backlog):
            return
        idle = self.fleet.usable(WorkerStatus.IDLE)
        busy = self.fleet.usable(WorkerStatus.BUSY)
        while idle and len(backlog):
            choice = self._placement(Question(self.at, backlog, idle, busy, self.costs, self.config))
            if choice is None:
                self._look_again(busy)
                return
            self._start(choice)
            idle.remove(choice.worker)
            busy.append(choice.worker)

    def _start_pinned(self) -> None:
        """Start what waits for one worker each, where that is idle; first start its process anew where need be."""
        for worker in self.fleet.usable(WorkerStatus.IDLE):
            task = self.demand.pinned.first(worker.worker_id)
            if task is None:
                continue
            if task.recycle_first:
                task.recycle_first, task.next_rung = False, None
                task.rungs += (Rung.RECYCLE,)
                self.fleet.recycle(worker, f"recycled for {task.name}")
                self._look_at_workers()
                continue
            busy = self.fleet.usable(WorkerStatus.BUSY)
            question = Question(self.at, self.demand.backlog, [worker], busy, self.costs, self.config)
            before = "ran out of memory" if task.memory_failures else "took a worker down"
            self._start(
                choice_of(question, task, worker, Rule.PINNED, f"it {before} before, and waited for this worker")
            )

    def _look_again(self, busy: Sequence[Worker]) -> None:
        """Ready tasks wait for `busy` workers while others are idle: have that judged again when one should be free."""
        waits = [seconds for w in busy if (seconds := w.wait_seconds(self.at)) is not None]
        if not waits:
            return  # nothing waits for a run of unknown length: what is ready fits on no idle worker
        self._tick_after(min(waits))

    def _tick_after(self, seconds: float) -> None:
        """Have a Tick within so long, and no sooner than makes sense. An earlier one than those on their way is asked
        for beside them."""
        due = self.at + max(LEAST_TICK_SECONDS, seconds)
        if not self._ticks or due < self._ticks[0] - LEAST_TICK_SECONDS:
            self._ticks.insert(0, due)
            self._out.append(LookAgain(due - self.at))

    @property
    def tick_due(self) -> float | None:
        """When the next Tick is due; None when none was asked for."""
        return self._ticks[0] if self._ticks else None

    def _start(self, choice: Choice) -> None:
        """Send the task and assume what its weights do to the residency; the report confirms or corrects it."""
        task, worker, spec = choice.task, choice.worker, choice.task.spec
        assert worker.residency is not None, f"{worker.name} is not up"
        if task.pinned_to is None:
            self.demand.backlog.start(task, worker.residency.capacity_bytes)
        else:
            self.demand.pinned.remove(task)
            task.pinned_to = None
            if task.next_rung is not None:
                task.rungs += (task.next_rung,)
                task.next_rung = None
        task.attempt += 1
        task.stop_asked_at = None
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        task.started_at = self.at
        self.log.move(task, TaskStatus.RUNNING, f"attempt {task.attempt} on {worker.worker_id}#{worker.incarnation}")
        fresh = bool(task.memory_failures)
        if fresh:
            worker.believe(Residency(worker.residency.capacity_bytes))
        needed = self._needed_next(task, worker)
        assumed = self.costs.residency_after(task.signature, worker, Outlook(needed) if needed else NO_OUTLOOK)
        expected_end = self.at + choice.seconds if task.signature.kind.ratio is not None else None
        self.fleet.run_started(worker, spec.task_id, assumed, expected_end)
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
            )
        )

    def _needed_next(self, task: Task, worker: Worker) -> tuple[ComponentKey, ...]:
        """What the worker is to consider when it makes room; nothing where it need not."""
        if not self.costs.makes_room(task.signature, worker):
            return ()
        demand = self.demand
        return needed_next(
            task,
            worker,
            demand.backlog.window(MOST_WAITING, worker.capacity_bytes or 0),
            (demand.tasks[w.task_id] for w in self.fleet.usable(WorkerStatus.BUSY) if w.task_id is not None),
            demand.tasks,
            demand.results.readers,
        )

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.current(report.worker_id, report.incarnation)
        task = self.demand.tasks.get(report.task_id)
        if worker is None or task is None or worker.task_id != report.task_id or task.attempt != report.attempt:
            if report.error is None:
                self.demand.results.stray(report.task_id)  # the run was given up; its result came all the same
            return
        if report.error is not None and report.error.kind is RunErrorKind.WORKER_LOST:
            self._end_and_lose(worker, report.error)  # it says itself that it is over
            return
        if report.error is None:
            self.costs.learn(task.spec, task.signature, worker, report)
            self.recovery.ended_well(task)
        capacity_bytes = worker.capacity_bytes
        self.fleet.run_ended(worker, report, self.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self._look_at_workers()
        if report.error is None:
            self.demand.made(task, report.result_bytes)
        else:
            self.recovery.ended_badly(task, report.error, self.at)
        if pool_changed:
            self._judge_waiting()

    def _stop_what_hangs(self) -> None:
        """Ask runs to stop that take too long; end the workers of those that do not stop."""
        for worker in list(self.fleet.workers.values()):
            task = self.demand.tasks.get(worker.task_id) if worker.task_id is not None else None
            if task is None or self.at < self.deadline(task):
                continue
            if task.timed_out_at is not None or task.stop_asked_at is not None:
                message = (
                    f"{task.name} ran for {self.at - task.started_at:.0f} s on {worker.worker_id} and did not stop"
                )
                self._end_and_lose(worker, RunError(RunErrorKind.WORKER_LOST, message))
                continue
            task.timed_out_at = self.at
            self.log.note(task, f"asked to stop after {self.at - task.started_at:.0f} s")
            if task.status is TaskStatus.RUNNING:  # else it was asked before
                self._out.append(StopTask(worker.worker_id, worker.incarnation, task.name, task.attempt))

    def _watch_runs(self, is_tick: bool) -> None:
        """Have a Tick when the first run must be over. All runs are looked at only where one may have come due."""
        stopped = [self.demand.tasks[c.task_id] for c in self._out if isinstance(c, StopTask)]
        for task in stopped:
            if task.timed_out_at is None:
                task.stop_asked_at = self.at
        if stopped or is_tick or self.config.run_timeout_seconds is not None:
            names = [w.task_id for w in self.fleet.workers.values() if w.task_id is not None]
            self._tick_after_if_due(min((self.deadline(self.demand.tasks[n]) for n in names), default=float("inf")))

    def _tick_after_if_due(self, due: float) -> None:
        if due < float("inf"):
            self._tick_after(due - self.at)

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

    def _workers_changed(self, lost: TaskId | None = None, error: RunError | None = None) -> None:
        """Workers came or went, `lost` with one of them by `error`: run it again, and judge what waits anew."""
        self._look_at_workers()
        if lost is not None and error is not None:
            self.recovery.ended_badly(self.demand.tasks[lost], error, self.at)
            self._look_at_workers()  # the loss may have been forgiven
        self._judge_waiting()

    def _look_at_workers(self) -> None:
        live = [w.capacity_bytes or 0 for s in (WorkerStatus.IDLE, WorkerStatus.BUSY) for w in self.fleet.usable(s)]
        self.demand.backlog.set_capacities(tuple(sorted(set(live))))
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
        if self.largest is None:
            return None
        least_bytes = needed_bytes(spec.uses, spec.least_activation_bytes)
        capacity_bytes, worker_id = self.largest
        if least_bytes <= capacity_bytes:
            return None
        what = f"{spec.stage.value} task {spec.task_id} of {', '.join(use.component for use in spec.uses)}"
        divided = f"divided as far as it can be ({spec.activation_bytes} B when whole), " if spec.divisions else ""
        detail = (
            f"activations {spec.least_activation_bytes} B, {divided}working set of the largest layer "
            f"{least_bytes - spec.least_activation_bytes} B; {worker_id} has most"
        )
        return RunError(RunErrorKind.BAD_INPUT, str(does_not_fit(what, least_bytes, capacity_bytes, detail)))
