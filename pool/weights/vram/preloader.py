"""`Preloader`: loads weights of the next tasks to the device while another task runs, in slices.

There are no threads around weights: the current run polls at each step and every few milliseconds at layers whether it
should stop, and each poll loads one slice. On CUDA a slice only starts copies on a separate stream; elsewhere it
copies. A slice is bounded in bytes and seconds, and the time between two is a multiple of the duration of the last one,
so that the device does not wait for the host. `pool.weights.plan.preload_plan` decides what may move; loaded weights
are like any other unleased weights. Never fails a run: what cannot be preloaded is loaded by the task itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import PreloadRequest, StageParams
from modelpool.pool.values.specs.spec import ComponentKey, TaskSpec
from modelpool.pool.weights.ops.context import without_uploader
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory, release_frames
from modelpool.pool.weights.vram.leases import PatcherUse
from modelpool.pool.weights.vram.vram_manager import VramManager

#: maximum bytes of one slice: half of the staging ring
SLICE_BYTES = 64 << 20
#: maximum duration of one slice; one module is loaded completely, however long it takes
SLICE_SECONDS = 0.004
#: pause after a slice, as a multiple of its duration
REST = 2.0


@dataclass(frozen=True, slots=True)
class PreloadNeeds:
    """The leases of a task to preload."""

    wanted: tuple[PatcherUse, ...]
    activation_bytes: int


class Preloader:
    """Preloads one task after another, only inside `overlapping`. Not thread-safe."""

    def __init__(
        self,
        vram: VramManager,
        pipeline: TransferPipeline,
        prepare: Callable[[TaskSpec, StageParams], PreloadNeeds | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prepare` returns the needs of a task; None if finding them would take too long during a run."""
        self._vram = vram
        self._pipeline = pipeline
        self._prepare = prepare
        self._clock = clock
        self._is_allowed = False
        #: the current request; another value ends it
        self._preload_request: PreloadRequest | None = None
        #: None if nothing is left to load
        self._steps: Generator[int, None, None] | None = None
        self._next_at = float("-inf")
        #: resident bytes of each component before preloading during the last run
        self._before: dict[ComponentKey, int] = {}
        #: bytes on the bus since `overlapping` was last entered
        self.uploaded_bytes = 0

    @contextmanager
    def overlapping(self, is_allowed: bool) -> Iterator[None]:
        """The computation of a run, under its lease. Nothing is preloaded unless `is_allowed`."""
        self._is_allowed, self.uploaded_bytes = is_allowed, 0
        self._before.clear()
        try:
            yield
        finally:
            self._is_allowed = False
            self._end()
            self._pipeline.catch_up()

    def begin(self) -> None:
        """A new run starts its first attempt: weights preloaded during the previous run stay, whatever happens to this
        one."""
        self._before.clear()

    def advance(self, preload_request: PreloadRequest | None) -> None:
        """Load a slice of `preload_request`, if it is time. Raises only internal errors."""
        if not self._is_allowed or (preload_request is self._preload_request and self._steps is None):
            return
        began = self._clock()
        if began < self._next_at:
            return
        try:
            if preload_request is not self._preload_request:
                self._begin(preload_request)
            self._slice(began)
        except Exception as error:
            self._give_up(error)
        ended = self._clock()
        self._next_at = ended + REST * (ended - began)

    def load(self, wanted: Sequence[PatcherUse], kept: Sequence[ComponentKey], should_stop: Callable[[], bool]) -> int:
        """Load `wanted` while no run is going on, until `should_stop`, evicting idle components but `kept`. What has
        arrived stays. Returns the bytes on the bus. Raises the device's out-of-memory error."""
        uploaded_bytes = 0
        steps = self._vram.preload(wanted, 0, (), kept)
        try:
            with self._pipeline.overlapping(), without_uploader():
                for step_bytes in steps:
                    uploaded_bytes += step_bytes
                    if should_stop():
                        break
        finally:
            steps.close()
            self._pipeline.catch_up()
        return uploaded_bytes

    def drop(self) -> int:
        """Evict the weights preloaded during the last run. Returns the bytes evicted."""
        self._end()
        self._pipeline.catch_up()
        left_bytes = 0
        for entry in self._vram.residency().entries:
            before_bytes = self._before.get(entry.component)
            if before_bytes is not None and entry.resident_bytes > before_bytes:
                left_bytes += self._vram.unload(entry.component, entry.resident_bytes - before_bytes)
        self._before.clear()
        return left_bytes

    def _begin(self, preload_request: PreloadRequest | None) -> None:
        self._end()
        self._preload_request = preload_request
        self._steps = None if preload_request is None else self._bring(preload_request)

    def _bring(self, preload_request: PreloadRequest) -> Generator[int, None, None]:
        kept = list(preload_request.kept)
        for task, work in preload_request.tasks:
            wants = self._prepare(task, work)
            if wants is None:
                continue
            for patcher, _ in wants.wanted:
                if patcher.key not in self._vram.leased:
                    self._before.setdefault(patcher.key, patcher.resident().resident_bytes)
            yield from self._vram.preload(wants.wanted, wants.activation_bytes, preload_request.needed_next, kept)
            kept += [patcher.key for patcher, _ in wants.wanted]

    def _slice(self, began: float) -> None:
        brought_bytes = 0
        with self._pipeline.overlapping(), without_uploader():
            while self._steps is not None and not self._pipeline.is_full:
                step_bytes = next(self._steps, None)
                if step_bytes is None:
                    self._steps = None
                    return
                brought_bytes += step_bytes
                self.uploaded_bytes += step_bytes
                if brought_bytes >= SLICE_BYTES or self._clock() - began >= SLICE_SECONDS:
                    return

    def _give_up(self, error: Exception) -> None:
        """Stop preloading during this run."""
        whose = exhausted_memory(error)
        if whose is None and not isinstance(error, UserError):
            raise error
        release_frames(error)
        self._is_allowed = False
        self._end()
        if whose is not None:
            self.drop()

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = self._preload_request = None
