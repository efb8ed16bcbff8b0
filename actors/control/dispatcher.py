"""`Dispatcher`: the shell around one `SchedulerState`. Carries out its commands, and tells it what comes of them.

Rules
1. `tell` is the only door to the core; events that arise while it is at work wait their turn.
2. A worker's loss is told once, whoever notices first: the run that failed or the watch that ended. A run that was
   answered by its worker's loss is not answered again.
3. Everything runs on one event loop. Nothing here waits for a worker but in a task of its own.
Knows no Ray (a `Fleet` does the work) and no driver (a callback resolves jobs).
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelpool.actors.control.fleet import Asked, Clock, Fleet, InputsLost, JointRun, Run, WorkerLost
from modelpool.actors.control.task_store import TaskBook
from modelpool.actors.wire.messages import ResultRef, StepDone
from modelpool.pool.plan.residency import Residency
from modelpool.pool.specs.spec import RunError, RunErrorKind, TaskId, TaskReport, WorkerId, WorkerSpec
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.tables.messages import (
    Command,
    EndWorker,
    Event,
    LookAgain,
    Prefetch,
    ReleaseResult,
    ResolveJob,
    RunEnded,
    RunTask,
    StartFailed,
    StartWorker,
    StopTask,
    Tick,
    UploadAhead,
    WorkerDown,
    WorkerUp,
)


class _LiveWorker:
    """A worker that is up: what it runs, how far that is, and what was on its GPU when it last said so."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.residency = Residency(spec.capacity_bytes)
        self.runs: dict[TaskId, StepDone] = {}


