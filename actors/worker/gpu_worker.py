"""`GpuWorker`: the actor that owns one GPU. A thin shell around one engine; plain, so that tests build it directly.

Rules
1. `run` never raises: whatever happens becomes a `RunError` value in the one report of that attempt.
2. One thread touches the engine (Ray's `compute` group has one thread). Stopping, asking and what is to come arrive on
   other threads and touch nothing but the values named in `__init__`.
3. A worker whose GPU no longer answers reports the run as WORKER_LOST and then is over (`watch` returns): it is
   replaced by a new process, since no later run could succeed in this one. Whichever of the two is heard first, it
   means the same.
Knows neither Ray nor the scheduler, and imports torch only by way of its engine.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from modelpool.actors.wire.messages import RunRequest, StepDone
from modelpool.actors.worker.host_memory import HostMemory, host_memory
from modelpool.actors.worker.prefetcher import ReadAhead
from modelpool.actors.worker.storage_meter import StorageMeter
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import (
    AudioSamples,
    Coming,
    Encoded,
    Halfway,
    ImagePixels,
    Latent,
    Mask,
    Member,
    Outcome,
    Result,
    RunHooks,
    Seen,
    Stopped,
    VideoFrames,
    VideoMask,
    Work,
)
from modelpool.pool.devices.memory_limits import host_memory as available_memory
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.plan.residency import Residency
from modelpool.pool.specs.spec import (
    ComponentKey,
    NodeId,
    RunCost,
    RunError,
    RunErrorKind,
    Rung,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)

if TYPE_CHECKING:
    from modelpool.pool.engine.engine import EngineFacts

#: steps are told this often, counted from the start of a run; the last one is told by the report. A message costs the
#: controller about as much as a task, so runs that are over sooner send none
PROGRESS_SECONDS = 0.05
#: a machine of its own
ALONE = NodeId("")
#: stops that are remembered; a stop may come before its run begins. More than tasks that are ever run together
STOPS_REMEMBERED = 256


class Engine(Protocol):
    """What a worker needs of `pool.engine.engine.Engine`."""

    def introduce(self) -> EngineFacts:
        """What it can hold."""

    def run(
        self,
        task: TaskSpec,
        work: Work,
        inputs: tuple[Result, ...],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
    ) -> tuple[Result, RunCost]:
        """Do `work`; may raise anything."""

    def run_together(
        self, members: Sequence[Member], needed_next: tuple[ComponentKey, ...] = ()
    ) -> tuple[Outcome, ...]:
        """Do the works of all members at once; never raises."""

    def residency(self) -> Residency:
        """Which weights are on the device."""

    def close(self) -> None:
        """Take every byte off the device."""


def open_engine(
    device: str,
    budget_bytes: int | None,
    threads: int,
    vram_policy: VramPolicy | None = VramPolicy.NORMAL,
    reserve_bytes: int | None = None,
) -> Engine:
    """The real engine, on the one device that this process sees. Imports torch. Raises UserError."""
    from modelpool.pool.engine.engine import Engine as PoolEngine
    from modelpool.pool.engine.engine import EngineSettings

    return PoolEngine.open(
        EngineSettings(
            device, budget_bytes=budget_bytes, threads=threads, vram_policy=vram_policy, reserve_bytes=reserve_bytes
        )
    )


class GpuWorker:
    """One GPU's worth of work, one run at a time."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        open_engine: Callable[[], Engine],
        on_step: Callable[[StepDone], None],
        progress_seconds: float = PROGRESS_SECONDS,
        node: NodeId = ALONE,
    ) -> None:
        """`node` names the machine, whose memory and disks its workers share."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._open_engine = open_engine
        self._on_step = on_step
        self._progress_seconds = progress_seconds
        self._node = node
        self._engine: Engine | None = None
        self._read_ahead = ReadAhead()
        self._storage = StorageMeter()
        #: what may be brought beside which run; replaced whole by another thread
        self._coming: tuple[int, Coming] | None = None
        #: runs that should stop, oldest first; touched by several threads, one atomic operation at a time
        self._stops: dict[int, None] = {}
        self._ended = threading.Event()

    def start(self) -> WorkerSpec:
        """Open the engine. Raises what the engine raises: UserError when there is no such device."""
        self._engine = self._open_engine()
        facts = self._engine.introduce()
        return WorkerSpec(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            capacity_bytes=facts.capacity_bytes,
            link_bytes_per_second=facts.link_bytes_per_second,
            device_name=facts.device_name,
            node=self._node,
            host_bytes=available_memory().available_bytes,
        )

    def run(self, request: RunRequest, *inputs: Result) -> tuple[TaskReport, Result | None]:
        """Make one attempt. The result is None exactly when the report has an error."""
        assert self._engine is not None, "start comes before run"
        outcome: Outcome
        read_before = self._storage_bytes()
        try:
            outcome = self._engine.run(
                request.task, request.work, inputs, self._hooks(request), request.fresh, request.needed_next
            )
        except Exception as raised:
            outcome = raised
        return self._told(request, outcome, self._storage_bytes() - read_before)

    def run_together(
        self, requests: Sequence[RunRequest], *inputs: Result
    ) -> tuple[tuple[TaskReport, ...], tuple[Result | None, ...]]:
        """Make one attempt each, in one run where that goes. `inputs` are those of the first request, then those of the
        second, and so on. A report and a result each, as of `run`."""
        assert self._engine is not None, "start comes before run"
        members, rest = [], iter(inputs)
        for request in requests:
            own = tuple(islice(rest, len(request.task.needs)))
            members.append(Member(request.task, request.work, own, self._hooks(request)))
        outcomes: Sequence[Outcome]
        read_before = self._storage_bytes()
        try:
            outcomes = self._engine.run_together(members, requests[0].needed_next)
        except Exception as raised:
            outcomes = [raised] * len(members)
        share_bytes = (self._storage_bytes() - read_before) // len(requests)
        told = [self._told(request, outcome, share_bytes) for request, outcome in zip(requests, outcomes, strict=True)]
        return tuple(report for report, _ in told), tuple(result for _, result in told)

    def stop(self, run: int) -> None:
        """Let that run end at its next step, also when it has not begun yet. Does nothing when it is over."""
        self._stops[run] = None
        for old in tuple(self._stops)[:-STOPS_REMEMBERED]:
            self._stops.pop(old, None)

    def read_ahead(self, parts: Sequence[FilePart]) -> None:
        """Bring these files into the machine's memory while runs go on, in place of what was asked for before. Returns
        at once; does what it can, and never fails a run."""
        self._read_ahead.begin(parts)

    def upload_ahead(self, run: int, coming: Coming) -> None:
        """Bring these tasks' weights to the GPU while that run goes on, in place of what was asked for before. Returns
        at once. It is done as far as it goes without holding up the run, and not at all when that is over."""
        self._coming = (run, coming)

    def ping(self) -> tuple[WorkerId, int]:
        """Worker and incarnation: it is alive."""
        return self._worker_id, self._incarnation

    def memory_report(self) -> HostMemory:
        """What this process takes of the host's memory."""
        return host_memory()

    def watch(self) -> None:
        """Return when the worker is over. A caller that waits for this learns at once when the process dies."""
        self._ended.wait()

    def close(self) -> None:
        """Take every byte off the GPU. Idempotent."""
        if self._engine is not None:
            self._engine.close()
        self._read_ahead.close()
        self._ended.set()

    def _hooks(self, request: RunRequest) -> RunHooks:
        return RunHooks(
            self._step_teller(request), lambda: self._should_stop(request), lambda: self._coming_beside(request)
        )

    def _storage_bytes(self) -> int:
        """What this process read from disks so far, but for what it read ahead."""
        return self._storage.read_bytes() - self._read_ahead.storage_bytes

    def _told(self, request: RunRequest, outcome: Outcome, storage_bytes: int) -> tuple[TaskReport, Result | None]:
        """What became of an attempt that read so much from disks, as its report and its result."""
        assert self._engine is not None, "start comes before run"
        result: Result | None = None
        cost, error = RunCost(), None
        if isinstance(outcome, Exception):
            error = run_error(outcome)
            error = replace(error, rungs=request.rungs + error.rungs)
            if error.kind is RunErrorKind.WORKER_LOST:
                self._ended.set()
        else:
            result, cost = outcome
            # what is read ahead is counted by blocks, one of which may be under way
            storage_bytes = max(0, storage_bytes)
            if request.rungs or storage_bytes != cost.storage_bytes:
                cost = replace(cost, rungs=request.rungs + cost.rungs, storage_bytes=storage_bytes)
        report = TaskReport(
            task_id=request.task.task_id,
            attempt=request.attempt,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            residency=self._engine.residency(),
            cost=cost,
            error=error,
            result_bytes=0 if result is None else result_bytes(result),
        )
        return report, result

    def _should_stop(self, request: RunRequest) -> bool:
        return request.run in self._stops

    def _coming_beside(self, request: RunRequest) -> Coming | None:
        told = self._coming
        return told[1] if told is not None and told[0] == request.run else None

    def _step_teller(self, request: RunRequest) -> Callable[[int, int], None]:
        """A function that passes steps on, but not too often and not the last one."""
        told_at = time.monotonic()

        def tell(step: int, steps: int) -> None:
            nonlocal told_at
            now = time.monotonic()
            if step < steps and now - told_at >= self._progress_seconds:
                told_at = now
                task_id, run = request.task.task_id, request.run
                self._on_step(StepDone(self._worker_id, self._incarnation, task_id, run, step, steps))

        return tell


