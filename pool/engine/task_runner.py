"""`TaskRunner`: runs one task on one device within its memory: leases, runs, measures, and retries with less.

The caller computes; `VramManager` plans residency; `pool.weights.plan.oom_ladder` decides what to try next. Each
attempt starts from the beginning of the run, so that equal tasks give equal results however often they were tried.
Calibrates activation estimates with the measurements of each run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from modelpool.pool.catalog.estimates.activation_calibration import (
    ActivationCalibration,
    ActivationKey,
    measured_activations,
)
from modelpool.pool.devices.device_kinds import OpenDevice
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.engine.compute_thread import ComputeThread
from modelpool.pool.engine.pending_run import PendingRun
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import StageParams
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.values.specs.execution_modes import choose_mode, execution_modes
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    OomStep,
    RunCost,
    TaskSpec,
)
from modelpool.pool.weights.patcher.out_of_memory import (
    ExhaustedMemory,
    OutOfHostMemory,
    RanOutOfMemory,
    exhausted_memory,
    release_frames,
    release_unused,
    requested_bytes,
)
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.pool.weights.plan.oom_ladder import RunAttempt, next_attempt
from modelpool.pool.weights.vram.leases import Lease
from modelpool.pool.weights.vram.preloader import Preloader, PreloadNeeds
from modelpool.pool.weights.vram.vram_manager import PatcherUse, VramManager

_LOG = logging.getLogger(__name__)

#: kinds of runs that are remembered as short of memory
SHORT_KEPT = 64
#: more free memory with which such a run may get faster convolutions: a usual size of a workspace
FREED_BYTES = 64 << 20

#: steps after which the same run with the same weights is tried again
_SAME_AGAIN = (OomStep.DROP_AHEAD, OomStep.EMPTY_CACHE)

#: result of a run
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class TaskRun(Generic[ResultT]):
    """One computation of a task's result, or of the results of a batch.

    task         the task, with its estimated sizes
    wanted       the components that it uses
    compute      computes the result in the given execution mode (None: full), with the current state of the components
    should_stop  called between attempts
    needed_next  components expected to be needed afterwards, soonest first
    together     tasks in the batch. A batch is tried once, unless its size is fixed: a smaller one may fit without
                 another load
    caches_weights  it may use `TaskRunner.cache_bytes`
    begin        as `compute`, but the device may still compute when it returns; what it returns waits for the result
                 and returns it. None: such a run never overlaps with others
    on_loaded    called before `compute` with the cost of the load
    beside_bytes  device memory that libraries take for it beside tensors: weights make room for it if they can
    share_bytes   returns the part of the given bytes for its weights that it holds for the other members of its gang
    """

    task: TaskSpec
    wanted: tuple[PatcherUse, ...]
    compute: Callable[[ExecutionMode | None], ResultT]
    should_stop: Callable[[], bool]
    needed_next: tuple[ComponentKey, ...] = ()
    together: int = 1
    caches_weights: bool = False
    begin: Callable[[ExecutionMode | None], Callable[[], ResultT]] | None = None
    on_loaded: Callable[[RunCost], None] = lambda cost: None
    beside_bytes: int = 0
    share_bytes: Callable[[int], int] = lambda room_bytes: 0

    @property
    def uses(self) -> tuple[ComponentUse, ...]:
        """Its use of each component."""
        return tuple(use for _, use in self.wanted)

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """The sizes of its components."""
        return tuple(patcher.spec() for patcher, _ in self.wanted)


@dataclass(slots=True)
class _Progress:
    """Progress of an attempt: errors after its weights were loaded are not caused by the load.

    counted_on_bytes  memory available to this run, including weights, when it was planned
    cached_bytes      memory that the allocator held unused when the attempt ran out
    refusals          how often the allocator had had no memory, when the attempt began
    """

    counted_on_bytes: int = 0
    is_loaded: bool = False
    cached_bytes: int = 0
    refusals: int = 0


class TaskRunner:
    """Runs tasks on one device. Not thread-safe."""

    def __init__(
        self,
        device: OpenDevice,
        vram: VramManager,
        pipeline: TransferPipeline,
        may_stream: bool = True,
        preload_request: Callable[[TaskSpec, StageParams], TaskRun[Any] | None] = lambda task, work: None,
        works_around: Callable[[Exception], bool] = lambda error: False,
        graph_calls: Callable[[], int] = lambda: 0,
    ) -> None:
        """`preload_request` returns the run of a task to preload; None if that would take long. `works_around` changes
        what runs compute with after an error that it knows, once, and returns whether another try is worth it.
        `graph_calls` returns the number of calls that were CUDA graphs."""
        self._device = device
        self._vram = vram
        self._pipeline = pipeline
        self._may_stream = may_stream
        self._works_around = works_around
        self._graph_calls = graph_calls
        self._thread = ComputeThread(pipeline)
        #: kinds of runs with convolutions chosen while memory was short, with the bytes free without their activations
        self._short: LruCache[tuple[ActivationKey, int], int] = LruCache(SHORT_KEPT)
        self._has_reported_plans = False
        #: measured against estimated activations
        self.calibration = ActivationCalibration()
        self._has_run_out = False
        #: the run that the device may still compute while the next one begins
        self._pending: PendingRun[Any] | None = None
        #: activations and scratch of the last run that was not
        self._usual_bytes = 0
        #: advanced from inside of runs, with the request for the next tasks
        self.preloader = Preloader(vram, pipeline, lambda task, work: self._wants(preload_request(task, work)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the device next to weights and activations of the current run, for weights that it needs again; 0
        after it ran out of memory."""
        return 0 if self._has_run_out else self._vram.room_bytes

    def run(self, run: TaskRun[ResultT]) -> tuple[ResultT, RunCost]:
        """Return the result, with weights loaded as planned, and the cost.

        Raises DoesNotFit if it does not fit the budget in any execution mode; RanOutOfMemory if it should fit and does
        not; OutOfHostMemory; Stopped; and errors of `compute`. Nothing of it is leased afterwards, and residency is
        exact.
        """
        return self._begin(run, may_overlap=False)()

    def begin(self, run: TaskRun[ResultT]) -> Callable[[], tuple[ResultT, RunCost]]:
        """As `run`, but the device may still compute the result when this returns: the returned function waits for it,
        on any thread. What raises here has nothing pending.

        Only with streams, for a run that can `begin`, undivided and with all weights on the device, and only if there
        is memory for a run like the last one next to it. A run behind it for which there is not, or which uses the same
        components, waits for it. An error of either does not affect the other.
        """
        return self._begin(run, may_overlap=True)

    @property
    def is_pending(self) -> bool:
        """Whether a begun run holds weights and memory."""
        return self._pending is not None

    def release_pending(self) -> None:
        """Wait for the pending run, if any, and release what it holds."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.release()

    def poll_pending(self) -> None:
        """Release what such a run holds if somebody has its results. Takes microseconds."""
        if self._pending is not None:
            self._pending.note_end()
            if self._pending.is_over:
                self.release_pending()

    def _begin(self, run: TaskRun[ResultT], may_overlap: bool) -> Callable[[], tuple[ResultT, RunCost]]:
        self._make_way(run)
        trying = RunAttempt(self._first_division(run))
        self.preloader.begin()
        while True:
            stop_if_asked(run.should_stop)
            weight_bytes, progress = self._weight_bytes(run, trying), _Progress()
            try:
                return self._try(run, trying, progress, may_overlap)
            except Exception as error:
                whose = exhausted_memory(error, self._device.torch_device)
                if self._pending is not None and (whose is ExhaustedMemory.DEVICE or isinstance(error, DoesNotFit)):
                    # not the run's fault, so no step of the ladder
                    release_frames(error)
                    self.release_pending()
                    self._forget_short_plans(progress)
                    release_unused(self._device.memory)
                    continue
                if whose is None and self._works_around(error):
                    release_frames(error)
                    continue
                if whose is None:
                    raise
                self._forget_short_plans(progress)
                # before the tensors of the failed attempt are released
                progress.cached_bytes = self._cached_bytes(error)
                following = self._after(whose, error, run, trying, weight_bytes, progress)
            if following.oom_steps[-1] is OomStep.DROP_CACHES:
                self._vram.free_idle(but=[use.component for use in run.uses])
                release_unused(self._device.memory)  # frees the memory of dropped caches
            trying = following

    def load(self, wanted: Sequence[PatcherUse], kept: Sequence[ComponentKey], should_stop: Callable[[], bool]) -> int:
        """Load weights outside of runs, as `Preloader.load`. Raises RanOutOfMemory and OutOfHostMemory."""
        self.release_pending()
        try:
            return self.preloader.load(wanted, kept, should_stop)
        except Exception as error:
            whose = exhausted_memory(error, self._device.torch_device)
            if whose is None:
                raise
            release_frames(error)
            release_unused(self._device.memory)
            if whose is ExhaustedMemory.HOST:
                raise OutOfHostMemory(f"the host has no memory left for a load: {error}") from error
            raise RanOutOfMemory(f"a load ran out of device memory: {error}") from error

    def run_as_is(self, run: TaskRun[ResultT]) -> ResultT:
        """Return the result with the current residency; no weights are loaded or evicted.

        Divided if memory requires it, and tried once. Raises as `run`; DoesNotFit suggests what to unload.
        """
        stop_if_asked(run.should_stop)
        self.release_pending()
        room_bytes = self._vram.activation_room(run.uses, self._vram.residency().used_bytes)
        division = choose_mode(run.task, room_bytes)
        try:
            with self._vram.lease_as_is(run.wanted, division.activation_bytes):
                return self._thread.call(partial(run.compute, _mode_or_none(division, run.task)))
        except Exception as error:
            whose = exhausted_memory(error, self._device.torch_device)
            works_now = whose is None and self._works_around(error)
            if not works_now and (whose is None or isinstance(error, RanOutOfMemory)):
                raise
            release_frames(error)
            release_unused(self._device.memory)
            if whose is ExhaustedMemory.HOST:
                raise OutOfHostMemory(f"{run.task.task_id}: the host has no memory left: {error}") from error
            if not works_now:
                raise _short_of_memory(run.task, error) from error
        return self.run_as_is(run)

    def _try(
        self, run: TaskRun[ResultT], trying: RunAttempt, progress: _Progress, may_overlap: bool
    ) -> Callable[[], tuple[ResultT, RunCost]]:
        memory, division = self._device.memory, trying.division
        self._has_run_out = bool(trying.oom_steps)
        memory.reset_peak()
        progress.counted_on_bytes, progress.refusals = self._available_bytes(), memory.refusals()
        started, overlaps_pending = time.perf_counter(), self._pending is not None
        activation_bytes = self._activation_bytes(run, division)
        room_bytes = self._vram.activation_room(run.uses, new=run.specs)
        activation_bytes += min(run.beside_bytes, max(0, room_bytes - activation_bytes))
        share_bytes = run.share_bytes(max(0, room_bytes - activation_bytes))
        activation_bytes += share_bytes
        with ExitStack() as held:
            lease = held.enter_context(
                self._vram.lease(
                    run.wanted, activation_bytes, run.needed_next, trying.most_weight_bytes, alike=share_bytes > 0
                )
            )
            begin = run.begin if may_overlap and self._may_overlap(run, trying, lease) else None
            preloads = begin is None and lease.plan.streamed_bytes == 0 and not trying.oom_steps
            with self._copying_ahead(not trying.oom_steps), self.preloader.overlapping(preloads):
                progress.is_loaded = True
                loaded = time.perf_counter()
                load_peak_bytes, resident_bytes = memory.peak_bytes(), self._vram.residency().used_bytes
                memory.reset_peak()
                graph_calls = self._graph_calls()
                crossed_bytes, ahead_bytes = memory.transfers().h2d_bytes, self._pipeline.ahead_bytes
                mode = _mode_or_none(division, run.task)
                run.on_loaded(_load_cost(lease, loaded - started, load_peak_bytes, trying.oom_steps))
                self._forget_plans(run, division)
                if begin is None:
                    result = self._thread.call(partial(run.compute, mode))
                else:
                    with self._pipeline.on_overlap_stream(is_first=True):
                        bring, end = self._thread.call(partial(begin, mode)), self._pipeline.mark(is_end=True)
                ended = time.perf_counter()
                run_peak_bytes = memory.peak_bytes()
                is_streaming = lease.plan.streamed_bytes > 0
                copies_ahead = is_streaming or any(patcher.streams for patcher, _ in run.wanted)
                taken_ahead_bytes = ahead_bytes if copies_ahead else 0
                # unknown with preloading and cached weights: the peak includes them; with graphs, which have
                # activations of their own; during a pending run: its results are in the peak; and with a share
                is_measured = not (
                    self.preloader.uploaded_bytes
                    or run.caches_weights
                    or self._graph_calls() != graph_calls
                    or overlaps_pending
                    or share_bytes
                )
                working_bytes = run_peak_bytes - resident_bytes - taken_ahead_bytes - lease.kept_bytes
                cost = RunCost(
                    load_seconds=loaded - started,
                    run_seconds=ended - loaded,
                    uploaded_bytes=lease.uploaded_bytes,
                    streamed_bytes=memory.transfers().h2d_bytes - crossed_bytes if is_streaming else 0,
                    peak_bytes=max(load_peak_bytes, run_peak_bytes),
                    resident=lease.all_resident,
                    patch_switches=lease.patch_switches,
                    planned_bytes=lease.planned_bytes + taken_ahead_bytes + self._vram.graph_bytes,
                    working_bytes=max(0, working_bytes) if is_measured else 0,
                    division=mode,
                    oom_steps=trying.oom_steps,
                    ahead_bytes=self.preloader.uploaded_bytes,
                )
            self._learn(run, division, cost)
            if memory.refusals() > progress.refusals:
                self._short.put(self._kind(run, division), memory.free_bytes())
                self._report_plans(run.task)
            if begin is None:
                self._usual_bytes = needed_bytes(run.uses, activation_bytes)
                return lambda: (result, cost)
            assert end is not None, "pending runs have streams"
            keys = frozenset(use.component for use in run.uses)
            pending = PendingRun(partial(self._brought, bring), cost, end, keys, held.pop_all())
        self._pending = pending
        return pending.result

    def _brought(self, bring: Callable[[], ResultT]) -> ResultT:
        """Return the results of a pending run."""
        with self._pipeline.on_overlap_stream():
            return bring()

    def _may_overlap(self, run: TaskRun[Any], trying: RunAttempt, lease: Lease) -> bool:
        """Whether a run with this lease may overlap with the next ones: one like the last one has to fit next to it."""
        return (
            run.begin is not None
            and self._pipeline.has_streams
            and not trying.oom_steps
            and _mode_or_none(trying.division, run.task) is None
            and lease.plan.streamed_bytes == 0
            and not any(patcher.streams for patcher, _ in run.wanted)
            and self._vram.keeps_all
            and self._vram.room_bytes >= self._usual_bytes
        )

    def _make_way(self, run: TaskRun[Any]) -> None:
        """Wait for the pending run unless `run` may overlap with it and begin as it would without it: with all weights,
        nothing evicted, and undivided."""
        self.poll_pending()
        if self._pending is None:
            return
        whole = execution_modes(run.task)[0]
        corrected_bytes = self.calibration.corrected(self._key(run, whole), whole.estimated_bytes)
        wanted_bytes = needed_bytes(run.uses, max(whole.activation_bytes, corrected_bytes))
        wanted_bytes += sum(patcher.product_bytes for patcher, _ in run.wanted)
        shares = bool(self._pending.components.intersection(use.component for use in run.uses))
        is_last = run.begin is not None or run.caches_weights  # one at a time; and it would take all that is free
        if shares or is_last or not self._vram.has_room(run.wanted, wanted_bytes):
            self.release_pending()

    def _forget_short_plans(self, progress: _Progress) -> None:
        """Forget all convolutions after an attempt that ran out inside of torch: it may have chosen some with less
        memory than the next attempt has."""
        if self._device.memory.refusals() > progress.refusals:
            self._renew_thread()

    def _forget_plans(self, run: TaskRun[Any], division: ExecutionMode) -> None:
        """Forget the convolutions that were chosen while memory was short, if such a run chose some then and has more
        memory now."""
        short_bytes = self._short.kept(self._kind(run, division))
        if short_bytes is not None and self._device.memory.free_bytes() >= short_bytes + FREED_BYTES:
            self._renew_thread()
            self._short.clear()

    def _renew_thread(self) -> None:
        """Compute in a new thread. The plans of the old one end with it: the device must not compute with them."""
        self.release_pending()
        self._thread.renew()

    def _kind(self, run: TaskRun[Any], division: ExecutionMode) -> tuple[ActivationKey, int]:
        """Runs of one kind have the same convolutions."""
        return self._key(run, division), division.estimated_bytes

    def close(self) -> None:
        """Wait for the pending run, and end the thread of runs, if there is one. Idempotent."""
        self.release_pending()
        self._thread.close()

    def _report_plans(self, task: TaskSpec) -> None:
        """Say, once, that torch went without memory, perhaps for the workspace of a convolution.

        cuDNN then takes another plan, and torch keeps it for the shape and the thread, with no function to forget it.
        """
        if not self._has_reported_plans:
            self._has_reported_plans = True
            _LOG.warning(
                "%s ran out of memory inside of torch, which went on with less: slower convolutions may stay in use "
                "for its size until more memory is free; lower `vram`, or raise `reserve_vram`",
                task.task_id,
            )

    def _after(
        self,
        whose: ExhaustedMemory,
        error: Exception,
        run: TaskRun[Any],
        trying: RunAttempt,
        weight_bytes: int,
        progress: _Progress,
    ) -> RunAttempt:
        """The next attempt after `error`; raises if nothing is left to try."""
        release_frames(error)
        ahead_bytes = self.preloader.drop()
        self._vram.drop_graphs()
        release_unused(self._device.memory)  # otherwise garbage of this process looks like memory of another program
        if whose is ExhaustedMemory.HOST:
            raise OutOfHostMemory(
                f"{run.task.task_id}: the host has no memory left: {error}", trying.oom_steps
            ) from error
        following = next_attempt(
            trying, weight_bytes, execution_modes(run.task), self._may_stream, ahead_bytes, progress.cached_bytes
        )
        is_same_again = following is not None and following.oom_steps[-1] in _SAME_AGAIN
        had_its_memory = progress.is_loaded and self._available_bytes() >= progress.counted_on_bytes
        if had_its_memory and not is_same_again:
            # otherwise another program or a fragmented allocator had the planned memory, which is no evidence about
            # the run
            self.calibration.ran_out(self._key(run, trying.division), trying.division.estimated_bytes)
        if run.together > 1 and run.task.batch_size == 1 and not is_same_again:
            following = None
        if following is None:
            done = (
                ", and again after: " + ", ".join(rung.value for rung in trying.oom_steps) if trying.oom_steps else ""
            )
            message = f"{run.task.task_id} ran out of device memory{done}. {error}"
            raise RanOutOfMemory(message, trying.oom_steps) from error
        return following

    def _first_division(self, run: TaskRun[Any]) -> ExecutionMode:
        """The least divided mode that fits if everything evictable is evicted.

        Uses the estimates of the task and the measured peaks of equal runs: a division may change the image, so an
        unmeasured correction never causes one. If such a correction is right, weights make room instead.
        """
        room_bytes = self._vram.activation_room(run.uses, new=run.specs)
        for mode in execution_modes(run.task):
            measured_bytes = self.calibration.most_measured(self._key(run, mode), mode.estimated_bytes)
            if max(mode.activation_bytes, measured_bytes) <= room_bytes:
                return mode
        return choose_mode(run.task, room_bytes)

    def _activation_bytes(self, run: TaskRun[Any], division: ExecutionMode) -> int:
        """Activation bytes to plan with: the estimate of the task, or more if equal runs took more here. Both correct
        the same count, so none is corrected twice. No correction makes a run not fit."""
        corrected_bytes = self.calibration.corrected(self._key(run, division), division.estimated_bytes)
        return max(division.activation_bytes, min(corrected_bytes, self._vram.activation_room(run.uses, new=run.specs)))

    def _weight_bytes(self, run: TaskRun[Any], trying: RunAttempt) -> int:
        """Approximate maximum of resident weights of the run in this attempt."""
        room_bytes = self._vram.activation_room(run.uses, new=run.specs) - self._activation_bytes(run, trying.division)
        whole_bytes = sum({patcher.key: patcher.spec().weight_bytes for patcher, _ in run.wanted}.values())
        most_bytes = whole_bytes if trying.most_weight_bytes is None else trying.most_weight_bytes
        return max(0, min(whole_bytes, most_bytes, room_bytes))

    def _available_bytes(self) -> int:
        """Memory for weights, activations and scratch now: less than the budget if other programs use some of the
        device."""
        return self._vram.room_bytes + self._vram.residency().used_bytes

    def _cached_bytes(self, error: Exception) -> int:
        """Memory that the allocator of this process holds unused; 0 if the device does not answer, and if what failed
        with `error` would not fit even if that was given back."""
        try:
            memory = self._device.memory
            return 0 if requested_bytes(error) > memory.free_bytes() else memory.cached_bytes()
        except RuntimeError:
            return 0

    def _wants(self, run: TaskRun[Any] | None) -> PreloadNeeds | None:
        """The leases of `run`."""
        if run is None:
            return None
        return PreloadNeeds(run.wanted, self._activation_bytes(run, self._first_division(run)))

    def _learn(self, run: TaskRun[Any], division: ExecutionMode, cost: RunCost) -> None:
        measured = measured_activations(cost, max(use.scratch_bytes for use in run.uses))
        if measured is not None:
            self.calibration.learn(self._key(run, division), division.estimated_bytes, *measured)

    def _key(self, run: TaskRun[Any], mode: ExecutionMode) -> ActivationKey:
        component, kind = run.uses[0].component, self._device.kind.value
        return ActivationKey(
            component, run.task.stage, kind, mode.batch, mode.tile, run.together, options=run.task.options
        )

    @contextmanager
    def _copying_ahead(self, allowed: bool) -> Iterator[None]:
        """Inside the block, runs copy ahead of use only if `allowed`."""
        before_bytes = self._pipeline.ahead_bytes
        self._pipeline.ahead_bytes = before_bytes if allowed else 0
        try:
            yield
        finally:
            self._pipeline.ahead_bytes = before_bytes


def _short_of_memory(task: TaskSpec, error: Exception) -> RanOutOfMemory:
    """The error of a run with weights that the user moves."""
    advice = "unload some weights (partially_unload, to_cpu) or make a smaller image"
    return RanOutOfMemory(f"{task.task_id} ran out of device memory; {advice}. {error}")


def _load_cost(lease: Lease, seconds: float, peak_bytes: int, oom_steps: tuple[OomStep, ...]) -> RunCost:
    """Return the cost of a run that has loaded its weights and computed nothing."""
    return RunCost(
        load_seconds=seconds,
        uploaded_bytes=lease.uploaded_bytes,
        peak_bytes=peak_bytes,
        resident=lease.all_resident,
        patch_switches=lease.patch_switches,
        planned_bytes=lease.planned_bytes,
        oom_steps=oom_steps,
    )


def _mode_or_none(division: ExecutionMode, task: TaskSpec) -> ExecutionMode | None:
    """`division` as stages and reports have it: None for full execution."""
    return None if division == execution_modes(task)[0] else division
