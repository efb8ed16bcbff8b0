"""`Dispatcher`: runs one `SchedulerState`: executes its commands and feeds it the resulting events.

Rules
1. `post` is the only entry to the core; events that arise while it works are queued.
2. Everything runs on one event loop.

Knows no Ray (a `WorkerFleet` does the work) and no driver (a callback resolves jobs).
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from modelpool.actors.control.background import Background
from modelpool.actors.control.fleet import Clock, InputsLost, WorkerFleet
from modelpool.actors.control.live_workers import LiveWorkers
from modelpool.actors.control.run_calls import RunCalls
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.worker.wire.messages import ResultRef, RunMode, StateSaved, StepDone
from modelpool.pool.values.specs.spec import FileVerdict, JudgedFile, TaskId, WorkerId
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
    RunInGang,
    RunTask,
    ScheduleTick,
    StartWorker,
    StateKept,
    StopTask,
    Tick,
)

logger = logging.getLogger(__name__)


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
        self._background = Background(self._break)
        self.workers = LiveWorkers(state, fleet, clock, tasks, self._background, self.post, heartbeat_seconds)
        self._calls = RunCalls(self.workers, fleet, clock, tasks, self._background, self.post)
        self._on_resolved = on_resolved
        self._on_changed = on_changed
        self._on_broken = on_broken
        self._on_handled = on_handled
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._broken = False

    @property
    def now(self) -> float:
        """The time for the next event."""
        return self._clock.now()

    def beat(self) -> None:
        """Ask silent workers whether they answer, and give up those that have not for too long."""
        if not self._broken:
            self.workers.beat()

    def running(self) -> tuple[StepDone, ...]:
        """Return the active runs and their progress."""
        return tuple(
            step for worker in self.workers for task_id, step in worker.runs.items() if task_id not in worker.queued
        )

    def sent(self) -> tuple[StepDone, ...]:
        """Return the runs that workers have: active ones, and those that wait there for their turn."""
        return tuple(step for worker in self.workers for step in worker.runs.values())

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
        for worker in self.workers:
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
                    self._calls.send(command)
                else:
                    self._execute(command)
        finally:
            self._on_handled(event, commands)
        for command in last:
            self._execute(command)

    def step_done(self, step: StepDone) -> bool:
        """Note the progress of a worker. False if it is out of date."""
        if not self.is_running(step.worker_id, step.incarnation, step.task_id, step.run):
            return False
        worker = self.workers[step.worker_id]
        worker.runs[step.task_id] = step
        return step.task_id not in worker.parts  # the first member of a gang tells it for all

    def is_running(self, worker_id: WorkerId, incarnation: int, task_id: TaskId, run: int) -> bool:
        """Whether this run is under way on that worker, which has answered just now."""
        self.workers.heard((worker_id, incarnation))
        worker = self.workers.find(worker_id, incarnation)
        return worker is not None and worker.is_running(task_id, run)

    def files_judged(self, worker_id: WorkerId, incarnation: int, files: tuple[JudgedFile, ...]) -> None:
        """Have the core know what a worker has found out about files."""
        self.workers.heard((worker_id, incarnation))
        worker = self.workers.find(worker_id, incarnation)
        if worker is not None:
            wrong = [file for file in files if file.verdict is not FileVerdict.RIGHT]
            if wrong:
                worker.checked.clear()  # the right file may come, and must be checked then
                self._tasks.refuted(worker_id, incarnation, wrong)
            self.post(FilesJudged(self.now, worker_id, incarnation, files))

    def state_saved(self, saved: StateSaved, state: ResultRef) -> bool:
        """Hold the state of a run that continues. Ignored, and False, if the run ended: then it has a result or a newer
        state."""
        worker = self.workers.find(saved.worker_id, saved.incarnation)
        if worker is None or not worker.is_running(saved.task_id, saved.run):
            return False
        if not self._tasks.keep_state(saved, state):
            return False
        self.state_kept(saved)
        return True

    def state_kept(self, saved: StateSaved, others_follow: bool = False) -> None:
        """Have the core know of a state that is held; `others_follow` as in `StateKept`."""
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
                others_follow,
            )
        )

    def close(self) -> None:
        """Stop all workers and background tasks. Causes no events."""
        self._broken = True
        self._background.cancel()
        self.workers.close()

    def _execute(self, command: Command) -> None:
        match command:
            case StartWorker():
                self.workers.start(command)
            case EndWorker():
                self.workers.end(command.worker_id, command.incarnation)
            case RunTask():
                self._calls.send(_one_by_one(command), RunMode.BATCH if command.batch_mates else RunMode.IN_ORDER)
            case RunInGang():
                self._calls.send_part(command)
            case RevokeTask():
                self._background.spawn(self._calls.revoke(command))
            case StopTask():
                self._calls.stop(command)
            case Prefetch():
                self._calls.prefetch(command)
            case Preload():
                self._calls.preload(command)
            case LoadWeights():
                self._calls.load(command)
            case DropWeights():
                self._fleet.drop_weights(command.worker_id, command.incarnation)
            case CopyResult():
                self._background.spawn(self._copy(command.task_id))
            case ReleaseResult():
                self._tasks.release(command.task_id)
            case ResolveJob():
                self._on_resolved(command)
            case ScheduleTick():
                self._background.spawn(self._tick_after(command.after_seconds))

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

    def _break(self, mistake: BaseException) -> None:
        if not self._broken:
            self._broken = True
            self._on_broken("".join(traceback.format_exception(mistake)))


def _starts_first(commands: list[Command]) -> tuple[Sequence[Command | list[RunTask]], Sequence[Command]]:
    """Return the commands that are executed first, and those for which no worker waits: what informs drivers, and frees
    results. A task that starts reads none of these results, and their order stays. Tasks that are sent in one call
    become a list. Without a task, none are first."""
    for command in commands:
        if isinstance(command, (RunTask, RunInGang)):
            break
    else:
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