def run_error(raised: Exception) -> RunError:
    """`raised` by a run, as the value that decides whether it is tried again."""
    text = "".join(traceback.format_exception(raised))
    torch = sys.modules.get("torch")  # whoever raised its error has imported it
    rungs: tuple[Rung, ...] = getattr(raised, "rungs", ())
    kind = _exhausted(raised)
    if kind is not None:
        return RunError(kind, str(raised) or "there is no memory left", text, rungs)
    if torch is not None and isinstance(raised, torch.AcceleratorError):  # CUDA refuses everything after such an error
        return RunError(RunErrorKind.WORKER_LOST, f"the device no longer answers: {raised}", text)
    if isinstance(raised, Stopped):
        return RunError(RunErrorKind.CANCELLED, "stopped at a step, as it was asked to")
    if isinstance(raised, UserError):
        return RunError(RunErrorKind.BAD_INPUT, str(raised), text)
    return RunError(RunErrorKind.INTERNAL, f"{type(raised).__name__}: {raised}", text)


def _exhausted(raised: Exception) -> RunErrorKind | None:
    """Whether `raised` says that memory is exhausted, and whose."""
    if "torch" not in sys.modules:
        return RunErrorKind.OUT_OF_HOST_MEMORY if isinstance(raised, MemoryError) else None
    from modelpool.pool.patcher.out_of_memory import Exhausted, exhausted

    match exhausted(raised):
        case Exhausted.DEVICE:
            return RunErrorKind.OUT_OF_VRAM
        case Exhausted.HOST:
            return RunErrorKind.OUT_OF_HOST_MEMORY
        case None:
            return None


def result_bytes(result: Result) -> int:
    """Bytes of the arrays in `result`."""
    match result:
        case Encoded() | Halfway():
            return sum(array.nbytes for array in result.arrays)
        case Seen():
            return result.states_LD.nbytes
        case Latent():
            return result.samples_CHW.nbytes
        case ImagePixels():
            return result.pixels_HWC.nbytes
        case VideoFrames():
            return result.frames_THWC.nbytes
        case AudioSamples():
            return result.samples_SC.nbytes
        case Mask():
            return result.values_HW.nbytes
        case VideoMask():
            return result.values_THW.nbytes
