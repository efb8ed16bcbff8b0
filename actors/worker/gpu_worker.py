"""`GpuWorker`: owns one GPU. A thin shell around one engine, without Ray, so that tests create it directly.

Rules
1. `run` never raises: every outcome becomes a `RunError` value in the report of that attempt. Only a call that is not
   accepted raises (rule 4).
2. One thread uses the engine: the only one of Ray's `compute` group, so that runs begin in the order in which
   they were sent. With runs that overlap, the engine has a thread of its own (`_in_turn`), and `run` returns while the
   device still decodes: `ends` waits for that on another thread. Stops, status calls and preload
   requests arrive on other threads, too, and touch only the values named in `__init__`.
3. A worker that its GPU no longer answers reports the run as WORKER_LOST and then ends (`watch` returns): a new
   process replaces it, since no later run could succeed in this one. Both signals mean the same, in either order.
   So does one with a full or broken disk, or no file left to open: its jobs run elsewhere.
4. Calls of a controller have its epoch. Calls of an older one than the worker serves raise OlderEpoch, and its runs
   that are under way stop (`actors.worker.worker_lease`).

Knows neither Ray nor the scheduler, and imports torch only through its engine.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from modelpool.actors.worker.fetch_cost import FetchCost
from modelpool.actors.worker.file_check import FilesUnavailable
from modelpool.actors.worker.file_verifier import FilesInUse
from modelpool.actors.worker.gang_store import LOOPBACK, GangStore
from modelpool.actors.worker.own_results import OwnResults
from modelpool.actors.worker.prefetcher import Prefetcher
from modelpool.actors.worker.process_memory import ProcessMemory, process_memory
from modelpool.actors.worker.revoked_runs import RevokedRuns
from modelpool.actors.worker.run_checkpoints import RunCheckpoints
from modelpool.actors.worker.run_files import RunFiles
from modelpool.actors.worker.run_memory import RunMemory
from modelpool.actors.worker.run_previews import RunPreviews
from modelpool.actors.worker.running_pass import Passes, RunningPass, input_count
from modelpool.actors.worker.step_reports import StepReports
from modelpool.actors.worker.storage_meter import StorageMeter
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    RunEnds,
    RunMode,
    RunRequest,
    StartedWorker,
)
from modelpool.actors.worker.worker_growth import Capacity, WorkerGrowth
from modelpool.actors.worker.worker_lease import WorkerLease
from modelpool.actors.worker.worker_process import WorkerProcess, this_process
from modelpool.actors.worker.worker_setup import (
    NO_CHECKPOINTS,
    UNKNOWN_NODE,
    Checkpointing,
    WorkerCallbacks,
    WorkerNode,
)
from modelpool.pool.devices.memory_limits import host_memory as available_memory
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.fast_path import FastPaths
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.gang_errors import GangBroken
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    BatchMember,
    DecodedTiles,
    DecodeParams,
    Encoded,
    FloatArray,
    ImageEmbeds,
    ImagePixels,
    Latent,
    Mask,
    ModelRef,
    Outcome,
    PreloadRequest,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    SamplerState,
    StageParams,
    Stopped,
    VideoFrames,
    VideoMask,
)
from modelpool.pool.values.core.task_inputs import TaskInputs, WrongInputs
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    OomStep,
    Role,
    RunCost,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency

if TYPE_CHECKING:
    from modelpool.pool.engine.engine_capacity import EngineFacts
    from modelpool.pool.engine.open_pass import Joining

logger = logging.getLogger(__name__)

#: interval of step reports, counted from the start of a run; the report covers the last step. Runs that should end
#: within it send none (`StepReports`)
PROGRESS_SECONDS = 0.2
#: stops that are remembered, as a stop may arrive before its run begins; more than the tasks of any batch
STOPS_REMEMBERED = 256
#: a disk that is full, read-only, broken or gone, or no file left to open: every run of this process may need it
_OF_THE_MACHINE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE),
        *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE),
    }
)
_T = TypeVar("_T")
#: the report and the result of a run; neither if it did not start
_Answer: TypeAlias = tuple[TaskReport | None, Result | None]


class WorkerEngine(Protocol):
    """The part of `pool.engine.engine.Engine` that a worker needs."""

    @property
    def capacity(self) -> Capacity:
        """Return its memory, which may grow."""

    def introduce(self) -> EngineFacts:
        """Return capacity and device."""

    def run(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
        resume: RunState | None = None,
        gang: Gang | None = None,
    ) -> tuple[Result, RunCost]:
        """Run the task, from `resume` if it is set, with the other workers of `gang`; may raise anything."""

    def begin(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
        resume: RunState | None = None,
    ) -> Callable[[], tuple[Result, RunCost]]:
        """As `run`; what the device still computes is waited for by the returned function, on any thread."""

    @property
    def is_pending(self) -> bool:
        """Whether the device may still compute a begun run, for which later runs did not wait."""

    def poll_pending(self) -> None:
        """Release what a begun run holds if somebody has its result."""

    def release_pending(self) -> None:
        """Wait for a begun run that the device still computes, and release what it holds."""

    def run_batch(
        self, members: Sequence[BatchMember], needed_next: tuple[ComponentKey, ...] = ()
    ) -> tuple[Outcome, ...]:
        """Run a batch; never raises."""

    def residency(self) -> Residency:
        """Return the weights on the device."""

    def prepare_previews(self, model: ModelRef, wish: PreviewWish) -> None:
        """Prepare previews before a run; may raise anything."""

    def preview(self, model: ModelRef, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        """Return a preview of a latent; called from another thread."""

    def load_weights(
        self,
        model: ModelRef,
        roles: Sequence[Role],
        kept: Sequence[ComponentKey] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Load components of a model outside of runs; return the bytes on the bus. May raise anything."""

    def run_pass(self, joining: Joining, needed_next: tuple[ComponentKey, ...] = ()) -> None:
        """Run a pass that others may join; never raises."""

    def close_unused_models(self) -> None:
        """Close all models that no run uses, with their files."""

    def close(self) -> None:
        """Free all memory of the device."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """What a worker measures of its device, and what the operator states instead.

    attention                   whether the attention kernel for each class of shapes is measured; only on CUDA
    gang_link_bytes_per_second  to other GPUs of the machine; None: gangs measure it
    """

    attention: bool = False
    gang_link_bytes_per_second: int | None = None


USUAL_MEASURING = Measuring()


def open_engine(
    device: str,
    budget_bytes: int | None,
    threads: int,
    vram_policy: VramPolicy | None = VramPolicy.NORMAL,
    reserve_bytes: int | None = None,
    products: str = "exact",
    measuring: Measuring = USUAL_MEASURING,
    loras_at_run_time: bool = False,
    memory_format: str = "contiguous",
    fast_paths: FastPaths | None = None,
) -> WorkerEngine:
    """Open the real engine, on the one device that this process can use. Imports torch. Raises UserError."""
    from modelpool.pool.engine.engine import Engine, EngineSettings
    from modelpool.pool.weights.ops.layer_choice import Products
    from modelpool.pool.weights.patcher.weight_form import MemoryFormat

    return Engine.open(
        EngineSettings(
            device,
            budget_bytes=budget_bytes,
            threads=threads,
            vram_policy=vram_policy,
            reserve_bytes=reserve_bytes,
            products=Products(products),
            measures_attention=measuring.attention,
            loras_at_run_time=loras_at_run_time,
            memory_format=MemoryFormat(memory_format),
            fast_paths=fast_paths,
            peer_bytes_per_second=measuring.gang_link_bytes_per_second,
        )
    )


class _Ending:
    """The end of a run that the device may still compute. Any thread may wait for it, any number of times."""

    def __init__(self, request: RunRequest, end: Callable[[], tuple[TaskReport, Result | None]]) -> None:
        """`end` waits for the end, on any thread; it is called once."""
        self.key = request.epoch, request.run
        self._end = end
        self._lock = threading.Lock()
        self._answer: tuple[TaskReport, Result | None] | None = None

    def wait(self) -> tuple[TaskReport, Result | None]:
        """Wait for the end; return report and result."""
        with self._lock:
            if self._answer is None:
                self._answer = self._end()
            return self._answer


@dataclass(slots=True)
class _RunsInOrder:
    """The runs of a call in order: the ends so far, and the last run if only that is not over, as it still decodes."""

    ends: list[_Answer] = field(default_factory=list)
    last: _Ending | None = None


class GpuWorker:
    """Runs tasks on one GPU, one run at a time. `run` begins runs, `join` lets one join those that are under way, and
    `ends` has the ends that `run` has not returned yet."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        open_engine: Callable[[], WorkerEngine],
        callbacks: WorkerCallbacks,
        progress_seconds: float = PROGRESS_SECONDS,
        node: WorkerNode = UNKNOWN_NODE,
        checkpointing: Checkpointing = NO_CHECKPOINTS,
        lease: WorkerLease | None = None,
        overlaps_decode: bool = False,
    ) -> None:
        """`lease` has the epoch of its controller; without one, all calls are accepted. With `overlaps_decode`, a
        decode may overlap with the runs after it."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._open_engine = open_engine
        self._on_steps = callbacks.on_steps
        self._progress_seconds = progress_seconds
        #: returns the reports of the steps of one run, or of those that are computed together
        self._step_reports: Callable[[], StepReports] = lambda: StepReports(
            self._progress_seconds, lambda steps: self._on_steps(steps), self._is_current
        )
        self._node = node.node
        self._memory = RunMemory()
        self._checkpoints = RunCheckpoints(worker_id, incarnation, checkpointing, callbacks.on_state)
        self._previews = RunPreviews(worker_id, incarnation, self._preview, callbacks.on_preview)
        self._engine: WorkerEngine | None = None
        self._lease = lease or WorkerLease()
        self._ended = threading.Event()
        on_judged = callbacks.on_judged
        judged = None if on_judged is None else lambda files: on_judged(files, self._lease.epoch)
        self._files = RunFiles(node, judged, self._close_models, self._ended.is_set)
        self._prefetcher = Prefetcher(self._files.ranges_of)
        storage, prefetcher = StorageMeter(), self._prefetcher
        #: returns the bytes that this process read from disks, without prefetched ones
        self._storage_bytes: Callable[[], int] = lambda: storage.read_bytes() - prefetcher.storage_bytes
        #: a preload request and the run that it belongs to; replaced atomically by another thread
        self._preload_request: tuple[int, PreloadRequest] | None = None
        #: runs to stop, oldest first; used by several threads, one atomic operation at a time
        self._stops: dict[int, None] = {}
        #: runs to stop between two steps, with their state; likewise
        self._pauses: dict[int, None] = {}
        #: the calls in order that are under way; changed by single atomic operations
        self._in_order: dict[CallId, _RunsInOrder] = {}
        #: the ends of decodes that the device may still compute, by epoch and run; likewise
        self._endings: dict[tuple[int, int], _Ending] = {}
        #: replaced with the controller
        self._revoked = RevokedRuns()
        #: likewise
        self._own_results = OwnResults()
        #: the thread that uses the engine; None: the caller's
        self._compute = ThreadPoolExecutor(1, "compute") if overlaps_decode else None
        #: whether the thread of the engine uses it; set there
        self._computes = False
        self._gang_store = GangStore()
        #: reports are made by one thread at a time
        self._reporting = threading.Lock()
        #: memory that other processes give back
        self.growth = WorkerGrowth(self._lease, lambda: self._engine, self._in_turn, lambda: self._computes)
        #: passes that runs join at a step
        self._passes = Passes(self._lease, _PassMembers(self))

    def start(self, epoch: int = 0) -> WorkerSpec:
        """Open the engine. Raises what the engine raises: UserError if there is no such device; and OlderEpoch, also if
        another controller took over meanwhile: that one adopts this worker."""
        return self._in_turn(lambda: self._start(epoch))

    def _start(self, epoch: int) -> WorkerSpec:
        self._lease.check(epoch)
        self._engine = self._open_engine()
        facts = self._engine.introduce()
        self._checkpoints.open()
        self._files.open()
        self._lease.check(epoch)
        return self._introduction(facts)

    def change_controller(self, epoch: int) -> WorkerProcess:
        """Serve the controller of this epoch from now on: runs and loads of earlier ones stop at their next step.
        Returns at once, on any thread. Raises OlderEpoch."""
        self._lease.pass_to(epoch)
        # a controller counts its runs from 1
        self._stops, self._pauses, self._preload_request, self._revoked = {}, {}, None, RevokedRuns()
        self._own_results = OwnResults()
        self._in_order, self._endings = {}, {}
        self._passes.close()
        self._previews.forget_wishes()
        self._files.tell_again()
        return self.ping(epoch)

    def adopt(self, worker_id: WorkerId, incarnation: int, epoch: int = 0) -> StartedWorker:
        """Continue under this name, with all weights in place: what `start` is for a worker of an earlier controller.
        Called where `run` is, after its last run. Raises OlderEpoch, and as `start` if that had not ended; also then it
        was taken over, and the time does not measure a start."""
        return self._in_turn(lambda: self._adopt(worker_id, incarnation, epoch))

    def _adopt(self, worker_id: WorkerId, incarnation: int, epoch: int) -> StartedWorker:
        self._lease.check(epoch)
        self._worker_id, self._incarnation = worker_id, incarnation
        self._checkpoints.rename(worker_id, incarnation)
        self._previews.rename(worker_id, incarnation)
        spec = self._start(epoch) if self._engine is None else self._introduction(self._engine.introduce())
        assert self._engine is not None, "start opens it"
        if self._compute is not None:  # a decode that nobody waits for any more
            self._engine.release_pending()
            self._endings = {}
        with self._reporting:
            return StartedWorker(spec, self._engine.residency(), self._memory.runs())

    def _introduction(self, facts: EngineFacts) -> WorkerSpec:
        return WorkerSpec(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            capacity_bytes=facts.capacity_bytes,
            link_bytes_per_second=facts.link_bytes_per_second,
            device_name=facts.device_name,
            node=self._node,
            host_bytes=available_memory().available_bytes,
            files_address=self._files.address,
            cache_bytes=self._files.cache_bytes,
            cached_files=self._files.on_disk(),
            overlaps_decode=self._compute is not None,
            holds_shares=facts.holds_shares,
            gang_link_bytes_per_second=facts.gang_link_bytes_per_second,
        )

    def may_start(self, request: RunRequest) -> bool:
        """Return whether a run may start: it was not revoked, and the runs of this worker that make its inputs have
        succeeded. Waits for a decode that makes one of them. Called before each run, once, on the thread of the runs.
        Raises OlderEpoch."""
        self._lease.check(request.epoch)
        for run in request.own:
            ending = self._endings.get((request.epoch, run))
            if ending is not None:
                ending.wait()
        return self._own_results.claim(request.own) and self._revoked.start(request.run)

    def revoke(self, run: int, epoch: int = 0) -> bool:
        """Take back a run that was sent here; return False if it has started. Returns at once, on any thread. Raises
        OlderEpoch."""
        self._lease.check(epoch)
        return self._revoked.revoke(run)

    def run(self, call: CallId, requests: Sequence[RunRequest], *inputs: Result) -> RunEnds:
        """Run one attempt of each request: one after the other, as a batch if possible, or as a pass, until nobody is
        in it.

        `inputs` are the inputs of the first request, then the inputs of the second, and so on. Returns the end of each,
        unless the last one in order still decodes while the next call begins: `ends` has its end, and all ends of a
        pass. A result is None exactly if its report has an error, except that it is the state of a run that was stopped
        with it (`TaskReport.has_state`), and that of a gang only the leader has the result. Runs that were not started
        are those that may not start (`may_start`), and those after the loss of the GPU; in a batch, all are. Raises
        OlderEpoch, and PassIsOver for a pass if nobody would hear of their ends.
        """
        match call.mode:
            case RunMode.BATCH:
                return self._in_turn(lambda: self._run_batch(requests, inputs))
            case RunMode.PASS:
                self._passes.run(call, requests, inputs)
                return RunEnds()
        under_way = self._in_order[call] = _RunsInOrder()
        try:
            under_way.last = self._in_turn(lambda: self._run_in_order(requests, inputs, under_way.ends))
        finally:
            if under_way.last is None:
                self._in_order.pop(call, None)
        return _run_ends(under_way.ends)

    def join(self, call: CallId, request: RunRequest, *inputs: Result) -> bool:
        """Let a run join a pass at its next step. Returns at once, on any thread: False if the pass is over. It need
        not have begun. Raises OlderEpoch."""
        return self._passes.join(call, request, inputs)

    def ends(self, wanted: EndsWanted) -> RunEnds:
        """Return ends of runs of a call, on any thread. In order, it waits for a last run that still decodes only, and
        has none before the call has begun and after it has ended. A pass need not have begun, and has none after
        waiting if it is over and all were told. Raises OlderEpoch."""
        self._lease.check(wanted.call.epoch)
        if wanted.call.mode is RunMode.PASS:
            return _run_ends(self._passes.ends(wanted))
        under_way = self._in_order.get(wanted.call)
        if under_way is None:
            return RunEnds()
        if wanted.waits and under_way.last is not None:
            under_way.ends.append(self._end(under_way.last))
            self._in_order.pop(wanted.call, None)
        return _run_ends(under_way.ends[wanted.told : wanted.told + wanted.most])

    def _end(self, ending: _Ending) -> tuple[TaskReport, Result | None]:
        """Wait for the end of a decode, and have the thread of the engine release what it held."""
        try:
            return ending.wait()
        finally:
            self._endings.pop(ending.key, None)
            if self._compute is not None and self._engine is not None:
                with suppress(RuntimeError):  # the worker was closed meanwhile
                    self._compute.submit(self._engine.poll_pending)

    def _in_turn(self, work: Callable[[], _T]) -> _T:
        """Return `work()`, by the thread that uses the engine, after all that was asked of it before."""
        return self._computed(work) if self._compute is None else self._compute.submit(self._computed, work).result()

    def _computed(self, work: Callable[[], _T]) -> _T:
        self._computes = True
        try:
            return work()
        finally:
            self._computes = False

    def _begin(self, request: RunRequest, inputs: tuple[Result, ...]) -> tuple[TaskReport, Result | None] | _Ending:
        """Run one attempt; of one that decodes with runs that overlap, return the end."""
        own_results = self._own_results  # of the controller that sent it: the next one counts its runs from 1, too
        self._lease.check(request.epoch)
        assert self._engine is not None, "start comes before run"
        begun: Callable[[], tuple[Result, RunCost]] | Outcome
        fetched: FetchCost | None = None
        read_before = self._storage_bytes()
        state: RunState | None = None
        in_use = FilesInUse()
        try:
            if request.fetch is not None:
                fetched = self._files.fetch_of_runs((request,), self._should_stop)
                read_before = self._storage_bytes()
            in_use = self._files.begin_runs((request,))
            if request.own:
                inputs = own_results.complete(request.own, inputs)
            own, sent = _split_inputs(request, inputs)
            # the other members would not have the state on one member's disk
            state = sent if request.gang is not None else self._checkpoints.resume(request, sent)
            resume: dict[str, Any] = {} if state is None else {"resume": state}
            self._prepare_previews((request,))
            hooks = self._hooks(request, self._step_reports())
            if request.gang is not None:
                task, work, after = request.task, request.work, request.needed_next
                begun = self._engine.run(task, work, own, hooks, request.fresh, after, state, request.gang)
            elif self._compute is None:
                begun = self._engine.run(
                    request.task, request.work, own, hooks, request.fresh, request.needed_next, **resume
                )
            else:
                begun = self._engine.begin(
                    request.task, request.work, own, hooks, request.fresh, request.needed_next, **resume
                )
        except (Exception, SystemExit) as raised:
            begun = self._files.explained(request, _as_failure(raised))
        storage_bytes, residency = self._storage_bytes() - read_before, self._engine.residency()

        def end() -> tuple[TaskReport, Result | None]:
            outcome, unverified = self._files.end_run(_outcome_of(begun) if callable(begun) else begun, in_use)
            outcome = _with_fetch(outcome, fetched)
            with self._reporting:
                report, result = self._report(request, outcome, storage_bytes, state, residency, unverified)
            if report.error is None and result is not None:
                own_results.keep(request.run, result, report.result_bytes)
            return report, result

        # only a decode may be computed yet
        if self._compute is None or not isinstance(request.work, DecodeParams) or not self._engine.is_pending:
            return end()
        ending = _Ending(request, end)
        self._endings[ending.key] = ending
        return ending

    def _run_in_order(
        self, requests: Sequence[RunRequest], inputs: tuple[Result, ...], answers: list[_Answer]
    ) -> _Ending | None:
        """Run the requests, each decode overlapping with the next one, unless that reads its result. Returns the end of
        the last one if that is not in `answers`."""
        rest = iter(inputs)
        pending: _Ending | None = None
        for request in requests:
            own = tuple(islice(rest, input_count(request)))
            if pending is not None and pending.key[1] in request.own:
                answers.append(self._end(pending))
                pending = None
            begun: _Answer | _Ending = (None, None)
            if not self._ended.is_set() and self.may_start(request):
                begun = self._begin(request, own)
            if pending is not None:
                answers.append(self._end(pending))
                pending = None
            if isinstance(begun, _Ending):
                pending = begun
            else:
                answers.append(begun)
        return pending

    def _run_batch(self, requests: Sequence[RunRequest], inputs: tuple[Result, ...]) -> RunEnds:
        """Run the requests as a batch. It is never sent ahead, and so was not revoked."""
        for request in requests:
            self.may_start(request)
        assert self._engine is not None, "start comes before run"
        members, rest, reports = [], iter(inputs), self._step_reports()
        for request in requests:
            own, sent = _split_inputs(request, tuple(islice(rest, input_count(request))))
            state = self._checkpoints.resume(request, sent)
            hooks = self._hooks(request, reports, tells=request is requests[-1])
            members.append(BatchMember(request.task, request.work, own, hooks, state))
        outcomes: Sequence[Outcome]
        in_use = FilesInUse()
        fetched: FetchCost | None = None
        read_before = self._storage_bytes()
        try:
            if any(request.fetch is not None for request in requests):
                fetched = self._files.fetch_of_runs(requests, self._should_stop)
                read_before = self._storage_bytes()
            in_use = self._files.begin_runs(requests)
            self._prepare_previews(requests)
            outcomes = [
                self._files.explained(requests[0], outcome) if isinstance(outcome, Exception) else outcome
                for outcome in self._engine.run_batch(members, requests[0].needed_next)
            ]
        except (Exception, SystemExit) as raised:
            outcomes = [_as_failure(raised)] * len(members)
        share_bytes = (self._storage_bytes() - read_before) // len(requests)
        if fetched is not None:
            fetched = fetched.share(len(requests))
        residency = self._engine.residency()
        verified = [self._files.end_run(outcome, in_use) for outcome in outcomes]
        with self._reporting:
            return _run_ends(
                self._report(request, _with_fetch(outcome, fetched), share_bytes, member.resume, residency, unverified)
                for request, member, (outcome, unverified) in zip(requests, members, verified, strict=True)
            )

    def load(self, request: LoadRequest) -> LoadReport:
        """Load weights outside of runs, until all are loaded or `stop` names the request. Fails with a value. Raises
        OlderEpoch."""
        return self._in_turn(lambda: self._load(request))

    def _load(self, request: LoadRequest) -> LoadReport:
        self._lease.check(request.epoch)
        assert self._engine is not None, "start comes before load"
        error: RunError | None = None
        should_stop = partial(self._should_stop, request)
        try:
            if request.fetch is not None:
                self._files.fetch_of_load(request, should_stop)
            self._files.begin_load(request)
            self._engine.load_weights(request.model, request.roles, request.kept, should_stop)
        except Stopped:
            pass
        except (Exception, SystemExit) as raised:
            error = run_error(_as_failure(raised))
            if error.kind is RunErrorKind.WORKER_LOST:
                self._ended.set()
        return LoadReport(self._engine.residency(), error)

    def stop(self, run: int, keep_state: bool = False, epoch: int = 0) -> None:
        """Stop that run at its next step, even if it has not begun yet. Does nothing if it is over. With `keep_state`,
        a sampling run that has done a step ends with its state as its result; other stages continue to their end.
        Raises OlderEpoch."""
        self._lease.check(epoch)
        stops = self._pauses if keep_state else self._stops
        stops[run] = None
        for old in tuple(stops)[:-STOPS_REMEMBERED]:
            stops.pop(old, None)

    def want_previews(self, run: int, wish: PreviewWish | None, epoch: int = 0) -> None:
        """Make previews of that run as `wish` says from now on, or none. Does nothing if it is over. Returns at once.
        Raises OlderEpoch."""
        self._lease.check(epoch)
        self._previews.want(run, wish)

    def prefetch(self, parts: Sequence[FilePart], epoch: int = 0) -> None:
        """Read these files into the page cache while runs continue, in place of earlier ones. Returns at once; does
        what it can, and never fails a run. Raises OlderEpoch.
        """
        self._lease.check(epoch)
        self._prefetcher.begin(parts)

    def preload(self, run: int, preload_request: PreloadRequest, epoch: int = 0) -> None:
        """Preload the weights of these tasks to the GPU during that run, in place of earlier requests. Returns at
        once. Stops where it would delay the run; does nothing if that is over. Raises OlderEpoch.
        """
        self._lease.check(epoch)
        self._preload_request = (run, preload_request)

    def forget_checkpoints(self, task_id: TaskId, epoch: int = 0) -> None:
        """Remove the checkpoints of a task, which is over. Returns at once. Raises OlderEpoch."""
        self._lease.check(epoch)
        self._checkpoints.forget(task_id)

    def ping(self, epoch: int = 0) -> WorkerProcess:
        """Return its process, which proves that it answers. Raises OlderEpoch."""
        self._lease.check(epoch)
        return this_process(self._node)

    def gang_address(self, host: str = LOOPBACK) -> str:
        """Return "host:port" of the store at which the members of the gangs that this worker leads meet
        (`Gang.address`); `host` is the address of this machine for them. Opened once, on any thread."""
        return self._gang_store.address(host)

    def memory_report(self) -> ProcessMemory:
        """Return the host memory of this process."""
        return process_memory()

    def watch(self) -> None:
        """Return when the worker has ended. A waiting caller notices at once when the process dies."""
        self._ended.wait()

    def close(self) -> None:
        """Free all GPU memory. Idempotent."""
        if self._engine is not None:
            self._in_turn(self._engine.close)
        if self._compute is not None:
            self._compute.shutdown()
            self._compute = None
        self._checkpoints.close()
        self._previews.close()
        self._prefetcher.close()
        self._files.close()
        self._gang_store.close()
        self._ended.set()

    def _preview(self, model: ModelRef, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        assert self._engine is not None, "a run has offered the latent"
        return self._engine.preview(model, latent_CHW, wish)

    def _prepare_previews(self, requests: Sequence[RunRequest]) -> None:
        """Prepare the previews that are wanted of sampling runs. Without them, a run still has its result."""
        assert self._engine is not None, "start comes before run"
        wanted: dict[tuple[ModelRef, PreviewWish], None] = {}
        for request in requests:
            wish = self._previews.wish_of(request)
            if wish is not None and isinstance(request.work, SampleParams):
                wanted[request.work.model, wish] = None
        for model, wish in wanted:
            try:
                self._engine.prepare_previews(model, wish)
            except Exception as problem:
                logger.warning("no previews of %s: %s: %s", model.name, type(problem).__name__, problem)

    def _hooks(self, request: RunRequest, reports: StepReports, tells: bool = True) -> RunHooks:
        """Return the hooks of a run; `tells` is False if another one tells of its steps."""
        done = [0]
        return RunHooks(
            reports.callback(request, lambda: (self._worker_id, self._incarnation), done, tells),
            lambda: self._should_stop(request),
            lambda: self._preload_for(request),
            lambda: request.run in self._pauses and self._is_current(request),
            self._checkpoint_callback(request),
            self._previews.callback(request, lambda: done[0], lambda: self._is_current(request)),
        )

    def drop_weights(self, epoch: int = 0) -> None:
        """Take all weights off the GPU, and close their files, as some are not the expected ones. Called where `run`
        is. Raises OlderEpoch."""
        self._lease.check(epoch)
        self._in_turn(self._close_models)

    def _close_models(self) -> None:
        if self._engine is not None:
            self._engine.close_unused_models()

    def _report(
        self,
        request: RunRequest,
        outcome: Outcome,
        storage_bytes: int,
        resumed: RunState | None,
        residency: Residency,
        unverified: tuple[int, ...],
    ) -> tuple[TaskReport, Result | None]:
        """Return the report and the result of an attempt that read `storage_bytes` from disks, `resumed` from a state,
        and left this `residency`. Called with `_reporting`."""
        result: Result | None = None
        cost, error, step, steps = RunCost(), None, 0, 0
        if isinstance(outcome, GangBroken) and outcome.state is not None:
            result = outcome.state
            step, steps = result.step, result.steps
        if isinstance(outcome, Exception):
            error = run_error(outcome)
            error = replace(error, oom_steps=request.oom_steps + error.oom_steps)
            if error.kind is RunErrorKind.WORKER_LOST:
                self._ended.set()
        else:
            result, cost = outcome
            if request.gang is not None and not request.gang.leads and not isinstance(result, RunState):
                result = None  # the leader's is the run's
            # prefetched bytes are counted by blocks, one of which may be in progress
            storage_bytes = max(0, storage_bytes)
            if request.oom_steps or storage_bytes != cost.storage_bytes:
                cost = replace(cost, oom_steps=request.oom_steps + cost.oom_steps, storage_bytes=storage_bytes)
            if isinstance(result, RunState):
                step, steps = result.step, result.steps
                message = f"stopped on request after step {step} of {steps}, with its state"
                error = RunError(RunErrorKind.CANCELLED, message)
        if resumed is not None:
            cost = replace(cost, steps_before=resumed.step, steps=resumed.steps)
        if error is None and request.gang is None:
            self._memory.note(request.task, cost)
        stopped = result if isinstance(result, RunState) else None
        # else its result goes nowhere, and another controller may use the states
        may_save = not unverified and not request.provisional
        has_checkpoints = self._is_current(request) and self._checkpoints.ended(
            request, error, stopped if may_save else None, resumed is not None
        )
        report = TaskReport(
            task_id=request.task.task_id,
            attempt=request.attempt,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            residency=residency,
            cost=cost,
            error=error,
            result_bytes=0 if result is None else result_bytes(result),
            step=step,
            steps=steps,
            has_checkpoints=has_checkpoints,
            unverified=unverified,
        )
        return report, result

    def _should_stop(self, request: RunRequest | LoadRequest) -> bool:
        return request.run in self._stops or not self._is_current(request)

    def _is_current(self, request: RunRequest | LoadRequest) -> bool:
        """Whether the controller that sent it is the one that this worker serves."""
        return request.epoch >= self._lease.epoch

    def _preload_for(self, request: RunRequest) -> PreloadRequest | None:
        request_and_run = self._preload_request
        if request_and_run is None or request_and_run[0] != request.run or not self._is_current(request):
            return None
        return request_and_run[1]

    def _checkpoint_callback(self, request: RunRequest) -> Callable[[Callable[[], Sequence[RunState]]], None]:
        """Return a callback that saves the state between two steps, unless another controller took over meanwhile, or
        the hash of a file is not known."""
        save = self._checkpoints.callback(request)
        if request.provisional:
            return lambda states: None
        # one of a file that is not the expected one would spoil the next run
        return lambda states: save(states) if self._is_current(request) and self._files.is_settled else None


class _PassMembers:
    """Prepares the runs of a worker that share a pass, and reports them."""

    def __init__(self, worker: GpuWorker) -> None:
        self._worker = worker
        #: bytes that were read from disks before: those after them are charged to whoever ends next
        self._read_bytes = 0
        #: of the pass that runs
        self._reports = worker._step_reports()

    def run(self, running: RunningPass, needed_next: tuple[ComponentKey, ...]) -> None:
        """Run a pass to its end."""
        engine = self._worker._engine
        assert engine is not None, "start comes before run"
        self._read_bytes = self._worker._storage_bytes()
        self._reports = self._worker._step_reports()
        self._worker._in_turn(partial(engine.run_pass, running, needed_next))

    def prepare(self, request: RunRequest, inputs: tuple[Result, ...], joins: bool) -> tuple[BatchMember, FilesInUse]:
        """Return the member of a run, which begins a pass or joins others. May raise anything."""
        worker = self._worker
        worker.may_start(request)
        if request.fetch is not None:
            worker._files.fetch_of_runs((request,), worker._should_stop)
        in_use = worker._files.begin_joining(request) if joins else worker._files.begin_runs((request,))
        own, sent = _split_inputs(request, inputs)
        state = worker._checkpoints.resume(request, sent)
        worker._prepare_previews((request,))
        hooks = worker._hooks(request, self._reports, tells=False)
        return BatchMember(request.task, request.work, own, hooks, state), in_use

    def stepped(self) -> None:
        """All runs have done a step."""
        self._reports.tell()

    def report(
        self, request: RunRequest, member: BatchMember | None, outcome: Outcome, in_use: FilesInUse
    ) -> tuple[TaskReport, Result | None]:
        """Return the report and the result of a run; of one that could not be prepared, there is no `member`."""
        worker = self._worker
        assert worker._engine is not None, "start comes before run"
        if isinstance(outcome, Exception):
            outcome = worker._files.explained(request, outcome)
        read_bytes = worker._storage_bytes()
        share_bytes, self._read_bytes = read_bytes - self._read_bytes, read_bytes
        outcome, unverified = worker._files.end_run(outcome, in_use)
        resumed, residency = None if member is None else member.resume, worker._engine.residency()
        with worker._reporting:
            return worker._report(request, outcome, share_bytes, resumed, residency, unverified)


def _run_ends(ends: Iterable[_Answer]) -> RunEnds:
    found = tuple(ends)
    return RunEnds(tuple(report for report, _ in found), tuple(result for _, result in found))


def _split_inputs(request: RunRequest, inputs: tuple[Result, ...]) -> tuple[TaskInputs, RunState | None]:
    """Return the inputs of the task by name, and the state that its run resumes from."""
    if not request.resume:
        return TaskInputs.named(request.task.input_names, inputs), None
    *own, state = inputs
    if not isinstance(state, RunState):
        raise WrongInputs(f"{request.task.task_id} resumes from a RunState, found {type(state).__name__}")
    return TaskInputs.named(request.task.input_names, own), state


def _as_failure(raised: Exception | SystemExit) -> Exception:
    """Return the failure of a run; an exit that a library requests ends the run, not the worker."""
    if isinstance(raised, Exception):
        return raised
    failure = RuntimeError(f"sys.exit was called with {raised.code!r}")
    failure.__cause__ = raised
    return failure


def _outcome_of(begun: Callable[[], tuple[Result, RunCost]]) -> Outcome:
    try:
        return begun()
    except (Exception, SystemExit) as raised:
        return _as_failure(raised)


def _with_fetch(outcome: Outcome, fetched: FetchCost | None) -> Outcome:
    """Return the outcome with the cost of fetching its files."""
    if fetched is None or isinstance(outcome, Exception):
        return outcome
    result, cost = outcome
    return result, replace(
        cost, fetched_bytes=fetched.source_bytes, peer_bytes=fetched.peer_bytes, fetch_seconds=fetched.seconds
    )


def run_error(raised: Exception) -> RunError:
    """Convert an exception of a run to the value that decides whether the run is retried."""
    text = "".join(traceback.format_exception(raised))
    torch = sys.modules.get("torch")  # the library that raised its error has imported it
    oom_steps: tuple[OomStep, ...] = getattr(raised, "oom_steps", ())
    kind = _exhausted(raised)
    if kind is not None:
        return RunError(kind, str(raised) or "out of memory", text, oom_steps)
    if torch is not None and isinstance(raised, torch.AcceleratorError):  # after such an error CUDA refuses everything
        return RunError(RunErrorKind.WORKER_LOST, f"the device no longer answers: {raised}", text)
    if isinstance(raised, OSError) and raised.errno in _OF_THE_MACHINE:  # a job that comes next would fail, too
        return RunError(RunErrorKind.WORKER_LOST, f"its machine or its process is at an end: {raised}", text)
    if isinstance(raised, Stopped):
        return RunError(RunErrorKind.CANCELLED, "stopped on request")
    if isinstance(raised, FilesUnavailable):
        return RunError(
            RunErrorKind.FILE_UNAVAILABLE, str(raised), components=raised.components, file_names=raised.file_names
        )
    if isinstance(raised, GangBroken):
        return RunError(RunErrorKind.GANG_BROKEN, str(raised), text, suspected_ranks=raised.suspects)
    if isinstance(raised, UserError):
        return RunError(RunErrorKind.BAD_INPUT, str(raised), text)
    return RunError(RunErrorKind.INTERNAL, f"{type(raised).__name__}: {raised}", text)


def _exhausted(raised: Exception) -> RunErrorKind | None:
    """Return which memory `raised` reports as exhausted, if any."""
    if "torch" not in sys.modules:
        return RunErrorKind.OUT_OF_HOST_MEMORY if isinstance(raised, MemoryError) else None
    from modelpool.pool.weights.patcher.out_of_memory import ExhaustedMemory, exhausted_memory

    match exhausted_memory(raised):
        case ExhaustedMemory.DEVICE:
            return RunErrorKind.OUT_OF_VRAM
        case ExhaustedMemory.HOST:
            return RunErrorKind.OUT_OF_HOST_MEMORY
        case None:
            return None


def result_bytes(result: Result) -> int:
    """Return the bytes of the arrays in `result`."""
    match result:
        case Encoded() | Latent() | SamplerState() | RunState() | VideoFrames() | DecodedTiles():
            return sum(array.nbytes for array in result.arrays)
        case ImageEmbeds():
            return result.states_LD.nbytes
        case ImagePixels():
            return result.pixels_HWC.nbytes
        case AudioSamples():
            return result.samples_SC.nbytes
        case Mask():
            return result.values_HW.nbytes
        case VideoMask():
            return result.values_THW.nbytes
