"""`Dispatcher`: runs one `SchedulerState`: executes its commands and feeds it the resulting events.

Rules
1. `post` is the only entry to the core; events that arise while it works are queued.
2. A worker's loss is reported once, by whichever comes first: the failed run or the ended watch. A run that was
   answered by its worker's loss is not answered again.
3. Everything runs on one event loop. Nothing waits for a worker except in its own task.
4. A worker that does not answer is ended and reported as lost, and a start as failed: `beat` is called regularly.

Knows no Ray (a `WorkerFleet` does the work) and no driver (a callback resolves jobs).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelpool.actors.control.fleet import (
    Clock,
    InputsLost,
    RunCall,
    SentRuns,
    WorkerFleet,
    WorkerLost,
)
from modelpool.actors.control.heartbeats import Heartbeats, patience_seconds
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.task_store import CheckedFile, TaskStore
from modelpool.actors.worker.wire.messages import LoadReport, LoadRequest, ResultRef, StateSaved, StepDone
from modelpool.pool.values.core.stage_params import DecodeParams
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    FileVerdict,
    JudgedFile,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.kept_states import task_of_state
from modelpool.scheduler.model.messages import (
    Command,
    CopyResult,
    DropWeights,
    EndWorker,
    Event,
    FilesJudged,
    LoadWeights,
    Prefetch,
    Preload,
    PruneComponents,
    ReleaseResult,
    ResolveJob,
    ResultLost,
    RevokeTask,
    RunEnded,
    RunTask,
    ScheduleTick,
    StartFailed,
    StartWorker,
    StateKept,
    StopTask,
    TaskRevoked,
    Tick,
    WeightsLoaded,
    WorkerDown,
    WorkerUp,
)

logger = logging.getLogger(__name__)

#: a call of several runs that takes this long, some ten times as long as such calls should take, is asked for those
#: that are over, then at intervals that double
OVERDUE_CALL_SECONDS = 0.5
#: longest of these intervals: drivers hear of an output at most that late
LONGEST_POLL_SECONDS = 8.0


class _LiveWorker:
    """A running worker: its runs with their progress, in the order in which it begins them, and the residency it last
    reported."""

    def __init__(self, spec: WorkerSpec, residency: Residency | None = None) -> None:
        self.spec = spec
        self.residency = residency or Residency(spec.capacity_bytes)
        self.runs: dict[TaskId, StepDone] = {}
        #: those of them that begin when the others have ended, one after the other
        self.queued: dict[TaskId, None] = {}
        #: those of them that decode; and those that wait for it: other decodes, and what reads the result
        self.decodes: set[TaskId] = set()
        self.after_decode: set[TaskId] = set()
        #: waits for the end of the run that was sent last
        self.last_wait: asyncio.Task[None] | None = None
        #: components and files of these that it has checked
        self.checked: set[CheckedFile] = set()
        #: the number of a load without a run that is under way; 0 if there is none
        self.load = 0

    def uncheck(self, components: Collection[ComponentKey]) -> None:
        """Forget that the files of these components were checked."""
        self.checked = {file for file in self.checked if file[0] not in components}

    def end(self, task_id: TaskId) -> None:
        """Forget a run."""
        del self.runs[task_id]
        self.queued.pop(task_id, None)
        self.decodes.discard(task_id)
        self.after_decode.discard(task_id)
        self.begin_queued()

    def begin_queued(self) -> None:
        """Begin what begins by itself: the next run after the last one that had begun. Behind a decode that may mean
        while it is still computed, and counts as begun then."""
        begun = [task_id for task_id in self.runs if task_id not in self.queued]
        if self.queued and not begun:
            begun = [next(iter(self.queued))]
            del self.queued[begun[0]]
        if self.queued and self.spec.overlaps_decode and len(begun) == 1 and begun[0] in self.decodes:
            following = next(iter(self.queued))
            if following not in self.after_decode:
                del self.queued[following]


class Dispatcher:
    """Runs the core. `on_resolved` is called for every job's end, while its result is still held.

    `on_handled` receives every event with the core's commands, in the order of the events: before the commands are
    executed, but after tasks were sent to workers, which wait for nothing else. `on_broken` is called once, with a
    text, if core or dispatcher fail because of a bug; nothing is dispatched afterwards.
    """

    def __init__(
        self,
        state: SchedulerState,
        fleet: WorkerFleet,
        clock: Clock,
        tasks: TaskStore,
        on_resolved: Callable[[ResolveJob], None],
        on_changed: Callable[[], None],
        on_broken: Callable[[str], None],
        on_handled: Callable[[Event, Sequence[Command]], None] = lambda event, commands: None,
        heartbeat_seconds: float | None = None,
    ) -> None:
        """With `heartbeat_seconds`, `beat` is called at this interval."""
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
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
        #: all background tasks; kept here because the event loop only has weak references
        self._waits: set[asyncio.Task[None]] = set()
        self._troubles: dict[WorkerId, str] = {}
        self._heartbeats: Heartbeats[tuple[WorkerId, int]] | None = None
        if heartbeat_seconds is not None:
            self._heartbeats = Heartbeats(heartbeat_seconds, clock.now())
        self._runs_sent = 0

    @property
    def now(self) -> float:
        """The time for the next event."""
        return self._clock.now()

    @property
    def live_workers(self) -> tuple[WorkerSpec, ...]:
        """The running workers."""
        return tuple(worker.spec for worker in self._live.values())

    @property
    def troubles(self) -> Mapping[WorkerId, str]:
        """The latest reason why each worker was lost or did not start."""
        return self._troubles

    @property
    def silent(self) -> Mapping[WorkerId, float]:
        """The workers that do not answer, and for how many seconds."""
        found = {} if self._heartbeats is None else self._heartbeats.silent()
        return {worker_id: seconds for (worker_id, _), seconds in found.items()}

    def running(self) -> tuple[StepDone, ...]:
        """Return the active runs and their progress."""
        return tuple(
            step
            for worker in self._live.values()
            for task_id, step in worker.runs.items()
            if task_id not in worker.queued
        )

    def post(self, event: Event) -> None:
        """Let the core handle `event`, and execute its commands."""
        self._inbox.append(event)
        if self._handling or self._broken:
            return
        self._handling = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        except Exception as mistake:
            self._break(mistake)
        finally:
            self._handling = False
        self._on_changed()

    def prune_components(self) -> None:
        """Forget the sizes and files of components that no task uses and no worker holds."""
        self.post(PruneComponents(self.now))
        self._tasks.prune_files(self._state.costs.components)
        for worker in self._live.values():
            worker.checked = {file for file in worker.checked if file[0] in self._state.costs.components}

    def _handle(self, event: Event) -> None:
        """Let the core handle `event`, and execute its commands. If the core fails, the event is noted without
        commands; if a start fails, with them."""
        commands: list[Command] = []
        last: Sequence[Command] = ()
        try:
            commands = self._state.handle(event)
            first, last = _starts_first(commands)
            for command in first:
                if isinstance(command, list):
                    self._run(command)
                else:
                    self._execute(command)
        finally:
            self._on_handled(event, commands)
        for command in last:
            self._execute(command)

    def beat(self) -> None:
        """Ask the workers that sent nothing since the last beat whether they answer, and give up those that have not
        answered for too long."""
        if self._heartbeats is None or self._broken:
            return
        for key in self._heartbeats.beat(self.now):
            answer = self._fleet.ping(*key)
            if answer is None:
                self._heartbeats.heard(key)  # it waits for a node, which may take any time
            else:
                self._spawn(self._await_answer(key, answer))
        for key, seconds in self._heartbeats.silent().items():
            if seconds >= patience_seconds(self._heartbeats.interval_seconds, self._repeated_seconds(key)):
                self._heartbeats.forget(key)
                self._spawn(self._give_up(key, seconds))

    async def _await_answer(self, key: tuple[WorkerId, int], answer: Awaitable[object]) -> None:
        try:
            await answer
        except Exception:  # it is gone: reported by whoever waits for its end
            return
        self._heard(key)

    def _heard(self, key: tuple[WorkerId, int]) -> None:
        if self._heartbeats is not None:
            self._heartbeats.heard(key)

    def _repeated_seconds(self, key: tuple[WorkerId, int]) -> float | None:
        """Return the expected length of the run that would be repeated without this worker; None if unknown."""
        worker = self._state.worker_table.current(*key)
        if worker is None or not worker.live:
            return None
        if worker.task_id is None:
            return 0.0
        if worker.expected_end is None:
            return None
        return worker.expected_end - self._state.demand.tasks[worker.task_id].started_at

    async def _give_up(self, key: tuple[WorkerId, int], silent_seconds: float) -> None:
        start = self._starts.get(key)
        if start is not None:
            start.cancel()
        loss = await self._fleet.why_silent(*key, silent_seconds)
        if start is None:
            self._lose(*key, loss)
        elif self._starts.get(key) is start:  # the core has not withdrawn it in between
            self._start_failed(*key, loss)

    def step_done(self, step: StepDone) -> bool:
        """Note the progress of a worker. False if it is out of date."""
        if not self.is_running(step.worker_id, step.incarnation, step.task_id, step.run):
            return False
        self._live[step.worker_id].runs[step.task_id] = step
        return True

    def is_running(self, worker_id: WorkerId, incarnation: int, task_id: TaskId, run: int) -> bool:
        """Whether this run is under way on that worker, which has answered just now."""
        self._heard((worker_id, incarnation))
        worker = self._live.get(worker_id)
        if worker is None or worker.spec.incarnation != incarnation:
            return False
        known = worker.runs.get(task_id)
        return known is not None and known.run == run

    def files_judged(self, worker_id: WorkerId, incarnation: int, files: tuple[JudgedFile, ...]) -> None:
        """Have the core know what a worker has found out about files."""
        self._heard((worker_id, incarnation))
        worker = self._live.get(worker_id)
        if worker is not None and worker.spec.incarnation == incarnation:
            wrong = [file for file in files if file.verdict is not FileVerdict.RIGHT]
            if wrong:
                worker.checked.clear()  # the right file may come, and must be checked then
                self._tasks.refuted(worker_id, incarnation, wrong)
            self.post(FilesJudged(self.now, worker_id, incarnation, files))

    def state_saved(self, saved: StateSaved, state: ResultRef) -> bool:
        """Hold the state of a run that continues. Ignored, and False, if the run ended: then it has a result or a newer
        state."""
        worker = self._live.get(saved.worker_id)
        if worker is None or worker.spec.incarnation != saved.incarnation:
            return False
        known = worker.runs.get(saved.task_id)
        if known is None or known.run != saved.run or not self._tasks.keep_state(saved, state):
            return False
        self.state_kept(saved)
        return True

    def state_kept(self, saved: StateSaved) -> None:
        """Have the core know of a state that is held."""
        self.post(
            StateKept(
                self.now,
                saved.worker_id,
                saved.incarnation,
                saved.task_id,
                saved.attempt,
                saved.step,
                saved.steps,
                saved.state_bytes,
            )
        )

    def close(self) -> None:
        """Stop all workers and background tasks. Causes no events."""
        self._broken = True
        for wait in tuple(self._waits):
            wait.cancel()
        for worker_id, incarnation in (*self._starts, *self._watches):
            self._fleet.end(worker_id, incarnation)
        self._live.clear()

    def _execute(self, command: Command) -> None:
        match command:
            case StartWorker():
                key = (command.worker_id, command.incarnation)
                self._starts[key] = self._spawn(self._start(command))
                if self._heartbeats is not None:
                    self._heartbeats.watch(key)
            case EndWorker():
                self._end(command.worker_id, command.incarnation)
            case RunTask():
                self._run(_one_by_one(command), as_batch=bool(command.batch_mates))
            case RevokeTask():
                self._spawn(self._revoke(command))
            case StopTask():
                self._stop(command)
            case Prefetch():
                self._prefetch(command)
            case Preload():
                self._preload(command)
            case LoadWeights():
                self._load(command)
            case DropWeights():
                self._fleet.drop_weights(command.worker_id, command.incarnation)
            case CopyResult():
                self._spawn(self._copy(command.task_id))
            case ReleaseResult():
                self._tasks.release(command.task_id)
            case ResolveJob():
                self._on_resolved(command)
            case ScheduleTick():
                self._spawn(self._tick_after(command.after_seconds))

    async def _copy(self, task_id: TaskId) -> None:
        """Copy a result to this machine; report it as lost if that is impossible."""
        ref = self._tasks.find(task_id)
        if ref is None:
            return
        try:
            copy = await self._fleet.copy_result(ref)
        except Exception as failed:
            if not isinstance(failed, InputsLost):  # no room for the copy, say: the original is still readable
                logger.warning("a result could not be copied: %s: %s", type(failed).__name__, failed)
                return
            if self._tasks.find(task_id) is ref:
                self._tasks.release(task_id)
                self.post(ResultLost(self.now, task_id))
            return
        self._tasks.replace(task_id, ref, copy)

    async def _tick_after(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self.post(Tick(self.now))

    async def _start(self, command: StartWorker) -> None:
        worker_id, incarnation = command.worker_id, command.incarnation
        try:
            if command.delay_seconds:
                await self._clock.sleep(command.delay_seconds)
            started = await self._fleet.start(worker_id, incarnation, command.group)
        except Exception as raised:
            self._start_failed(worker_id, incarnation, _start_loss(raised))
            return
        spec = started.spec
        self._starts.pop((worker_id, incarnation), None)
        self._live[worker_id] = _LiveWorker(spec, started.residency)
        if spec.files_address:
            self._tasks.file_servers[spec.node] = spec.files_address
        self._watches[worker_id, incarnation] = self._spawn(self._watch(worker_id, incarnation))
        self.post(WorkerUp(self.now, spec, started.residency, started.past_runs))

    def _start_failed(self, worker_id: WorkerId, incarnation: int, loss: Loss) -> None:
        self._fleet.end(worker_id, incarnation)
        self._unwatch((worker_id, incarnation))
        self._starts.pop((worker_id, incarnation), None)
        self._troubles[worker_id] = loss.reason
        self.post(StartFailed(self.now, worker_id, incarnation, loss.reason, loss.cause))

    def _unwatch(self, key: tuple[WorkerId, int]) -> None:
        if self._heartbeats is not None:
            self._heartbeats.forget(key)

    async def _watch(self, worker_id: WorkerId, incarnation: int) -> None:
        try:
            loss = await self._fleet.gone(worker_id, incarnation)
        except Exception as raised:
            loss = Loss(f"{type(raised).__name__}: {raised}")
        self._lose(worker_id, incarnation, loss)

    def _end(self, worker_id: WorkerId, incarnation: int) -> None:
        """End a worker on the core's command; causes no event, neither for the worker nor for its runs."""
        start = self._starts.pop((worker_id, incarnation), None)
        if start is not None:
            start.cancel()
        ended = self._forget(worker_id, incarnation)
        self._fleet.end(worker_id, incarnation)
        for task_id in ended.runs if ended is not None else ():
            self._tasks.abandon(task_id)

    def _lose(self, worker_id: WorkerId, incarnation: int, loss: Loss) -> None:
        """End what is left of a lost worker, and report the loss once."""
        lost = self._forget(worker_id, incarnation)
        if lost is None:
            return
        self._fleet.end(worker_id, incarnation)
        for task_id in lost.runs:
            self._tasks.abandon(task_id, "" if task_id in lost.queued else f"{worker_id}: {loss.reason}")
        self._troubles[worker_id] = loss.reason
        self.post(WorkerDown(self.now, worker_id, incarnation, loss.reason, loss.cause))

    def _forget(self, worker_id: WorkerId, incarnation: int) -> _LiveWorker | None:
        self._unwatch((worker_id, incarnation))
        watch = self._watches.pop((worker_id, incarnation), None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        worker = self._live.get(worker_id)
        if worker is None or worker.spec.incarnation != incarnation:
            return None
        lost = self._live.pop(worker_id)
        if lost.spec.files_address:  # another worker of its node may have one too
            specs = [worker.spec for worker in self._live.values()]
            self._tasks.file_servers = {spec.node: spec.files_address for spec in specs if spec.files_address}
        return lost

    def _run(self, commands: Sequence[RunTask], as_batch: bool = False) -> None:
        """Send tasks to one worker, in one call: a batch, or one task after the other. Several are queued ones."""
        worker = self._live[commands[0].worker_id]
        calls = [self._begin(command, worker) for command in commands]
        run = self._fleet.run(worker.spec.worker_id, worker.spec.incarnation, calls, as_batch)
        if commands[0].queued:
            worker.queued.update((command.task_id, None) for command in commands)
            worker.begin_queued()
        # whatever is queued behind these tasks is reported after them
        worker.last_wait = self._spawn(self._wait_for(commands, calls, worker, run, worker.last_wait, as_batch))

    def _begin(self, command: RunTask, worker: _LiveWorker) -> RunCall:
        """Return what to send for one task, which counts as running from now on."""
        if worker.load:  # the run does not wait for it
            self._fleet.stop(command.worker_id, command.incarnation, worker.load)
            worker.load = 0
        self._runs_sent += 1
        # what has ended is held, although the core may not know it when it decides
        own = {need: worker.runs[need].run for need in command.follows if need in worker.runs}
        request, inputs = self._tasks.begin(command, self._runs_sent, worker.checked, own)
        worker.runs[command.task_id] = StepDone(
            command.worker_id,
            command.incarnation,
            command.task_id,
            request.run,
            *self._tasks.steps_before(command),
        )
        is_decode = isinstance(request.work, DecodeParams)  # an upscale is of this stage, too
        if is_decode or not worker.decodes.isdisjoint(own):
            worker.after_decode.add(command.task_id)
        if is_decode:
            worker.decodes.add(command.task_id)
        return request, inputs

    async def _revoke(self, command: RevokeTask) -> None:
        """Take back a task that has not begun; otherwise its report follows, and is the answer."""
        worker = self._live.get(command.worker_id)
        known = None if worker is None else worker.runs.get(command.task_id)
        if worker is None or known is None or worker.spec.incarnation != command.incarnation:
            return
        if await self._fleet.revoke(command.worker_id, command.incarnation, known.run):
            self._end_revoked(command.task_id, command.attempt, known.run, worker)

    def _end_revoked(self, task_id: TaskId, attempt: int, run: int, worker: _LiveWorker) -> None:
        """A run will not begin. Answered once: both the revocation and the run itself say so."""
        known = worker.runs.get(task_id)
        if self._live.get(worker.spec.worker_id) is not worker or known is None or known.run != run:
            return
        self._heard((worker.spec.worker_id, worker.spec.incarnation))
        worker.end(task_id)
        self._tasks.abandon(task_id)
        self.post(TaskRevoked(self.now, worker.spec.worker_id, worker.spec.incarnation, task_id, attempt))
        self._tasks.settle(task_id)

    def _stop(self, command: StopTask) -> None:
        worker = self._live.get(command.worker_id)
        if worker is not None and worker.spec.incarnation == command.incarnation and command.task_id in worker.runs:
            run = worker.runs[command.task_id].run
            self._fleet.stop(command.worker_id, command.incarnation, run, command.keep_state)

    def _prefetch(self, command: Prefetch) -> None:
        worker = self._live.get(command.worker_id)
        parts = self._tasks.file_parts(command.components)
        if worker is not None and worker.spec.incarnation == command.incarnation and parts:
            self._fleet.prefetch(command.worker_id, command.incarnation, parts)

    def _preload(self, command: Preload) -> None:
        worker = self._live.get(command.worker_id)
        if worker is not None and worker.spec.incarnation == command.incarnation and worker.runs:
            first = next(iter(worker.runs.values())).run
            preload_request = self._tasks.preload_request(command)
            self._fleet.preload(command.worker_id, command.incarnation, first, preload_request)

    def _load(self, command: LoadWeights) -> None:
        worker = self._live[command.worker_id]
        self._runs_sent += 1
        worker.load = self._runs_sent
        request = self._tasks.load_request(command, worker.load, worker.checked)
        self._spawn(self._wait_for_load(command, worker, request))

    async def _wait_for_load(self, command: LoadWeights, worker: _LiveWorker, request: LoadRequest) -> None:
        try:
            report = await self._fleet.load(command.worker_id, command.incarnation, request)
        except WorkerLost as raised:
            self._lose(command.worker_id, command.incarnation, Loss(str(raised), raised.cause))
            return
        except Exception as raised:
            message = f"{type(raised).__name__}: {raised}"
            error = RunError(RunErrorKind.INTERNAL, message, traceback.format_exc())
            report = LoadReport(worker.residency, error)
        if self._live.get(command.worker_id) is not worker:
            return
        if worker.load == request.run:  # no run has started since
            worker.load, worker.residency = 0, report.residency
        if report.error is None:
            worker.checked.update((file.component, file.part) for file in request.files)
        elif report.error.components:
            worker.uncheck(report.error.components)
        self.post(WeightsLoaded(self.now, command.worker_id, command.incarnation, report.residency, report.error))

    async def _wait_for(
        self,
        commands: Sequence[RunTask],
        calls: Sequence[RunCall],
        worker: _LiveWorker,
        run: SentRuns,
        previous: asyncio.Task[None] | None,
        as_batch: bool,
    ) -> None:
        """Wait for the ends of the runs of a call. They are reported after those of the `previous` call to the worker.
        If the call fails, each of several is sent again alone: one of them, or an input of one, is the cause. A failed
        batch fails every task of it."""
        one_by_one = len(calls) > 1 and not as_batch
        reports: Sequence[TaskReport | None] = ()
        error: RunError | None = None
        try:
            reports = await (
                self._reports_in_order(commands, calls, worker, run, previous) if one_by_one else run.reports
            )
        except WorkerLost as raised:
            self._lose(worker.spec.worker_id, worker.spec.incarnation, Loss(str(raised), raised.cause))
            return
        except Exception as raised:
            if one_by_one:
                logger.info("a call of %d runs failed, which are sent again: %s", len(calls), raised)
                await self._run_each_alone(commands, calls, worker, previous)
                return
            error = _call_error(raised)
        if previous is not None and not previous.done():
            await asyncio.wait((previous,))
        if error is not None:  # with what is on the GPU after the runs before
            reports = [_failed(command, worker, error) for command in commands]
        await self._end_in_order(commands, calls, worker, reports, run.results)

    async def _run_each_alone(
        self,
        commands: Sequence[RunTask],
        calls: Sequence[RunCall],
        worker: _LiveWorker,
        previous: asyncio.Task[None] | None,
    ) -> None:
        for command, call in zip(commands, calls, strict=True):
            known, number = worker.runs.get(command.task_id), call[0].run
            if self._live.get(command.worker_id) is worker and known is not None and known.run == number:
                alone = self._fleet.run(command.worker_id, command.incarnation, (call,))
                await self._wait_for((command,), (call,), worker, alone, previous, False)

    async def _reports_in_order(
        self,
        commands: Sequence[RunTask],
        calls: Sequence[RunCall],
        worker: _LiveWorker,
        run: SentRuns,
        previous: asyncio.Task[None] | None,
    ) -> Sequence[TaskReport | None]:
        """Wait for the reports of a call. If one of its runs takes long, ask for those that are over, and end them."""
        reports = asyncio.ensure_future(run.reports)
        intervals = poll_intervals(OVERDUE_CALL_SECONDS)
        try:
            while not (await asyncio.wait((reports,), timeout=next(intervals)))[0]:
                if self._live.get(worker.spec.worker_id) is not worker or not (previous is None or previous.done()):
                    continue
                numbers = [request.run for request, _ in calls]
                over = self._fleet.over(worker.spec.worker_id, worker.spec.incarnation, numbers)
                try:
                    found = await over.reports
                except Exception as failed:  # whatever it means for the worker, the call itself says so, too
                    logger.info("a worker does not answer which runs of a call are over: %s", failed)
                    continue
                await self._end_in_order(commands, calls, worker, found, over.results)
        finally:
            reports.cancel()
        return reports.result()

    async def _end_in_order(
        self,
        commands: Sequence[RunTask],
        calls: Sequence[RunCall],
        worker: _LiveWorker,
        reports: Sequence[TaskReport | None],
        results: Sequence[ResultRef],
    ) -> None:
        """End the first runs of a call, as many as there are reports. Callers of the controller get their turn in
        between: an end can start other runs, and takes some milliseconds."""
        for place, (command, (request, _), report) in enumerate(zip(commands, calls, reports, strict=False)):
            if place:
                await asyncio.sleep(0)
            if report is None:
                self._end_revoked(command.task_id, command.attempt, request.run, worker)
            else:
                self._end_run(report, results[place], worker, request.run)

    def _end_run(self, report: TaskReport, result: ResultRef, worker: _LiveWorker, number: int) -> None:
        known = worker.runs.get(report.task_id)
        if self._live.get(worker.spec.worker_id) is not worker or known is None or known.run != number:
            return  # answered by the worker's loss, or by its revocation
        self._heard((worker.spec.worker_id, worker.spec.incarnation))
        worker.residency = report.residency
        worker.end(report.task_id)
        if report.error is None:
            worker.checked.update(self._tasks.files(report.task_id))
        elif report.error.components:  # the file may come, and must be checked then
            worker.uncheck(report.error.components)
        task = self._tasks.end(report, result, worker.spec.device_name)
        self.post(RunEnded(self.now, report))
        self._tasks.settle_ended(task, report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; a bug in it is as fatal as one in the core."""
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


def poll_intervals(seconds: float) -> Iterator[float]:
    """Yield the seconds between questions about a call that takes long: the first, then twice as long each, up to
    `LONGEST_POLL_SECONDS`. Endless."""
    while True:
        yield seconds
        seconds = min(2.0 * seconds, LONGEST_POLL_SECONDS)


def _starts_first(commands: list[Command]) -> tuple[Sequence[Command | list[RunTask]], Sequence[Command]]:
    """Return the commands that are executed first, and those for which no worker waits: what informs drivers, and frees
    results. A task that starts reads none of these results, and their order stays. Tasks that are sent in one call
    become a list. Without a task, none are first."""
    if not any(isinstance(command, RunTask) for command in commands):
        return (), commands
    first, last = list[Command | list[RunTask]](), list[Command]()
    #: places in `first` of the latest queued tasks, by worker
    places: dict[WorkerId, int] = {}
    for command in commands:
        if isinstance(command, RunTask) and command.queued:
            if command.joins:
                place = places[command.worker_id]
                call = first[place]
                if isinstance(call, list):
                    call.append(command)
                elif isinstance(call, RunTask):
                    first[place] = [call, command]
                continue
            places[command.worker_id] = len(first)
        can_wait = isinstance(command, ResolveJob) or (
            isinstance(command, ReleaseResult) and task_of_state(command.task_id) is None
        )
        if can_wait:
            last.append(command)
        else:
            first.append(command)
    return first, last


def _one_by_one(command: RunTask) -> list[RunTask]:
    """Split `command` into one command for its task and each batch mate."""
    if not command.batch_mates:
        return [command]
    alone = replace(command, batch_mates=())
    return [alone, *(replace(alone, task_id=mate.task_id, attempt=mate.attempt) for mate in command.batch_mates)]


def _start_loss(raised: Exception) -> Loss:
    """Return why a worker did not start."""
    if isinstance(raised, WorkerLost):
        return Loss(str(raised), raised.cause)
    return Loss(f"{type(raised).__name__}: {raised}")


def _call_error(raised: Exception) -> RunError:
    """Return the error of the runs of a call that failed."""
    if isinstance(raised, InputsLost):
        return RunError(RunErrorKind.INPUT_LOST, str(raised))
    text = "".join(traceback.format_exception(raised))
    return RunError(RunErrorKind.INTERNAL, f"{type(raised).__name__}: {raised}", text)


def _failed(command: RunTask, worker: _LiveWorker, error: RunError) -> TaskReport:
    """Return the report of a run that could not report itself."""
    return TaskReport(
        task_id=command.task_id,
        attempt=command.attempt,
        worker_id=command.worker_id,
        incarnation=command.incarnation,
        residency=worker.residency,
        error=error,
    )
