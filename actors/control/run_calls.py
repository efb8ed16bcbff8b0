"""The calls to workers: runs, alone, in batches or one after the other, and loads; and the ends that come back.

A run that was answered by its worker's loss, or by its revocation, is not answered again. Nothing waits for a worker
except in its own task.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from modelpool.actors.control.background import Background
from modelpool.actors.control.fleet import Clock, InputsLost, RunCall, SentRuns, WorkerFleet, WorkerLost
from modelpool.actors.control.live_workers import LiveWorker, LiveWorkers, loss_of
from modelpool.actors.control.pass_calls import PassCalls, PassRun
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    ResultRef,
    RunMode,
    StepDone,
)
from modelpool.pool.values.core.stage_params import DecodeParams
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import RunError, RunErrorKind, TaskId, TaskReport, WorkerId
from modelpool.scheduler.model.file_verdicts import Incarnation
from modelpool.scheduler.model.messages import (
    Event,
    LoadWeights,
    Prefetch,
    Preload,
    RevokeTask,
    RunEnded,
    RunInGang,
    RunTask,
    StopTask,
    TaskRevoked,
    WeightsLoaded,
)

logger = logging.getLogger(__name__)

#: stands for the result of a run that has none
NO_RESULT: ResultRef = None
#: a call of several runs that takes this long, some ten times as long as such calls should take, is asked for those
#: that are over, then at intervals that double
OVERDUE_CALL_SECONDS = 0.5
#: longest of these intervals: drivers hear of an output at most that late
LONGEST_POLL_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class _Call:
    """Runs that were sent together: a batch, or one after the other.

    previous  waits for the end of the call before, on the same worker: its runs are reported first
    """

    commands: Sequence[RunTask]
    runs: Sequence[RunCall]
    worker: LiveWorker
    id: CallId
    sent: SentRuns
    previous: asyncio.Task[None] | None

    @property
    def is_sequence(self) -> bool:
        """Whether several runs follow each other."""
        return len(self.runs) > 1 and self.id.mode is RunMode.IN_ORDER

    @property
    def is_first(self) -> bool:
        """Whether all runs of the call before were reported."""
        return self.previous is None or self.previous.done()


class RunCalls:
    """Sends tasks and loads to running workers. `post` receives their ends as events of the core."""

    def __init__(
        self,
        workers: LiveWorkers,
        fleet: WorkerFleet,
        clock: Clock,
        tasks: TaskStore,
        background: Background,
        post: Callable[[Event], None],
    ) -> None:
        self._workers = workers
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
        self._background = background
        self._post = post
        self._last_number = 0
        self._passes = PassCalls(workers, fleet, background, self._next_number, self._end_run, self._fail)
        #: parts of shared runs that wait to be sent, by number, with the request to stop that came meanwhile
        self._unsent: dict[int, StopTask | None] = {}
        #: questions to workers where the members of their gangs meet
        self._asking: dict[Incarnation, asyncio.Future[str]] = {}

    def send(self, commands: Sequence[RunTask], mode: RunMode = RunMode.IN_ORDER) -> None:
        """Send tasks to one worker, in one call: a batch, a pass, or one task after the other. Several are queued ones.
        Or let one join the pass of the worker."""
        worker = self._workers[commands[0].worker_id]
        runs = [self._begin(command, worker) for command in commands]
        if commands[0].is_open:
            in_pass = [PassRun(command, run) for command, run in zip(commands, runs, strict=True)]
            if commands[0].enters:
                self._passes.enter(worker, in_pass[0])
            else:
                self._passes.open(worker, in_pass)
            return
        # whatever is queued behind these tasks is reported after them
        call = self._sent(commands, runs, worker, worker.last_wait, mode)
        if commands[0].queued:
            worker.queued.update((command.task_id, None) for command in commands)
            worker.begin_queued()
        worker.last_wait = self._background.spawn(self._wait_for(call))

    def _sent(
        self,
        commands: Sequence[RunTask],
        runs: Sequence[RunCall],
        worker: LiveWorker,
        previous: asyncio.Task[None] | None,
        mode: RunMode = RunMode.IN_ORDER,
    ) -> _Call:
        """Send runs in one call, with the number of the first."""
        first = runs[0][0]
        call = CallId(first.run, mode, first.epoch)
        return _Call(commands, runs, worker, call, self._fleet.run(*worker.key, call, runs), previous)

    def send_part(self, command: RunInGang) -> None:
        """Send its part of a shared run to one member of the gang, once it is known where they meet."""
        worker = self._workers[command.run.worker_id]
        request, inputs = self._begin(command.run, worker, len(command.members))
        if command.rank:
            worker.parts.add(request.task.task_id)
        first = command.members[0]
        lead = self._workers.find(first.worker_id, first.incarnation)
        gang = Gang(
            f"{request.epoch}/{command.gang_id}",
            tuple(member.worker_id for member in command.members),
            command.rank,
            "" if lead is None else lead.gang_address,
        )
        call = (replace(request, gang=gang), inputs)
        if gang.address:
            self._send_part(command.run, call, worker)
        else:
            self._unsent[request.run] = None
            self._background.spawn(self._send_when_known(command, call, worker))

    def _send_part(self, run: RunTask, call: RunCall, worker: LiveWorker) -> None:
        sent = self._sent((run,), (call,), worker, worker.last_wait)
        worker.last_wait = self._background.spawn(self._wait_for(sent))

    async def _send_when_known(self, command: RunInGang, call: RunCall, worker: LiveWorker) -> None:
        """Ask the first member of a gang where they meet, then send another's part: unless it was asked to stop, or the
        first one is lost."""
        request, first = call[0], command.members[0]
        error = None
        try:
            address = await self._gang_address(first.worker_id, first.incarnation)
        except Exception as raised:
            address, error = "", RunError(RunErrorKind.GANG_BROKEN, f"{first.worker_id}: {raised}")
        stop = self._unsent.pop(request.run)
        if not self._is_under_way(worker, request.task.task_id, request.run):
            return
        if stop is not None:
            error = RunError(RunErrorKind.CANCELLED, "stopped before it was sent")
        gang = request.gang
        if error is None and gang is not None:
            self._send_part(command.run, (replace(request, gang=replace(gang, address=address)), call[1]), worker)
        elif error is not None:
            self._end_run(_failed(command.run, worker, error), NO_RESULT, worker, request.run)

    async def _gang_address(self, worker_id: WorkerId, incarnation: int) -> str:
        """Return where the members of the gangs that a worker leads meet; asked once per worker."""
        key = (worker_id, incarnation)
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._fleet.gang_address(*key))
            asking.add_done_callback(lambda done: self._asking.pop(key, None))
        address = await asyncio.shield(asking)
        lead = self._workers.find(*key)
        if lead is not None:
            lead.gang_address = address
        return address

    async def revoke(self, command: RevokeTask) -> None:
        """Take back a task that has not begun; otherwise its report follows, and is the answer."""
        worker = self._workers.find(command.worker_id, command.incarnation)
        known = None if worker is None else worker.runs.get(command.task_id)
        if worker is not None and known is not None and await self._fleet.revoke(*worker.key, known.run):
            self._end_revoked(command.task_id, command.attempt, known.run, worker)

    def stop(self, command: StopTask) -> None:
        """Ask a run to stop at its next step."""
        worker = self._workers.find(command.worker_id, command.incarnation)
        if worker is not None and command.task_id in worker.runs:
            number = worker.runs[command.task_id].run
            if number in self._unsent:
                self._unsent[number] = command
                return
            self._fleet.stop(*worker.key, worker.runs[command.task_id].run, command.keep_state)

    def prefetch(self, command: Prefetch) -> None:
        """Have the machine of a worker read files."""
        worker = self._workers.find(command.worker_id, command.incarnation)
        parts = self._tasks.file_parts(command.components)
        if worker is not None and parts:
            self._fleet.prefetch(*worker.key, parts)

    def preload(self, command: Preload) -> None:
        """Have a worker upload weights during its run."""
        worker = self._workers.find(command.worker_id, command.incarnation)
        if worker is not None and worker.runs:
            first = next(iter(worker.runs.values())).run
            self._fleet.preload(*worker.key, first, self._tasks.preload_request(command))

    def load(self, command: LoadWeights) -> None:
        """Have an idle worker load weights."""
        worker = self._workers[command.worker_id]
        worker.load = self._next_number()
        request = self._tasks.load_request(command, worker.load, worker.checked)
        self._background.spawn(self._wait_for_load(worker, request))

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _begin(self, command: RunTask, worker: LiveWorker, gpus: int = 1) -> RunCall:
        """Return what to send for one task, which counts as running on `gpus` GPUs from now on."""
        if worker.load:  # the run does not wait for it
            self._fleet.stop(*worker.key, worker.load)
            worker.load = 0
        # what has ended is held, although the core may not know it when it decides
        own = {need: worker.runs[need].run for need in command.follows if need in worker.runs}
        request, inputs = self._tasks.begin(command, self._next_number(), worker.checked, own, gpus)
        steps = self._tasks.steps_before(command)
        worker.runs[command.task_id] = StepDone(*worker.key, command.task_id, request.run, *steps)
        is_decode = isinstance(request.work, DecodeParams)  # an upscale is of this stage, too
        if is_decode or not worker.decodes.isdisjoint(own):
            worker.after_decode.add(command.task_id)
        if is_decode:
            worker.decodes.add(command.task_id)
        return request, inputs

    async def _wait_for_load(self, worker: LiveWorker, request: LoadRequest) -> None:
        try:
            report = await self._fleet.load(*worker.key, request)
        except WorkerLost as raised:
            self._workers.lose(*worker.key, loss_of(raised))
            return
        except Exception as raised:
            report = LoadReport(worker.residency, _internal_error(raised))
        if not self._workers.has(worker):
            return
        if worker.load == request.run:  # no run has started since
            worker.load, worker.residency = 0, report.residency
        if report.error is None:
            worker.checked.update((file.component, file.part) for file in request.files)
        elif report.error.components:
            worker.uncheck(report.error.components)
        self._post(WeightsLoaded(self._clock.now(), *worker.key, report.residency, report.error))

    async def _wait_for(self, call: _Call) -> None:
        """Wait for the ends of the runs of a call, and report them after the ends of the call before. If the call
        fails, each of several is sent again alone: one of them, or an input of one, is the cause. A failed batch fails
        every task of it."""
        worker = call.worker
        try:
            reports = await (self._reports_in_order(call) if call.is_sequence else call.sent.reports)
            error = None
        except WorkerLost as raised:
            self._workers.lose(*worker.key, loss_of(raised))
            return
        except Exception as raised:
            if call.is_sequence:
                logger.info("a call of %d runs failed, which are sent again: %s", len(call.runs), raised)
                await self._run_each_alone(call)
                return
            reports, error = (), _call_error(raised)
        if call.previous is not None and not call.is_first:
            await asyncio.wait((call.previous,))
        if error is not None:  # with what is on the GPU after the runs before
            reports = [_failed(command, worker, error) for command in call.commands]
        await self._end_in_order(call, reports, call.sent.results)

    async def _run_each_alone(self, call: _Call) -> None:
        for command, run in zip(call.commands, call.runs, strict=True):
            if self._is_under_way(call.worker, command.task_id, run[0].run):
                await self._wait_for(self._sent((command,), (run,), call.worker, call.previous))

    async def _reports_in_order(self, call: _Call) -> Sequence[TaskReport | None]:
        """Wait for the reports of a call. If one of its runs takes long, ask for those that are over, and end them."""
        reports = asyncio.ensure_future(call.sent.reports)
        intervals = poll_intervals(OVERDUE_CALL_SECONDS)
        try:
            while not (await asyncio.wait((reports,), timeout=next(intervals)))[0]:
                if not self._workers.has(call.worker) or not call.is_first:
                    continue
                over = self._fleet.ends(*call.worker.key, EndsWanted(call.id, most=len(call.runs)))
                try:
                    found = await over.reports
                except Exception as failed:  # whatever it means for the worker, the call itself says so, too
                    logger.info("a worker does not answer which runs of a call are over: %s", failed)
                    continue
                await self._end_in_order(call, found, over.results)
        finally:
            reports.cancel()
        return reports.result()

    async def _end_in_order(
        self, call: _Call, reports: Sequence[TaskReport | None], results: Sequence[ResultRef]
    ) -> None:
        """End the first runs of a call, as many as there are reports. Callers of the controller get their turn in
        between: an end can start other runs, and takes some milliseconds."""
        for place, (command, (request, _), report) in enumerate(zip(call.commands, call.runs, reports, strict=False)):
            if place:
                await asyncio.sleep(0)
            if report is None:
                self._end_revoked(command.task_id, command.attempt, request.run, call.worker)
            else:
                self._end_run(report, results[place], call.worker, request.run)

    def _end_run(self, report: TaskReport, result: ResultRef, worker: LiveWorker, number: int) -> None:
        if not self._is_under_way(worker, report.task_id, number):
            return
        self._workers.heard(worker.key)
        worker.residency = report.residency
        is_part = report.task_id in worker.parts
        worker.end(report.task_id)
        if report.error is None:
            worker.checked.update(self._tasks.files(report.task_id))
        elif report.error.components:  # the file may come, and must be checked then
            worker.uncheck(report.error.components)
        if is_part:
            self._tasks.end_part(report, result)
            self._post(RunEnded(self._clock.now(), report))
            self._tasks.settle(report.task_id)
            return
        task = self._tasks.end(report, result, worker.spec.device_name)
        self._post(RunEnded(self._clock.now(), report))
        self._tasks.settle_ended(task, report)

    def _fail(self, run: PassRun, worker: LiveWorker, raised: Exception) -> None:
        """A run in a pass could not report itself."""
        report = _failed(run.command, worker, _call_error(raised))
        self._end_run(report, None, worker, run.number)

    def _end_revoked(self, task_id: TaskId, attempt: int, number: int, worker: LiveWorker) -> None:
        """A run will not begin. Answered once: both the revocation and the run itself say so."""
        if not self._is_under_way(worker, task_id, number):
            return
        self._workers.heard(worker.key)
        worker.end(task_id)
        self._tasks.abandon(task_id)
        self._post(TaskRevoked(self._clock.now(), *worker.key, task_id, attempt))
        self._tasks.settle(task_id)

    def _is_under_way(self, worker: LiveWorker, task_id: TaskId, number: int) -> bool:
        """Return whether the run was not answered yet: by its end, its revocation, or the loss of its worker."""
        return worker.is_running(task_id, number) and self._workers.has(worker)


def poll_intervals(seconds: float) -> Iterator[float]:
    """Yield the seconds between questions about a call that takes long: the first, then twice as long each, up to
    `LONGEST_POLL_SECONDS`. Endless."""
    while True:
        yield seconds
        seconds = min(2.0 * seconds, LONGEST_POLL_SECONDS)


def _call_error(raised: Exception) -> RunError:
    """Return the error of the runs of a call that failed."""
    return RunError(RunErrorKind.INPUT_LOST, str(raised)) if isinstance(raised, InputsLost) else _internal_error(raised)


def _internal_error(raised: Exception) -> RunError:
    text = "".join(traceback.format_exception(raised))
    return RunError(RunErrorKind.INTERNAL, f"{type(raised).__name__}: {raised}", text)


def _failed(command: RunTask, worker: LiveWorker, error: RunError) -> TaskReport:
    """Return the report of a run that could not report itself."""
    return TaskReport(
        task_id=command.task_id,
        attempt=command.attempt,
        worker_id=command.worker_id,
        incarnation=command.incarnation,
        residency=worker.residency,
        error=error,
    )
