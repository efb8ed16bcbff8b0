"""The scheduler core: events in, commands out. No clock, no I/O, no randomness, no torch, no ray.

`SchedulerState.handle(event) -> list[Command]` is the one door; nothing else changes the state. It never raises for
what an event says (a malformed job is resolved as failed, stale news is dropped); an AssertionError is our mistake.

What the shell does. Commands are carried out in the order of the list.

    StartWorker    after `delay_seconds` start the worker; answer with one WorkerUp or StartFailed of that incarnation
    EndWorker      end that incarnation if it still exists; no answer is expected, later news of it is dropped
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
    Tick           answers a LookAgain; nothing else has happened
    ResultLost     the shell no longer holds the result: forget it; no ReleaseResult follows for this copy

The inputs, payload and wanted sizes of a task are needed while a job that names it is not resolved; equal task ids of
several jobs are one task and run once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pool.errors import does_not_fit
from pool.residency import Residency, needed_bytes
from pool.spec import JobId, RunError, RunErrorKind, TaskId, TaskSpec
from scheduler.config import SchedulerConfig
from scheduler.costs import Costs
from scheduler.demand import Demand
from scheduler.jobs import TaskStatus
from scheduler.messages import (
    CancelAsked,
    Command,
    ComponentsKnown,
    Event,
    LookAgain,
    ReleaseResult,
    ResultLost,
    RunEnded,
    RunTask,
    StartFailed,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from scheduler.placement import PLACEMENTS, Choice, Question
from scheduler.snapshot import Snapshot, take_snapshot
from scheduler.story import Story, StoryLine
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
        self.demand = Demand(self.config, self.log, self.costs, self._out, self.why_unfit)
        #: most memory of a wanted worker, and its name; None while one of them never was up
        self.largest: tuple[int, str] | None = None
        #: when the next `Tick` is due; None when none was asked for
        self.tick_due: float | None = None
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
                self._workers_changed(None, "")
            case WorkerUp():
                lost = self.fleet.up(event.worker, self.at)
                self._workers_changed(lost, f"worker {event.worker.worker_id} started anew")
            case WorkerDown():
                self._worker_down(event)
            case StartFailed():
                self._start_failed(event)
            case Tick():
                self.tick_due = None
        self._start_what_can()
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

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        backlog = self.demand.backlog
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

    def _look_again(self, busy: Sequence[Worker]) -> None:
        """Ready tasks wait for `busy` workers while others are idle: have that judged again when one should be free."""
        if self.tick_due is not None:
            return
        waits = [seconds for w in busy if (seconds := w.wait_seconds(self.at)) is not None]
        if not waits:
            return  # nothing waits for a run of unknown length: what is ready fits on no idle worker
        seconds = max(LEAST_TICK_SECONDS, min(waits))
        self.tick_due = self.at + seconds
        self._out.append(LookAgain(seconds))

    def _start(self, choice: Choice) -> None:
        """Send the task and assume what its weights do to the residency; the report confirms or corrects it."""
        task, worker, spec = choice.task, choice.worker, choice.task.spec
        assert worker.residency is not None, f"{worker.name} is not up"
        self.demand.backlog.start(task, worker.residency.capacity_bytes)
        task.attempt += 1
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        task.started_at = self.at
        self.log.move(task, TaskStatus.RUNNING, f"attempt {task.attempt} on {worker.worker_id}#{worker.incarnation}")
        if task.attempt > 1:  # the worker evicts everything before it tries again
            worker.believe(Residency(worker.residency.capacity_bytes))
        assumed = self.costs.residency_after(task.signature, worker)
        expected_end = self.at + choice.seconds if task.signature.kind.ratio is not None else None
        self.fleet.run_started(worker, spec.task_id, assumed, expected_end)
        self._out.append(RunTask(worker.worker_id, worker.incarnation, spec.task_id, task.attempt, choice.why))

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.current(report.worker_id, report.incarnation)
        task = self.demand.tasks.get(report.task_id)
        if worker is None or task is None or worker.task_id != report.task_id or task.attempt != report.attempt:
            if report.error is None:
                self.demand.results.stray(report.task_id)  # the run was given up; its result came all the same
            return
        if report.error is None:
            self.costs.learn(task.spec, task.signature, worker, report)
        capacity_bytes = worker.capacity_bytes
        self.fleet.run_ended(worker, report, self.at)
        pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted
        if pool_changed:
            self._look_at_workers()
        if report.error is None:
            self.demand.made(task, report.result_bytes)
        else:
            self.demand.ended_badly(task, report.error)
        if pool_changed:
            self._judge_waiting()

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _worker_down(self, event: WorkerDown) -> None:
        worker = self.fleet.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is not WorkerStatus.GIVEN_UP:
            lost = self.fleet.lost(worker, event.reason)
            self._workers_changed(lost, f"worker {event.worker_id} was lost: {event.reason}")

    def _start_failed(self, event: StartFailed) -> None:
        worker = self.fleet.current(event.worker_id, event.incarnation)
        if worker is not None and worker.status is WorkerStatus.STARTING:
            self.fleet.lost(worker, event.reason)
            self._workers_changed(None, "")

    def _workers_changed(self, lost: TaskId | None, message: str) -> None:
        """Workers came or went, `lost` with one of them: run it again, and judge what waits by the new pool."""
        self._look_at_workers()
        if lost is not None:
            self.demand.ended_badly(self.demand.tasks[lost], RunError(RunErrorKind.WORKER_LOST, message))
        self._judge_waiting()

    def _look_at_workers(self) -> None:
        live = [w.capacity_bytes or 0 for s in (WorkerStatus.IDLE, WorkerStatus.BUSY) for w in self.fleet.usable(s)]
        self.demand.backlog.set_capacities(tuple(sorted(set(live))))
        largest = self.fleet.largest()
        self.largest = None if largest is None else (largest.capacity_bytes or 0, largest.worker_id)

    def _judge_waiting(self) -> None:
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
        least_bytes = needed_bytes(spec.uses, spec.activation_bytes)
        capacity_bytes, worker_id = self.largest
        if least_bytes <= capacity_bytes:
            return None
        what = f"{spec.stage.value} task {spec.task_id} of {', '.join(use.component for use in spec.uses)}"
        detail = (
            f"activations {spec.activation_bytes} B, working set of the largest layer "
            f"{least_bytes - spec.activation_bytes} B; {worker_id} has most"
        )
        return RunError(RunErrorKind.BAD_INPUT, str(does_not_fit(what, least_bytes, capacity_bytes, detail)))
