"""A whole pool in this process, without Ray: the real client, controller, core and workers, around fake engines.

The controller has an event loop on a thread of its own, each worker a thread: what crosses between them are values, as
it would be between processes.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from modelpool.actors.client.client import ModelPool
from modelpool.actors.client.output_writer import HOLD_SECONDS
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.catalog_service import CatalogService
from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.connection import ResultGone
from modelpool.actors.control.controller import Controller, NamedModels, PoolIdentity, Records
from modelpool.actors.control.fleet import InputsLost, RunCall, SentRuns
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.opened_catalog import ListingCatalog
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.control.succession import WorkerOrigin, successor
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.worker.gpu_worker import GpuWorker, WorkerEngine
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    PreviewMade,
    RunEnds,
    StartedWorker,
    StateSaved,
    StepDone,
)
from modelpool.actors.worker.worker_lease import WorkerLease
from modelpool.actors.worker.worker_setup import Checkpointing, WorkerCallbacks
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.stage_params import PreloadRequest, Result, RunState
from modelpool.pool.values.specs.spec import JudgedFile, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from tests.actors.fake_fleet import FakeRef
from tests.actors.fakes import CAPACITY_BYTES, FakeCatalog, FakeEngine


def disk_at(folder: Path | None) -> CheckpointDisk | None:
    """Checkpoints in a folder, if there is one."""
    return None if folder is None else CheckpointDisk(CheckpointFolder(folder, 1 << 30))


class RealClock:
    """Time as it is."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _as_sent(ends: Awaitable[RunEnds], count: int) -> SentRuns:
    refs = [FakeRef() for _ in range(count)]

    async def reports() -> Sequence[Any]:
        told = await ends
        for ref, result in zip(refs, told.results, strict=False):
            ref.value = result
        return told.reports

    return SentRuns(reports(), refs)


