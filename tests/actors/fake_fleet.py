"""A controller with everything around it under the test's hand: the fleet, the clock, the catalog's thread.

The core is the real one. Nothing here waits for time: `settle` lets the event loop run until nothing is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from itertools import takewhile

from modelpool.actors.control.catalog_service import CatalogService
from modelpool.actors.control.cluster_facts import ClusterFacts
from modelpool.actors.control.controller import Controller, PoolIdentity, Records, WatchedCluster
from modelpool.actors.control.fleet import InputsLost, RunCall, SentRuns, WorkerLost
from modelpool.actors.control.history.pool_history import PoolHistory
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.metrics.trace_export import TraceExport
from modelpool.actors.control.node_watch import ClusterNodes
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.gpu_worker import result_bytes, run_error
from modelpool.actors.worker.wire.messages import (
    CallId,
    ClientId,
    EndsWanted,
    JobEnded,
    LoadReport,
    LoadRequest,
    RunMode,
    RunRequest,
    StartedWorker,
    StepDone,
    Submission,
    SubmissionId,
)
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.stage_params import PreloadRequest, Result, RunHooks
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import (
    NodeId,
    RunCost,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import LossCause
from tests.actors.fakes import CAPACITY_BYTES, FakeCatalog, FakeEngine

#: more turns of the event loop than anything here takes
MOST_TURNS = 1000


async def settle() -> None:
    """Let everything happen that can happen without the test."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(MOST_TURNS):
        await asyncio.sleep(0)
        if not ready:
            return
    raise AssertionError("the controller never comes to rest")


class InlineExecutor(Executor):
    """Runs at once, in the caller's thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as raised:
            future.set_exception(raised)
        return future


class ManualClock:
    """Time goes on when the test says so."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, everyone waking at their time."""
        end = self._now + seconds
        while due := [s for s in self._sleepers if s[0] <= end]:
            first = min(due, key=lambda sleeper: sleeper[0])
            self._sleepers.remove(first)
            self._now = max(self._now, first[0])
            if not first[1].done():
                first[1].set_result(None)
            await settle()
        self._now = end


@dataclass(eq=False)
class FakeRef:
    """A reference to a result; the controller has no way to look into it that a test would not notice."""

    value: Result | None = None
    lost: bool = False


@dataclass(eq=False)
class Sent:
    """An attempt on a worker."""

    worker_id: WorkerId
    incarnation: int
    request: RunRequest
    inputs: tuple[FakeRef, ...]
    report: asyncio.Future[TaskReport | None]
    ref: FakeRef
    stop_asked: bool = False
    #: attempts of its run, itself included
    together: int = 1

    @property
    def task_id(self) -> TaskId:
        return self.request.task.task_id


@dataclass(eq=False)
class FakeWorker:
    """One incarnation that is up."""

    engine: FakeEngine
    gone: asyncio.Future[str]
    running: list[Sent] = field(default_factory=list)
    #: what its runs made, by run
    made: dict[int, FakeRef] = field(default_factory=dict)
    #: begins when those have ended
    queued: list[Sent] = field(default_factory=list)


@dataclass(eq=False)
class SentLoad:
    """A load without a run that waits for the test to end it."""

    worker_id: WorkerId
    incarnation: int
    request: LoadRequest
    report: asyncio.Future[LoadReport]
    stop_asked: bool = False


