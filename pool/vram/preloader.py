"""`UploadsAhead`: brings the weights of tasks to come to the device while another runs, a slice at a time.

There are no threads around weights: whoever runs asks at each step and every few milliseconds at layers whether it is
to stop, and there a slice of the upload is done. On CUDA a slice only starts copies, on a stream of their own;
elsewhere it copies. A slice is bounded in bytes and in seconds, and the time between two is a multiple of what the last
one took, so that a device which computes does not wait for the host. What may move is decided by
`pool.plan.preload_plan`; what arrived is like any other weights that nobody leases. Never fails a run: what cannot be
brought is left to the task's own turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import Coming, Work
from modelpool.pool.devices.transfer_pipeline import UploadRoad
from modelpool.pool.ops.context import without_uploader
from modelpool.pool.patcher.out_of_memory import exhausted, let_go
from modelpool.pool.specs.spec import ComponentKey, TaskSpec
from modelpool.pool.vram.leases import Wanted
from modelpool.pool.vram.vram_manager import VramManager

#: what one slice brings before it ends: two buffers of the staging ring
SLICE_BYTES = 64 << 20
#: and how long it may take; one module is brought whole, however long it takes
SLICE_SECONDS = 0.004
#: nothing is brought for so many times as long as the slice before took
REST = 2.0


@dataclass(frozen=True, slots=True)
class AheadWants:
    """What a coming task will lease."""

    wanted: tuple[Wanted, ...]
    activation_bytes: int


class UploadsAhead:
    """Weights of one task after another, and only inside `beside`. Not thread safe."""

    def __init__(
        self,
        vram: VramManager,
        road: UploadRoad,
        prepare: Callable[[TaskSpec, Work], AheadWants | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prepare` says what a task will want; None where that would take too long to find out beside a run."""
        self._vram = vram
        self._road = road
        self._prepare = prepare
        self._clock = clock
        self._is_allowed = False
        #: what is brought now; another value ends it
        self._coming: Coming | None = None
        #: None when nothing is left to bring
        self._steps: Generator[int, None, None] | None = None
        self._next_at = float("-inf")
        #: bytes of each component that were there before anything was brought beside the last run
        self._before: dict[ComponentKey, int] = {}
        #: bytes that crossed the bus since `beside` was entered last
        self.uploaded_bytes = 0

    @contextmanager
    def beside(self, is_allowed: bool) -> Iterator[None]:
        """The computation of a run, under its lease. Nothing is brought unless `is_allowed`."""
        self._is_allowed, self.uploaded_bytes = is_allowed, 0
        self._before.clear()
        try:
            yield
        finally:
            self._is_allowed = False
            self._end()
            self._road.catch_up()

    def begin(self) -> None:
        """Another run is tried for the first time: what was brought beside the one before stays whatever becomes of
        this one."""
        self._before.clear()

    def advance(self, coming: Coming | None) -> None:
        """Bring a slice of what `coming` wants, if it is time. Raises nothing that is not our mistake."""
        if not self._is_allowed or (coming is self._coming and self._steps is None):
            return
        began = self._clock()
        if began < self._next_at:
            return
        try:
            if coming is not self._coming:
                self._begin(coming)
            self._slice(began)
        except Exception as error:
            self._give_up(error)
        ended = self._clock()
        self._next_at = ended + REST * (ended - began)

    def drop(self) -> int:
        """Take off the device what was brought beside the last run. Returns the bytes that left."""
        self._end()
        self._road.catch_up()
        left_bytes = 0
        for entry in self._vram.residency().entries:
            before_bytes = self._before.get(entry.component)
            if before_bytes is not None and entry.resident_bytes > before_bytes:
                left_bytes += self._vram.unload(entry.component, entry.resident_bytes - before_bytes)
        self._before.clear()
        return left_bytes

    def _begin(self, coming: Coming | None) -> None:
        self._end()
        self._coming = coming
        self._steps = None if coming is None else self._bring(coming)

    def _bring(self, coming: Coming) -> Generator[int, None, None]:
        kept = list(coming.kept)
        for task, work in coming.tasks:
            wants = self._prepare(task, work)
            if wants is None:
                continue
            for patcher, _ in wants.wanted:
                if patcher.key not in self._vram.leased:
                    self._before.setdefault(patcher.key, patcher.resident().resident_bytes)
            yield from self._vram.bring_ahead(wants.wanted, wants.activation_bytes, coming.needed_next, kept)
            kept += [patcher.key for patcher, _ in wants.wanted]

    def _slice(self, began: float) -> None:
        brought_bytes = 0
        with self._road.beside(), without_uploader():
            while self._steps is not None and not self._road.is_full:
                step_bytes = next(self._steps, None)
                if step_bytes is None:
                    self._steps = None
                    return
                brought_bytes += step_bytes
                self.uploaded_bytes += step_bytes
                if brought_bytes >= SLICE_BYTES or self._clock() - began >= SLICE_SECONDS:
                    return

    def _give_up(self, error: Exception) -> None:
        """Nothing more is brought beside this run."""
        whose = exhausted(error)
        if whose is None and not isinstance(error, UserError):
            raise error
        let_go(error)
        self._is_allowed = False
        self._end()
        if whose is not None:
            self.drop()

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = self._coming = None
