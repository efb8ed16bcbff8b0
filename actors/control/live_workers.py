"""The workers of a pool: they start, are watched, and end; each loss is reported once, by whichever comes first.

A worker that does not answer is ended and reported as lost, and a start as failed: `beat` is called regularly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from math import inf

from modelpool.actors.control.background import Background
from modelpool.actors.control.fleet import Clock, WorkerFleet, WorkerLost
from modelpool.actors.control.heartbeats import Heartbeats, patience_seconds
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.task_store import CheckedFile, TaskStore
from modelpool.actors.worker.wire.messages import StepDone
from modelpool.pool.values.specs.spec import ComponentKey, TaskId, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.file_verdicts import Incarnation
from modelpool.scheduler.model.messages import Event, StartFailed, StartWorker, WeightsLoaded, WorkerDown, WorkerUp


class LiveWorker:
    """A running worker: its runs with their progress, in the order in which it begins them, and the residency it last
    reported."""

    def __init__(self, spec: WorkerSpec, residency: Residency | None = None) -> None:
        self.spec = spec
        #: the id and the incarnation
        self.key: Incarnation = (spec.worker_id, spec.incarnation)
        self.residency = residency or Residency(spec.capacity_bytes)
        self.runs: dict[TaskId, StepDone] = {}
        #: runs among them that begin when the others have ended, one after the other
        self.queued: dict[TaskId, None] = {}
        #: decodes among them; and runs that wait for a decode: other decodes, and readers of its result
        self.decodes: set[TaskId] = set()
        self.after_decode: set[TaskId] = set()
        #: runs among them that workers share, and another worker has the result
        self.parts: set[TaskId] = set()
        #: where the members of the gangs that it leads meet; "" until it was asked
        self.gang_address = ""
        #: waits for the end of the run that was sent last
        self.last_wait: asyncio.Task[None] | None = None
        #: components and files of these that it has checked
        self.checked: set[CheckedFile] = set()
        #: the number of a load without a run that is under way; 0 if there is none
        self.load = 0

    @property
    def is_idle(self) -> bool:
        """Whether it was sent nothing that is not over."""
        return not self.runs and not self.load

    def is_running(self, task_id: TaskId, run: int) -> bool:
        """Return whether the run with this number is under way, or waits behind another, for the task."""
        known = self.runs.get(task_id)
        return known is not None and known.run == run

    def uncheck(self, components: Collection[ComponentKey]) -> None:
        """Forget that the files of these components were checked."""
        self.checked = {file for file in self.checked if file[0] not in components}

    def end(self, task_id: TaskId) -> None:
        """Forget a run."""
        del self.runs[task_id]
        self.parts.discard(task_id)
        self.decodes.discard(task_id)
        self.after_decode.discard(task_id)
        if self.queued:
            self.queued.pop(task_id, None)
            self.begin_queued()

    def begin_queued(self) -> None:
        """Begin what begins by itself: the next run after the last one that had begun. Behind a decode that may mean
        while it is still computed, and counts as begun then."""
        if self.queued and len(self.queued) == len(self.runs):  # none has begun
            del self.queued[next(iter(self.queued))]
        if not self.queued or not self.spec.overlaps_decode:
            return
        begun = [task_id for task_id in self.runs if task_id not in self.queued]
        if len(begun) == 1 and begun[0] in self.decodes:
            following = next(iter(self.queued))
            if following not in self.after_decode:
                del self.queued[following]


class LiveWorkers:
    """The workers that run, and those that start. `post` receives their starts and losses as events of the core."""

    def __init__(
        self,
        state: SchedulerState,
        fleet: WorkerFleet,
        clock: Clock,
        tasks: TaskStore,
        background: Background,
        post: Callable[[Event], None],
        heartbeat_seconds: float | None,
    ) -> None:
        """With `heartbeat_seconds`, `beat` is called at this interval."""
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._tasks = tasks
        self._background = background
        self._post = post
        self._workers: dict[WorkerId, LiveWorker] = {}
        self._starts: dict[Incarnation, asyncio.Task[None]] = {}
        self._watches: dict[Incarnation, asyncio.Task[None]] = {}
        self._troubles: dict[WorkerId, str] = {}
        self._heartbeats = Heartbeats[Incarnation](inf, 0.0)
        if heartbeat_seconds is not None:
            self._heartbeats = Heartbeats(heartbeat_seconds, clock.now())
        #: to be called with the key of a worker that has sent something just now
        self.heard: Callable[[Incarnation], None] = self._heartbeats.heard

    def __iter__(self) -> Iterator[LiveWorker]:
        return iter(self._workers.values())

    def __getitem__(self, worker_id: WorkerId) -> LiveWorker:
        return self._workers[worker_id]

    def find(self, worker_id: WorkerId, incarnation: int) -> LiveWorker | None:
        """Return a running worker; None if that incarnation does not run."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.spec.incarnation == incarnation else None

    def has(self, worker: LiveWorker) -> bool:
        """Return whether the worker still runs."""
        return self._workers.get(worker.spec.worker_id) is worker

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        """The running workers."""
        return tuple(worker.spec for worker in self)

    @property
    def troubles(self) -> Mapping[WorkerId, str]:
        """The latest reason why each worker was lost or did not start."""
        return self._troubles

    @property
    def silent(self) -> Mapping[WorkerId, float]:
        """The workers that do not answer, and for how many seconds."""
        return {worker_id: seconds for (worker_id, _), seconds in self._heartbeats.silent().items()}

    def beat(self) -> None:
        """Ask the workers that sent nothing since the last beat whether they answer, and give up those that have not
        answered for too long."""
        if self._heartbeats.interval_seconds == inf:
            return
        for key in self._heartbeats.beat(self._clock.now()):
            answer = self._fleet.ping(*key)
            if answer is None:
                self._heartbeats.heard(key)  # it waits for a node, which may take any time
            else:
                self._background.spawn(self._await_answer(key, answer))
        for key, seconds in self._heartbeats.silent().items():
            if seconds >= patience_seconds(self._heartbeats.interval_seconds, self._repeated_seconds(key)):
                self._heartbeats.forget(key)
                self._background.spawn(self._give_up(key, seconds))

    async def _await_answer(self, key: Incarnation, answer: Awaitable[bool]) -> None:
        try:
            may_grow = await answer
        except Exception:  # it is gone: reported by whoever waits for its end
            return
        self._heartbeats.heard(key)
        worker = self.find(*key)
        if may_grow and worker is not None and worker.is_idle:
            await self._grow(worker)

    async def _grow(self, worker: LiveWorker) -> None:
        """Let an idle worker take memory that other processes have given back: the core, which knows the capacity of
        before, may have no task that fits it, and a run would come too late. A run takes it, too."""
        last = worker.last_wait
        try:
            residency = await self._fleet.grow(*worker.key)
        except Exception:  # it is gone, as above
            return
        if self.has(worker) and worker.is_idle and worker.last_wait is last:
            worker.residency = residency
            self._post(WeightsLoaded(self._clock.now(), *worker.key, residency))

    def _repeated_seconds(self, key: Incarnation) -> float | None:
        """Return the expected length of the run that would be repeated without this worker; None if unknown."""
        worker = self._state.worker_table.current(*key)
        if worker is None or not worker.live:
            return None
        lead = self._state.worker_table.stands_for(worker)
        if lead is None or lead.task_id is None:
            return 0.0
        if worker.expected_end is None:
            return None
        return worker.expected_end - self._state.demand.tasks[lead.task_id].started_at

    async def _give_up(self, key: Incarnation, silent_seconds: float) -> None:
        start = self._starts.get(key)
        if start is not None:
            start.cancel()
        loss = await self._fleet.why_silent(*key, silent_seconds)
        if start is None:
            self.lose(*key, loss)
        elif self._starts.get(key) is start:  # the core has not withdrawn it in between
            self._start_failed(*key, loss)

    def start(self, command: StartWorker) -> None:
        """Start a worker on the core's command."""
        key = (command.worker_id, command.incarnation)
        self._starts[key] = self._background.spawn(self._start(command))
        self._heartbeats.watch(key)

    def close(self) -> None:
        """End all workers. Causes no events."""
        for key in (*self._starts, *self._watches):
            self._fleet.end(*key)
        self._workers.clear()

    async def _start(self, command: StartWorker) -> None:
        worker_id, incarnation = command.worker_id, command.incarnation
        try:
            if command.delay_seconds:
                await self._clock.sleep(command.delay_seconds)
            started = await self._fleet.start(worker_id, incarnation, command.group)
        except Exception as raised:
            self._start_failed(worker_id, incarnation, loss_of(raised))
            return
        spec = started.spec
        self._starts.pop((worker_id, incarnation), None)
        self._workers[worker_id] = LiveWorker(spec, started.residency)
        if spec.files_address:
            self._tasks.file_servers[spec.node] = spec.files_address
        self._watches[worker_id, incarnation] = self._background.spawn(self._watch(worker_id, incarnation))
        self._post(WorkerUp(self._clock.now(), spec, started.residency, started.past_runs))

    def _start_failed(self, worker_id: WorkerId, incarnation: int, loss: Loss) -> None:
        self._fleet.end(worker_id, incarnation)
        self._heartbeats.forget((worker_id, incarnation))
        self._starts.pop((worker_id, incarnation), None)
        self._troubles[worker_id] = loss.reason
        self._post(StartFailed(self._clock.now(), worker_id, incarnation, loss.reason, loss.cause))

    async def _watch(self, worker_id: WorkerId, incarnation: int) -> None:
        try:
            loss = await self._fleet.gone(worker_id, incarnation)
        except Exception as raised:
            loss = loss_of(raised)
        self.lose(worker_id, incarnation, loss)

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """End a worker on the core's command; causes no event, neither for the worker nor for its runs."""
        start = self._starts.pop((worker_id, incarnation), None)
        if start is not None:
            start.cancel()
        ended = self._forget(worker_id, incarnation)
        self._fleet.end(worker_id, incarnation)
        for task_id in ended.runs if ended is not None else ():
            self._tasks.abandon(task_id)

    def lose(self, worker_id: WorkerId, incarnation: int, loss: Loss) -> None:
        """End the remains of a lost worker, and report the loss once."""
        lost = self._forget(worker_id, incarnation)
        if lost is None:
            return
        self._fleet.end(worker_id, incarnation)
        for task_id in lost.runs:
            self._tasks.abandon(task_id, "" if task_id in lost.queued else f"{worker_id}: {loss.reason}")
        self._troubles[worker_id] = loss.reason
        self._post(WorkerDown(self._clock.now(), worker_id, incarnation, loss.reason, loss.cause))

    def _forget(self, worker_id: WorkerId, incarnation: int) -> LiveWorker | None:
        self._heartbeats.forget((worker_id, incarnation))
        watch = self._watches.pop((worker_id, incarnation), None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        lost = self.find(worker_id, incarnation)
        if lost is None:
            return None
        del self._workers[worker_id]
        if lost.spec.files_address:  # another worker of its node may have one too
            specs = [worker.spec for worker in self._workers.values()]
            self._tasks.file_servers = {spec.node: spec.files_address for spec in specs if spec.files_address}
        return lost


def loss_of(raised: Exception) -> Loss:
    """Return why a worker did not start, or is gone, from what its fleet raised."""
    if isinstance(raised, WorkerLost):
        return Loss(str(raised), raised.cause)
    return Loss(f"{type(raised).__name__}: {raised}")