class FakeFleet:
    """See `actors.control.fleet.Fleet`. Workers start by themselves while `starts_by_itself`."""

    def __init__(self) -> None:
        self.starts_by_itself = True
        #: the machine of all workers
        self.node = NodeId("")
        #: whether they begin runs while they decode
        self.overlaps_decode = False
        self.starting: dict[tuple[WorkerId, int], asyncio.Future[None]] = {}
        self.workers: dict[tuple[WorkerId, int], FakeWorker] = {}
        self.ended: list[tuple[WorkerId, int]] = []
        #: all attempts ever, in order
        self.sent: list[Sent] = []
        #: the attempts of each call of several, in order
        self.joined: list[list[Sent]] = []
        #: what workers were to read ahead, in order
        self.read_ahead_asked: list[tuple[WorkerId, tuple[FilePart, ...]]] = []
        #: what they were to bring beside which runs
        self.upload_ahead_asked: list[tuple[WorkerId, int, PreloadRequest]] = []
        #: changes of what previews are wanted of which runs
        self.previews_asked: list[tuple[WorkerId, int, PreviewWish | None]] = []
        #: loads without runs, in order; the test ends them
        self.loads: list[SentLoad] = []
        #: workers that were to take all weights off their GPUs
        self.dropped: list[WorkerId] = []
        #: results that were to be copied
        self.copied: list[FakeRef] = []
        #: workers that do not answer, and all that were asked
        self.hung: set[WorkerId] = set()
        self.asked: list[WorkerId] = []
        #: workers with more memory than they have said, and what they say when they may take it; those that have
        self.growing: dict[WorkerId, int] = {}
        self.grown: list[WorkerId] = []
        #: why such a worker is lost
        self.silence = LossCause.CRASH

    @property
    def running(self) -> list[Sent]:
        """Attempts that wait for the test to end them."""
        return [sent for worker in self.workers.values() for sent in worker.running]

    @property
    def queued(self) -> list[Sent]:
        """Attempts that begin when those of their worker have ended."""
        return [sent for worker in self.workers.values() for sent in worker.queued]

    async def take_over(self) -> int:
        return 0

    async def close(self) -> None:
        pass

    async def start(self, worker_id: WorkerId, incarnation: int, group: str = "") -> StartedWorker:
        key = (worker_id, incarnation)
        assert not [k for k in self.workers if k[0] == worker_id], f"{worker_id} is started while it is up"
        if not self.starts_by_itself:
            self.starting[key] = asyncio.get_running_loop().create_future()
            try:
                await self.starting[key]
            finally:
                del self.starting[key]
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.workers[key] = FakeWorker(FakeEngine(), gone)
        overlaps = self.overlaps_decode
        return StartedWorker(
            WorkerSpec(worker_id, incarnation, CAPACITY_BYTES, 1e9, "fake", self.node, overlaps_decode=overlaps)
        )

    async def gone(self, worker_id: WorkerId, incarnation: int) -> Loss:
        return Loss(await self.workers[worker_id, incarnation].gone)

    def ping(self, worker_id: WorkerId, incarnation: int) -> Awaitable[bool] | None:
        if (worker_id, incarnation) not in self.workers and (worker_id, incarnation) not in self.starting:
            return None
        self.asked.append(worker_id)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if worker_id not in self.hung:
            answer.set_result(worker_id in self.growing)
        return answer

    async def grow(self, worker_id: WorkerId, incarnation: int) -> Residency:
        self.grown.append(worker_id)
        await asyncio.sleep(0)
        return Residency(self.growing.pop(worker_id))

    async def why_silent(self, worker_id: WorkerId, incarnation: int, silent_seconds: float) -> Loss:
        return Loss(f"silent for {silent_seconds:.0f} s", self.silence)

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        self.ended.append((worker_id, incarnation))
        self.workers.pop((worker_id, incarnation), None)

    def run(self, worker_id: WorkerId, incarnation: int, call: CallId, runs: Sequence[RunCall]) -> SentRuns:
        assert call.mode is not RunMode.PASS, "no fake worker runs passes"
        if call.mode is RunMode.BATCH:
            sent = self._send_batch(worker_id, incarnation, runs)
        else:
            sent = [self._send(worker_id, incarnation, request, inputs) for request, inputs in runs]
            if len(runs) > 1:
                self.joined.append(sent)
        self.sent += sent
        return SentRuns(asyncio.gather(*(one.report for one in sent)), [one.ref for one in sent])

    async def join(self, worker_id: WorkerId, incarnation: int, call: CallId, run: RunCall) -> bool:
        raise AssertionError("no fake worker runs passes")

    def _send(self, worker_id: WorkerId, incarnation: int, request: RunRequest, inputs: Sequence[FakeRef]) -> Sent:
        worker = self.workers.get((worker_id, incarnation))
        sent = Sent(
            worker_id, incarnation, request, tuple(inputs), asyncio.get_running_loop().create_future(), FakeRef()
        )
        if worker is None:  # it died just now, and nobody has heard of it
            sent.report.set_exception(WorkerLost("killed by the test"))
        elif worker.running or all(not one or one in worker.made for one in request.own):
            (worker.queued if worker.running else worker.running).append(sent)
        else:
            sent.report.set_result(None)
        return sent

    def ends(self, worker_id: WorkerId, incarnation: int, wanted: EndsWanted) -> SentRuns:
        assert (wanted.told, wanted.waits) == (0, False), "no fake worker decodes beside the next run"
        (call,) = [sent for sent in self.joined if sent[0].request.run == wanted.call.number]
        over = list(takewhile(lambda sent: sent.report.done(), call))
        reports: asyncio.Future[list] = asyncio.get_running_loop().create_future()
        reports.set_result([sent.report.result() for sent in over])
        return SentRuns(reports, [sent.ref for sent in over])

    def _send_batch(self, worker_id: WorkerId, incarnation: int, asked: Sequence[RunCall]) -> list[Sent]:
        worker = self.workers[worker_id, incarnation]
        assert not worker.running, f"{worker_id} is sent a second run"
        loop = asyncio.get_running_loop()
        sent = [
            Sent(worker_id, incarnation, request, tuple(inputs), loop.create_future(), FakeRef(), together=len(asked))
            for request, inputs in asked
        ]
        worker.running += sent
        return sent

    async def revoke(self, worker_id: WorkerId, incarnation: int, run: int) -> bool:
        worker = self.workers.get((worker_id, incarnation))
        found = [sent for sent in worker.queued if sent.request.run == run] if worker else []
        for sent in found:
            worker.queued.remove(sent)
            sent.report.set_result(None)
        return bool(found)

    def stop(self, worker_id: WorkerId, incarnation: int, run: int, keep_state: bool = False) -> None:
        for sent in self.running:
            if (sent.worker_id, sent.incarnation, sent.request.run) == (worker_id, incarnation, run):
                sent.stop_asked = True
        for load in self.loads:
            if (load.worker_id, load.incarnation, load.request.run) == (worker_id, incarnation, run):
                load.stop_asked = True

    async def load(self, worker_id: WorkerId, incarnation: int, request: LoadRequest) -> LoadReport:
        assert not self.workers[worker_id, incarnation].running, f"{worker_id} is busy"
        sent = SentLoad(worker_id, incarnation, request, asyncio.get_running_loop().create_future())
        self.loads.append(sent)
        return await sent.report

    def finish_load(self, sent: SentLoad, error: RunError | None = None) -> None:
        """The load ends as it would: complete, or with nothing if it was stopped or failed."""
        engine = self.workers[sent.worker_id, sent.incarnation].engine
        if error is None and not sent.stop_asked:
            engine.load_weights(sent.request.model, sent.request.roles, sent.request.kept)
        self.loads.remove(sent)
        sent.report.set_result(LoadReport(engine.residency(), error))

    def want_previews(self, worker_id: WorkerId, incarnation: int, run: int, wish: PreviewWish | None) -> None:
        self.previews_asked.append((worker_id, run, wish))

    async def gang_address(self, worker_id: WorkerId, incarnation: int) -> str:
        assert (worker_id, incarnation) in self.workers, f"{worker_id} is not up"
        return f"{worker_id}:1"

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        assert (worker_id, incarnation) in self.workers, f"{worker_id} is not up"
        self.read_ahead_asked.append((worker_id, tuple(parts)))

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        assert (worker_id, incarnation) in self.workers, f"{worker_id} is not up"
        self.upload_ahead_asked.append((worker_id, run, preload_request))

    def forget_checkpoints(self, worker_id: WorkerId, incarnation: int, task_id: TaskId) -> None:
        raise AssertionError("no fake worker has checkpoints")

    def drop_weights(self, worker_id: WorkerId, incarnation: int) -> None:
        self.dropped.append(worker_id)

    async def read_result(self, ref: FakeRef) -> Result:
        if ref.lost or ref.value is None:
            raise InputsLost("it is gone")
        return ref.value

    async def hold(self, result: Result) -> FakeRef:
        return FakeRef(result)

    async def copy_result(self, ref: FakeRef) -> FakeRef:
        self.copied.append(ref)
        if ref.lost:
            raise InputsLost("it is gone")
        return FakeRef(ref.value)

    async def memory_reports(self) -> dict:
        return {}

    def finish(self, sent: Sent, run_seconds: float | None = None, load_seconds: float = 0.0) -> None:
        """The attempt ends as it would: well, after `run_seconds` and `load_seconds` by its report, stopped, or without
        its inputs."""
        if any(ref.lost for ref in sent.inputs):
            self._answer(sent, InputsLost("an input of this task is gone"))
        elif sent.stop_asked:
            self.fail(sent, RunErrorKind.CANCELLED)
        else:
            engine = self.workers[sent.worker_id, sent.incarnation].engine
            rest, made = list(sent.inputs), self.workers[sent.worker_id, sent.incarnation].made
            refs = [made[run] if run else rest.pop(0) for run in sent.request.own] if sent.request.own else rest
            values = tuple(ref.value for ref in refs)
            assert None not in values, "an input that was not made"
            inputs = TaskInputs.named(sent.request.task.input_names, values)
            hooks = RunHooks(lambda step, steps: None, lambda: False)
            cost, error = RunCost(), None
            try:
                request = sent.request
                sent.ref.value, cost = engine.run(
                    request.task, request.work, inputs, hooks, request.fresh, request.needed_next
                )
                cost = replace(cost, batched=sent.together, load_seconds=load_seconds)
                cost = cost if run_seconds is None else replace(cost, run_seconds=run_seconds)
            except Exception as raised:
                error = run_error(raised)
            self._answer(sent, self._report(sent, engine.residency(), cost, error))

    def fail(self, sent: Sent, kind: RunErrorKind) -> None:
        """The attempt ends with an error."""
        residency = self.workers[sent.worker_id, sent.incarnation].engine.residency()
        self._answer(sent, self._report(sent, residency, RunCost(), RunError(kind, f"the test says {kind.value}")))

    def blow_up(self, sent: Sent, raised: Exception) -> None:
        """The attempt's call fails in a way that nobody foresaw."""
        self._answer(sent, raised)

    def kill(self, worker_id: WorkerId, watch_first: bool = True) -> None:
        """The worker's process dies. Both its run and its watch say so, the one or the other first."""
        worker = self._die(worker_id)
        tellers: list[Callable[[], None]] = [lambda: worker.gone.set_result("killed by the test")]
        tellers += [
            lambda s=s: s.report.set_exception(WorkerLost("killed by the test"))
            for s in (*worker.running, *worker.queued)
        ]
        for tell in tellers if watch_first else reversed(tellers):
            tell()

    def finish_and_die(self, sent: Sent) -> None:
        """The worker dies right after a run, and the news of its death are faster than the report."""
        worker = self.workers[sent.worker_id, sent.incarnation]
        worker.gone.set_result("killed by the test")
        self.finish(sent)
        self._die(sent.worker_id)

    def _die(self, worker_id: WorkerId) -> FakeWorker:
        return self.workers.pop(next(key for key in self.workers if key[0] == worker_id))

    def _answer(self, sent: Sent, answer: TaskReport | Exception) -> None:
        worker = self.workers[sent.worker_id, sent.incarnation]
        worker.running.remove(sent)
        if isinstance(answer, TaskReport) and answer.error is None:
            worker.made[sent.request.run] = sent.ref
        unstarted: list[Sent] = []
        while not worker.running and worker.queued:
            first = worker.queued.pop(0)
            can_start = all(not run or run in worker.made for run in first.request.own)
            (worker.running if can_start else unstarted).append(first)
        if isinstance(answer, Exception):
            sent.report.set_exception(answer)
        else:
            sent.report.set_result(answer)
        for one in unstarted:
            one.report.set_result(None)

    def _report(self, sent: Sent, residency: Residency, cost: RunCost, error: RunError | None) -> TaskReport:
        return TaskReport(
            task_id=sent.task_id,
            attempt=sent.request.attempt,
            worker_id=sent.worker_id,
            incarnation=sent.incarnation,
            residency=residency,
            cost=cost,
            error=error,
            result_bytes=0 if error or sent.ref.value is None else result_bytes(sent.ref.value),
        )