class ThreadFleet:
    """Workers on threads. See `actors.control.fleet.Fleet`."""

    def __init__(
        self,
        make_engine: Callable[[], WorkerEngine],
        checkpoint_seconds: float | None = None,
        checkpoint_folder: Path | None = None,
        predecessor: ThreadFleet | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._checkpoint_seconds = checkpoint_seconds
        self._checkpoint_folder = checkpoint_folder
        self._predecessor = predecessor
        self.epoch: int = 1 if predecessor is None else predecessor.epoch + 1
        self._left: list[tuple[WorkerOrigin, GpuWorker, ThreadPoolExecutor]] = []
        self._handing_over = threading.Lock()
        self._is_gone = False
        self.on_state: Callable[[StateSaved, RunState], None] = lambda saved, state: None
        self.workers: dict[tuple[WorkerId, int], tuple[GpuWorker, ThreadPoolExecutor]] = {}
        #: of ended workers too, whose runs may go on until their next step
        self.threads: list[ThreadPoolExecutor] = []
        self.on_steps: Callable[[Sequence[StepDone]], None] = lambda steps: None
        self.on_preview: Callable[[PreviewMade], None] = lambda made: None
        self.on_judged: Callable[..., None] = lambda worker_id, incarnation, files, epoch: None

    async def take_over(self) -> int:
        before = self._predecessor
        while before is not None:  # the one before may have been lost before it took over
            for origin, worker, thread in before.surrender():
                worker.change_controller(self.epoch)
                worker._on_steps = self.on_steps
                worker._files._on_judged = partial(self._judged, worker)
                self._left.append((origin, worker, thread))
            before = before._predecessor
        return len(self._left)

    def _judged(self, worker: GpuWorker, files: tuple[JudgedFile, ...]) -> None:
        self.on_judged(worker._worker_id, worker._incarnation, files, worker._lease.epoch)

    def surrender(self) -> list[tuple[WorkerOrigin, GpuWorker, ThreadPoolExecutor]]:
        """Return its workers, also those that it had not adopted yet. Its process is gone: it starts none any more."""
        with self._handing_over:
            self._is_gone = True
            left = [(WorkerOrigin(*place), *known) for place, known in self.workers.items()] + self._left
            self.workers, self._left = {}, []
            return left

    async def close(self) -> None:
        for _, _, thread in self._left:
            thread.shutdown(wait=False, cancel_futures=True)

    async def start(self, worker_id: WorkerId, incarnation: int, group: str = "") -> StartedWorker:
        with self._handing_over:
            place = successor([origin for origin, _, _ in self._left], worker_id, group)
            if place is not None:
                _, worker, thread = self._left.pop(place)
                self.workers[worker_id, incarnation] = (worker, thread)
            is_gone = self._is_gone
        if is_gone:
            await asyncio.Event().wait()
        if place is not None:
            adoption = partial(worker.adopt, worker_id, incarnation, self.epoch)
            return await asyncio.get_running_loop().run_in_executor(thread, adoption)
        worker = GpuWorker(
            worker_id,
            incarnation,
            self._make_engine,
            WorkerCallbacks(
                self.on_steps,
                on_state=lambda saved, state: self.on_state(saved, state),
                on_preview=lambda made: self.on_preview(made),
            ),
            progress_seconds=0.0,
            checkpointing=Checkpointing(self._checkpoint_seconds, disk_at(self._checkpoint_folder)),
            lease=WorkerLease(self.epoch),
        )
        worker._files._on_judged = partial(self._judged, worker)
        thread = ThreadPoolExecutor(1, thread_name_prefix=worker_id)
        self.workers[worker_id, incarnation] = (worker, thread)
        self.threads.append(thread)
        return StartedWorker(await asyncio.get_running_loop().run_in_executor(thread, worker.start, self.epoch))

    async def gone(self, worker_id: WorkerId, incarnation: int) -> Loss:
        await asyncio.Event().wait()
        return Loss("never")

    def ping(self, worker_id: WorkerId, incarnation: int) -> None:
        return None

    async def grow(self, worker_id: WorkerId, incarnation: int) -> Residency:
        raise AssertionError("nobody was told that it could")

    async def why_silent(self, worker_id: WorkerId, incarnation: int, silent_seconds: float) -> Loss:
        return Loss("never")

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        if known := self.workers.pop((worker_id, incarnation), None):
            worker, thread = known
            worker._should_stop = lambda request: True  # a thread cannot be killed, as a process would be
            worker._passes.close()
            thread.shutdown(wait=False, cancel_futures=True)

    def run(self, worker_id: WorkerId, incarnation: int, call: CallId, runs: Sequence[RunCall]) -> SentRuns:
        """Sends it now, as Ray does, not when somebody waits for the reports: a later call must not overtake it."""
        worker, thread = self.workers[worker_id, incarnation]
        requests = [request for request, _ in runs]
        flat = [given for _, inputs in runs for given in inputs]
        is_lost = any(given.lost for given in flat)
        ends = None if is_lost else thread.submit(worker.run, call, requests, *[given.value for given in flat])

        async def told() -> RunEnds:
            if ends is None:
                raise InputsLost("an input of these tasks is gone")
            return await asyncio.wrap_future(ends)

        return _as_sent(told(), len(runs))

    async def join(self, worker_id: WorkerId, incarnation: int, call: CallId, run: RunCall) -> bool:
        request, inputs = run
        if any(ref.lost for ref in inputs):
            raise InputsLost("an input of this task is gone")
        return self.workers[worker_id, incarnation][0].join(call, request, *[ref.value for ref in inputs])

    def ends(self, worker_id: WorkerId, incarnation: int, wanted: EndsWanted) -> SentRuns:
        worker, _ = self.workers[worker_id, incarnation]
        return _as_sent(asyncio.to_thread(worker.ends, wanted), wanted.most)

    async def revoke(self, worker_id: WorkerId, incarnation: int, run: int) -> bool:
        known = self.workers.get((worker_id, incarnation))
        return known is not None and known[0].revoke(run, self.epoch)

    def stop(self, worker_id: WorkerId, incarnation: int, run: int, keep_state: bool = False) -> None:
        self.workers[worker_id, incarnation][0].stop(run, keep_state, self.epoch)

    def want_previews(self, worker_id: WorkerId, incarnation: int, run: int, wish: PreviewWish | None) -> None:
        self.workers[worker_id, incarnation][0].want_previews(run, wish, self.epoch)

    async def gang_address(self, worker_id: WorkerId, incarnation: int) -> str:
        return self.workers[worker_id, incarnation][0].gang_address()

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        self.workers[worker_id, incarnation][0].prefetch(parts, self.epoch)

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        self.workers[worker_id, incarnation][0].preload(run, preload_request, self.epoch)

    def forget_checkpoints(self, worker_id: WorkerId, incarnation: int, task_id: TaskId) -> None:
        if (worker_id, incarnation) in self.workers:
            self.workers[worker_id, incarnation][0].forget_checkpoints(task_id, self.epoch)

    def drop_weights(self, worker_id: WorkerId, incarnation: int) -> None:
        if (worker_id, incarnation) in self.workers:
            worker, thread = self.workers[worker_id, incarnation]
            thread.submit(worker.drop_weights, self.epoch)

    async def load(self, worker_id: WorkerId, incarnation: int, request: LoadRequest) -> LoadReport:
        worker, thread = self.workers[worker_id, incarnation]
        return await asyncio.get_running_loop().run_in_executor(thread, worker.load, request)

    async def copy_result(self, ref: FakeRef) -> FakeRef:
        if ref.lost:
            raise InputsLost("it is gone")
        return FakeRef(ref.value)

    async def read_result(self, ref: FakeRef) -> Result:
        if ref.lost or ref.value is None:
            raise InputsLost("it is gone")
        return ref.value

    async def hold(self, result: Result) -> FakeRef:
        return FakeRef(result)

    async def memory_reports(self) -> dict:
        return {worker_id: worker.memory_report() for (worker_id, _), (worker, _) in self.workers.items()}


class LoopConnection:
    """A driver's line to a controller on a loop of its own. See `actors.control.connection.Connection`."""

    def __init__(
        self,
        workers: int,
        make_engine: Callable[[], WorkerEngine],
        make_catalog: Callable[[], ListingCatalog] = FakeCatalog,
        scheduler: SchedulerConfig | None = None,
        budget_bytes: int | None = CAPACITY_BYTES,
        pins: Sequence[tuple[str, int]] = (),
        named: Sequence[str] = (),
        checkpoint_seconds: float | None = None,
        checkpoint_folders: tuple[Path | None, Path | None] = (None, None),
        predecessor: LoopConnection | None = None,
    ) -> None:
        """`checkpoint_folders` are the folders of the workers and of the controller. Takes over the workers of the
        controller of `predecessor`."""
        self.loop = asyncio.new_event_loop()
        self.lost = False
        self.worker_count = workers
        #: questions that were asked, by name
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="controller")
        self._thread.start()
        before = None if predecessor is None else predecessor.fleet
        self.fleet = fleet = ThreadFleet(make_engine, checkpoint_seconds, checkpoint_folders[0], before)
        self.controller = Controller(
            state=SchedulerState(scheduler),
            fleet=fleet,
            clock=RealClock(),
            catalog=CatalogService(make_catalog),
            worker_ids=[WorkerId(f"gpu-{i}") for i in range(workers)],
            pool=PoolIdentity(epoch=fleet.epoch, budget_bytes=budget_bytes),
            models=NamedModels(tuple(pins), tuple(named)),
            records=Records(checkpoints=CheckpointArchive(disk_at(checkpoint_folders[1]))),
        )
        fleet.on_steps = lambda steps: self._start(self.controller.steps_done(steps))
        fleet.on_judged = lambda *about: self._start(self.controller.files_judged(*about))
        fleet.on_preview = lambda made: self._start(self.controller.preview_made(made))
        fleet.on_state = lambda saved, state: self._start(self.controller.state_saved(saved, FakeRef(state), state))
        try:
            self.call(Controller.open)
        except BaseException:
            self.end()
            raise

    def call(self, question, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.lost:
            raise PoolLost("the controller of the pool is gone")
        self.asked.append(question.__name__)
        return self._start(question(self.controller, *args, **kwargs)).result()

    def fetch(self, ref: FakeRef) -> Result:
        if ref.lost:
            raise ResultGone("it is gone")
        assert ref.value is not None
        return ref.value

    def give(self, result: Result) -> FakeRef:
        return FakeRef(result)

    def flush_checkpoints(self) -> None:
        """Wait until every state that a run has saved so far is where it belongs."""
        for worker, _ in tuple(self.fleet.workers.values()):
            assert worker._checkpoints._sending.flush(60.0)
            assert worker._checkpoints._disk is None or worker._checkpoints._disk.flush(60.0)
        self._start(self.controller.status()).result()  # what was sent before has arrived
        archive = self.controller._states.archive._disk
        assert archive is None or archive.flush(60.0)

    def lose(self) -> None:
        """From now on the controller is gone, as far as drivers can tell."""
        self.lost = True
        for client_id in tuple(self.controller._drivers.known):  # answers now, so that it is asked again
            self._start(self.controller.leave(client_id)).result()

    def end(self) -> None:
        """End controller, loop and threads."""
        self._start(self.controller.close()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _start(self, what):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(what, self.loop)


def open_pool(
    workers: int = 2,
    output: Path | None = None,
    make_engine: Callable[[], FakeEngine] = FakeEngine,
    hold_seconds: float = HOLD_SECONDS,
    scheduler: SchedulerConfig | None = None,
) -> ModelPool:
    """A pool in this process; closing it ends everything."""
    line = LoopConnection(workers, make_engine, scheduler=scheduler)
    return ModelPool(line, line.end, output, hold_seconds=hold_seconds)


def open_real_pool(
    config: PoolConfig, wrap: Callable[[WorkerEngine], WorkerEngine] = lambda engine: engine
) -> ModelPool:
    """The pool of `config` in this process, with real engines, each in a `wrap`, and a real catalog. Closing it ends
    everything."""
    # by one thread: diffusers' modules import each other, which fails if the catalog and an engine begin at once
    importlib.import_module("modelpool.pool.engine.engine")
    plan = plan_pool(config, gpu_count=0, can_grow=False)
    engines: list[WorkerEngine] = []

    def make_engine() -> WorkerEngine:
        engines.append(wrap(plan.open_engine()))
        return engines[-1]

    line = LoopConnection(
        len(plan.worker_ids), make_engine, plan.open_catalog, plan.scheduler, plan.budget_bytes, plan.pins
    )

    def close() -> None:
        line.end()
        for engine in engines:
            engine.close()

    return ModelPool(line, close, None)