class Dispatcher:
    """Runs the core. `on_resolved` is told of every job's end, while its result is still held.

    `on_handled` hears every event with what the core said to it, before any of that is done.
    `on_broken` is told once, with a text, when core or shell made a mistake of ours, after which nothing is dispatched
    any more.
    """

    def __init__(
        self,
        state: SchedulerState,
        fleet: Fleet,
        clock: Clock,
        book: TaskBook,
        on_resolved: Callable[[ResolveJob], None],
        on_changed: Callable[[], None],
        on_broken: Callable[[str], None],
        on_handled: Callable[[Event, Sequence[Command]], None] = lambda event, commands: None,
    ) -> None:
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._book = book
        self._on_resolved = on_resolved
        self._on_changed = on_changed
        self._on_broken = on_broken
        self._on_handled = on_handled
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._broken = False
        self._live: dict[WorkerId, _LiveWorker] = {}
        self._starts: dict[tuple[WorkerId, int], asyncio.Task[None]] = {}
        self._watches: dict[tuple[WorkerId, int], asyncio.Task[None]] = {}
        #: everything that goes on by itself; kept here because the event loop holds it only weakly
        self._waits: set[asyncio.Task[None]] = set()
        self._troubles: dict[WorkerId, str] = {}
        self._runs_sent = 0

    @property
    def now(self) -> float:
        """The time for the next event."""
        return self._clock.now()

    @property
    def live_workers(self) -> tuple[WorkerSpec, ...]:
        """The workers that are up."""
        return tuple(worker.spec for worker in self._live.values())

    @property
    def troubles(self) -> Mapping[WorkerId, str]:
        """Why a worker was lost or did not start, the last time that happened to it."""
        return self._troubles

    def running(self) -> tuple[StepDone, ...]:
        """The runs that go on, and how far they are."""
        return tuple(step for worker in self._live.values() for step in worker.runs.values())

    def tell(self, event: Event) -> None:
        """Let the core handle `event`, and carry out what it says."""
        self._inbox.append(event)
        if self._handling or self._broken:
            return
        self._handling = True
        try:
            while self._inbox:
                for command in self._handle(self._inbox.popleft()):
                    self._carry_out(command)
        except Exception as mistake:
            self._break(mistake)
        finally:
            self._handling = False
        self._on_changed()

    def _handle(self, event: Event) -> list[Command]:
        """What the core says to `event`; nothing where it fails, so that a record ends with what it failed at."""
        commands: list[Command] = []
        try:
            commands = self._state.handle(event)
        finally:
            self._on_handled(event, commands)
        return commands

    def step_done(self, step: StepDone) -> bool:
        """A worker says how far it is. False when that is stale news."""
        worker = self._live.get(step.worker_id)
        if worker is None or worker.spec.incarnation != step.incarnation:
            return False
        known = worker.runs.get(step.task_id)
        if known is None or known.run != step.run:
            return False
        worker.runs[step.task_id] = step
        return True

    def close(self) -> None:
        """End all workers and wait for nothing any more. No event comes of it."""
        self._broken = True
        for wait in tuple(self._waits):
            wait.cancel()
        for worker_id, incarnation in (*self._starts, *self._watches):
            self._fleet.end(worker_id, incarnation)
        self._live.clear()

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                key = (command.worker_id, command.incarnation)
                self._starts[key] = self._spawn(self._start(command))
            case EndWorker():
                self._end(command.worker_id, command.incarnation)
            case RunTask():
                self._run(command)
            case StopTask():
                self._stop(command)
            case Prefetch():
                self._prefetch(command)
            case UploadAhead():
                self._upload_ahead(command)
            case ReleaseResult():
                self._book.release(command.task_id)
            case ResolveJob():
                self._on_resolved(command)
            case LookAgain():
                self._spawn(self._tick_after(command.after_seconds))

    async def _tick_after(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self.tell(Tick(self.now))

    async def _start(self, command: StartWorker) -> None:
        worker_id, incarnation = command.worker_id, command.incarnation
        try:
            if command.delay_seconds:
                await self._clock.sleep(command.delay_seconds)
            spec = await self._fleet.start(worker_id, incarnation)
        except Exception as raised:
            self._fleet.end(worker_id, incarnation)
            self._starts.pop((worker_id, incarnation), None)
            self._troubles[worker_id] = f"{type(raised).__name__}: {raised}"
            self.tell(StartFailed(self.now, worker_id, incarnation, self._troubles[worker_id]))
            return
        self._starts.pop((worker_id, incarnation), None)
        self._live[worker_id] = _LiveWorker(spec)
        self._watches[worker_id, incarnation] = self._spawn(self._watch(worker_id, incarnation))
        self.tell(WorkerUp(self.now, spec))

    async def _watch(self, worker_id: WorkerId, incarnation: int) -> None:
        try:
            reason = await self._fleet.gone(worker_id, incarnation)
        except Exception as raised:
            reason = f"{type(raised).__name__}: {raised}"
        self._lose(worker_id, incarnation, reason)

    def _end(self, worker_id: WorkerId, incarnation: int) -> None:
        """As the core wants it: no event answers, neither for the worker nor for what may hang in it."""
        start = self._starts.pop((worker_id, incarnation), None)
        if start is not None:
            start.cancel()
        ended = self._forget(worker_id, incarnation)
        self._fleet.end(worker_id, incarnation)
        for task_id in ended.runs if ended is not None else ():
            self._book.abandon(task_id)

    def _lose(self, worker_id: WorkerId, incarnation: int, reason: str) -> None:
        """A live worker is gone, or as good as gone: end what may be left of it, and say so once."""
        lost = self._forget(worker_id, incarnation)
        if lost is None:
            return
        self._fleet.end(worker_id, incarnation)
        for task_id in lost.runs:
            self._book.abandon(task_id)
        self._troubles[worker_id] = reason
        self.tell(WorkerDown(self.now, worker_id, incarnation, reason))

    def _forget(self, worker_id: WorkerId, incarnation: int) -> _LiveWorker | None:
        watch = self._watches.pop((worker_id, incarnation), None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        worker = self._live.get(worker_id)
        if worker is None or worker.spec.incarnation != incarnation:
            return None
        return self._live.pop(worker_id)

    def _run(self, command: RunTask) -> None:
        worker = self._live[command.worker_id]
        if command.mates:
            self._run_together(_one_by_one(command), worker)
            return
        request, inputs = self._begin(command, worker)
        run = self._fleet.run(command.worker_id, command.incarnation, request, inputs)
        self._spawn(self._wait_for(command, worker, run))

    def _run_together(self, commands: Sequence[RunTask], worker: _LiveWorker) -> None:
        asked = [self._begin(command, worker) for command in commands]
        run = self._fleet.run_together(worker.spec.worker_id, worker.spec.incarnation, asked)
        self._spawn(self._wait_for_all(commands, worker, run))

    def _begin(self, command: RunTask, worker: _LiveWorker) -> Asked:
        """What to send for one task, which counts as running from now on."""
        self._runs_sent += 1
        request, inputs = self._book.begin(command, self._runs_sent)
        worker.runs[command.task_id] = StepDone(
            command.worker_id, command.incarnation, command.task_id, request.run, 0, 0
        )
        return request, inputs

    def _stop(self, command: StopTask) -> None:
        worker = self._live.get(command.worker_id)
        if worker is not None and worker.spec.incarnation == command.incarnation and command.task_id in worker.runs:
            self._fleet.stop(command.worker_id, command.incarnation, worker.runs[command.task_id].run)

    def _prefetch(self, command: Prefetch) -> None:
        worker = self._live.get(command.worker_id)
        parts = self._book.file_parts(command.components)
        if worker is not None and worker.spec.incarnation == command.incarnation and parts:
            self._fleet.read_ahead(command.worker_id, command.incarnation, parts)

    def _upload_ahead(self, command: UploadAhead) -> None:
        worker = self._live.get(command.worker_id)
        if worker is not None and worker.spec.incarnation == command.incarnation and worker.runs:
            first = next(iter(worker.runs.values())).run
            coming = self._book.coming(command)
            self._fleet.upload_ahead(command.worker_id, command.incarnation, first, coming)

    async def _wait_for(self, command: RunTask, worker: _LiveWorker, run: Run) -> None:
        try:
            report = await run.report
        except WorkerLost as raised:
            self._lose(command.worker_id, command.incarnation, str(raised))
            return
        except InputsLost as raised:
            report = _failed(command, worker, RunErrorKind.INPUT_LOST, str(raised))
        except Exception as raised:
            message = f"{type(raised).__name__}: {raised}"
            report = _failed(command, worker, RunErrorKind.INTERNAL, message, traceback.format_exc())
        self._end_run(report, run.result, worker)

    async def _wait_for_all(self, commands: Sequence[RunTask], worker: _LiveWorker, run: JointRun) -> None:
        """As `_wait_for`, for tasks that are run together: what goes wrong with the call goes wrong with each."""
        reports: Sequence[TaskReport]
        try:
            reports = await run.reports
        except WorkerLost as raised:
            self._lose(worker.spec.worker_id, worker.spec.incarnation, str(raised))
            return
        except InputsLost as raised:
            reports = [_failed(command, worker, RunErrorKind.INPUT_LOST, str(raised)) for command in commands]
        except Exception as raised:
            message, text = f"{type(raised).__name__}: {raised}", traceback.format_exc()
            reports = [_failed(command, worker, RunErrorKind.INTERNAL, message, text) for command in commands]
        for report, result in zip(reports, run.results, strict=True):
            self._end_run(report, result, worker)

    def _end_run(self, report: TaskReport, result: ResultRef, worker: _LiveWorker) -> None:
        if self._live.get(worker.spec.worker_id) is not worker:
            return  # answered by the worker's loss
        worker.residency = report.residency
        del worker.runs[report.task_id]
        self._book.end(report, result)
        self.tell(RunEnded(self.now, report))
        self._book.settle(report.task_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let `work` go on by itself; a mistake in it is as bad as one in the core."""
        wait = asyncio.ensure_future(work)
        self._waits.add(wait)
        wait.add_done_callback(self._ended)
        return wait

    def _ended(self, wait: asyncio.Task[None]) -> None:
        self._waits.discard(wait)
        mistake = None if wait.cancelled() else wait.exception()
        if mistake is not None:
            self._break(mistake)

    def _break(self, mistake: BaseException) -> None:
        if not self._broken:
            self._broken = True
            self._on_broken("".join(traceback.format_exception(mistake)))


def _one_by_one(command: RunTask) -> list[RunTask]:
    """What `command` says of its task and of each of the mates, as if they were run alone."""
    alone = replace(command, mates=())
    return [alone, *(replace(alone, task_id=mate.task_id, attempt=mate.attempt) for mate in command.mates)]


def _failed(
    command: RunTask, worker: _LiveWorker, kind: RunErrorKind, message: str, traceback_text: str = ""
) -> TaskReport:
    """The report of a run that could not make its own."""
    return TaskReport(
        task_id=command.task_id,
        attempt=command.attempt,
        worker_id=command.worker_id,
        incarnation=command.incarnation,
        residency=worker.residency,
        error=RunError(kind, message, traceback_text),
    )