ME = ClientId("me")


class Desk:
    """A controller and a driver that talks to it. Use it inside an event loop."""

    def __init__(
        self,
        workers: int = 1,
        config: SchedulerConfig | None = None,
        state: SchedulerState | None = None,
        recorder: Recorder | None = None,
        nodes: ClusterNodes | None = None,
        heartbeat_seconds: float | None = None,
        epoch: int = 0,
        traces: TraceExport | None = None,
        history: PoolHistory | None = None,
        has_run: bool = False,
    ) -> None:
        self.fleet = FakeFleet()
        self.clock = ManualClock()
        self.state = state or SchedulerState(config)
        self.controller = Controller(
            state=self.state,
            fleet=self.fleet,
            clock=self.clock,
            catalog=CatalogService(FakeCatalog, InlineExecutor()),
            worker_ids=[WorkerId(f"gpu-{i}") for i in range(workers)],
            pool=PoolIdentity("mine", epoch, budget_bytes=CAPACITY_BYTES, has_run=has_run),
            cluster=WatchedCluster(nodes, facts=ClusterFacts(nodes, needs_gpus=True)),
            records=Records(recorder, traces, history=history),
            heartbeat_seconds=heartbeat_seconds,
        )
        self.cursor = 0
        self.ended: list[JobEnded] = []

    async def open(self) -> Desk:
        await self.controller.open()
        await self.controller.enter(ME)
        await settle()
        return self

    async def submit(
        self, *requests: GenerateRequest, submission: str = "s", first_index: int = 0, hold: bool = False
    ) -> None:
        part = Submission(ME, SubmissionId(submission), first_index, requests, hold)
        await self.controller.submit(part)
        await settle()

    async def finish(self, *sent: Sent) -> None:
        for one in sent:
            self.fleet.finish(one)
        await settle()

    async def run_dry(self) -> list[JobEnded]:
        """Let every attempt end as it would until nothing runs; all ends so far."""
        while self.fleet.running:
            await self.finish(*self.fleet.running)
        return await self.hear()

    async def hear(self) -> list[JobEnded]:
        """Ask for news once; all ends so far."""
        while True:
            news = await self.controller.events(ME, self.cursor, 0.0)
            self.ended += news.ended
            self.cursor = news.cursor
            if not news.ended:
                return self.ended

    async def pass_time(self, seconds: float) -> None:
        """Time passes, and the driver goes on asking for news, as living ones do."""
        while seconds > 0.0:
            await self.clock.advance(min(seconds, 10.0))
            await self.hear()
            seconds -= 10.0

    async def tell_step(self, sent: Sent, step: int, steps: int) -> None:
        done = StepDone(sent.worker_id, sent.incarnation, sent.task_id, sent.request.run, step, steps)
        await self.controller.steps_done((done,))


def dialogue(talk: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test that is a coroutine, on an event loop of its own."""

    def test() -> None:
        asyncio.run(talk())

    test.__name__, test.__doc__ = talk.__name__, talk.__doc__
    return test
