"""`TaskRunner`: one task on one device within the memory there is. Leases, tries, measures, and tries again with less.

What a task computes is the caller's; what is resident is `VramManager`'s plan; what to try next is
`pool.plan.oom_ladder`'s decision. Here they meet: each try starts from the run's beginning, so that equal work gives
equal results however often it was tried. Learns from each run how much memory such runs really take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from modelpool.pool.core.stage_params import Work
from modelpool.pool.core.stopping import stop_if_asked
from modelpool.pool.devices.kinds import OpenDevice
from modelpool.pool.devices.transfer_pipeline import UploadRoad
from modelpool.pool.estimates.activation_calibration import ActivationBook, ActivationKey, measured_activations
from modelpool.pool.patcher.out_of_memory import (
    Exhausted,
    OutOfHostMemory,
    RanOutOfMemory,
    exhausted,
    give_back_unused,
    let_go,
)
from modelpool.pool.plan.oom_ladder import Try, next_try
from modelpool.pool.specs.division import choose_division, ways
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Division, RunCost, Rung, TaskSpec
from modelpool.pool.vram.preloader import AheadWants, UploadsAhead
from modelpool.pool.vram.vram_manager import VramManager, Wanted

#: what a run makes
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Run(Generic[Made]):
    """One call for a task's result, or for the results of several tasks at once.

    task         what it is, with the sizes that were estimated
    wanted       the components it uses
    compute      makes the result, divided as told (None: whole), with the components as they are then
    should_stop  asked between tries
    needed_next  components that are expected to be needed here afterwards, soonest first
    together     tasks that are made at once. A run of several is tried once: with fewer it may fit, which costs no load
    """

    task: TaskSpec
    wanted: tuple[Wanted, ...]
    compute: Callable[[Division | None], Made]
    should_stop: Callable[[], bool]
    needed_next: tuple[ComponentKey, ...] = ()
    together: int = 1

    @property
    def uses(self) -> tuple[ComponentUse, ...]:
        """What it needs of each component."""
        return tuple(use for _, use in self.wanted)

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """The sizes of each component."""
        return tuple(patcher.spec() for patcher, _ in self.wanted)


@dataclass(slots=True)
class _Progress:
    """How far a try came: what went wrong once its weights were in place is not the load's doing.

    counted_on_bytes  what the device had for this run, weights included, when it was planned
    """

    counted_on_bytes: int = 0
    is_loaded: bool = False


class TaskRunner:
    """Runs tasks on one device. Not thread safe."""

    def __init__(
        self,
        device: OpenDevice,
        vram: VramManager,
        road: UploadRoad,
        may_stream: bool = True,
        coming: Callable[[TaskSpec, Work], Run[Any] | None] = lambda task, work: None,
    ) -> None:
        """`coming` makes a run of a task that is to come; None where that would take long."""
        self._device = device
        self._vram = vram
        self._road = road
        self._may_stream = may_stream
        #: what runs really took, beside what was estimated
        self.book = ActivationBook()
        #: to be advanced from inside of runs, with what is to come
        self.ahead = UploadsAhead(vram, road, lambda task, work: self._wants(coming(task, work)))

    def run(self, run: Run[Made]) -> tuple[Made, RunCost]:
        """The result, its weights brought in as planned, and what it cost.

        Raises DoesNotFit when it does not fit the budget, however it is divided; RanOutOfMemory when it should and does
        not; OutOfHostMemory; Stopped; and what `compute` raises. Nothing is leased afterwards, and residency is exact.
        """
        trying = Try(self._first_division(run))
        self.ahead.begin()
        while True:
            stop_if_asked(run.should_stop)
            weight_bytes, progress = self._weight_bytes(run, trying), _Progress()
            try:
                return self._try(run, trying, progress)
            except Exception as error:
                whose = exhausted(error, self._device.torch_device)
                if whose is None:
                    raise
                following = self._after(whose, error, run, trying, weight_bytes, progress)
            if following.rungs[-1] is Rung.DROP_CACHES:
                self._vram.free_idle(but=[use.component for use in run.uses])
                give_back_unused(self._device.memory)  # what left for it
            trying = following

    def run_as_is(self, run: Run[Made]) -> Made:
        """The result, with what is resident of its components; no weights are moved before and none are let go.

        Divided where the room asks for it, and tried once. Raises as `run`; DoesNotFit says what would have to leave.
        """
        stop_if_asked(run.should_stop)
        room_bytes = self._vram.activation_room(run.uses, self._vram.residency().used_bytes)
        division = choose_division(run.task, room_bytes)
        try:
            with self._vram.lease_as_is(run.wanted, division.activation_bytes):
                return run.compute(_said(division, run.task))
        except Exception as error:
            whose = exhausted(error, self._device.torch_device)
            if whose is None or isinstance(error, RanOutOfMemory):
                raise
            let_go(error)
            give_back_unused(self._device.memory)
            if whose is Exhausted.HOST:
                raise OutOfHostMemory(f"{run.task.task_id}: the host has no memory left: {error}") from error
            advice = "unload some weights (partially_unload, to_cpu) or make a smaller image"
            raise RanOutOfMemory(f"{run.task.task_id} ran out of device memory; {advice}. {error}") from error

    def _try(self, run: Run[Made], trying: Try, progress: _Progress) -> tuple[Made, RunCost]:
        memory, division = self._device.memory, trying.division
        memory.reset_peak()
        progress.counted_on_bytes = self._available_bytes()
        started = time.perf_counter()
        with (
            self._vram.lease(
                run.wanted, self._activation_bytes(run, division), run.needed_next, trying.most_weight_bytes
            ) as lease,
            self._copying_ahead(not trying.rungs),
            self.ahead.beside(lease.plan.streamed_bytes == 0 and not trying.rungs),
        ):
            progress.is_loaded = True
            loaded = time.perf_counter()
            load_peak_bytes, resident_bytes = memory.peak_bytes(), self._vram.residency().used_bytes
            memory.reset_peak()
            crossed_bytes, ahead_bytes = memory.transfers().h2d_bytes, self._road.ahead_bytes
            result = run.compute(_said(division, run.task))
            ended = time.perf_counter()
            run_peak_bytes = memory.peak_bytes()
            is_streaming = lease.plan.streamed_bytes > 0
            taken_ahead_bytes = ahead_bytes if is_streaming else 0
            cost = RunCost(
                load_seconds=loaded - started,
                run_seconds=ended - loaded,
                uploaded_bytes=lease.uploaded_bytes,
                streamed_bytes=memory.transfers().h2d_bytes - crossed_bytes if is_streaming else 0,
                peak_bytes=max(load_peak_bytes, run_peak_bytes),
                resident=lease.all_resident,
                patch_switches=lease.patch_switches,
                planned_bytes=lease.planned_bytes + taken_ahead_bytes,
                # nobody knows what of the peak was weights that another task is to need
                working_bytes=0
                if self.ahead.uploaded_bytes
                else max(0, run_peak_bytes - resident_bytes - taken_ahead_bytes),
                division=_said(division, run.task),
                rungs=trying.rungs,
                ahead_bytes=self.ahead.uploaded_bytes,
            )
        self._learn(run, division, cost)
        return result, cost

    def _after(
        self, whose: Exhausted, error: Exception, run: Run[Any], trying: Try, weight_bytes: int, progress: _Progress
    ) -> Try:
        """What to try after `error`; raises what it comes to when nothing is left to try."""
        let_go(error)
        ahead_bytes = self.ahead.drop()
        give_back_unused(self._device.memory)  # else this process's own garbage is taken for another program's
        if whose is Exhausted.HOST:
            raise OutOfHostMemory(f"{run.task.task_id}: the host has no memory left: {error}", trying.rungs) from error
        if progress.is_loaded and not ahead_bytes and self._available_bytes() >= progress.counted_on_bytes:
            # otherwise another program took what the plan counted on, which says nothing of the run
            self.book.ran_out(self._key(run, trying.division), trying.division.estimated_bytes)
        following = None
        if run.together == 1 or ahead_bytes:
            following = next_try(trying, weight_bytes, ways(run.task), self._may_stream, ahead_bytes)
        if following is None:
            done = ", and again after: " + ", ".join(rung.value for rung in trying.rungs) if trying.rungs else ""
            message = f"{run.task.task_id} ran out of device memory{done}. {error}"
            raise RanOutOfMemory(message, trying.rungs) from error
        return following

    def _first_division(self, run: Run[Any]) -> Division:
        """The least divided way that fits when everything that may leave does.

        By the figures of the task, and by what such runs were measured to take: a division may change the image, so
        no guess of this book's causes one. Where a correction is right that was not measured, weights make room.
        """
        room_bytes = self._vram.activation_room(run.uses, new=run.specs)
        for way in ways(run.task):
            measured_bytes = self.book.most_measured(self._key(run, way), way.estimated_bytes)
            if max(way.activation_bytes, measured_bytes) <= room_bytes:
                return way
        return choose_division(run.task, room_bytes)

    def _activation_bytes(self, run: Run[Any], division: Division) -> int:
        """What to plan with: the figure of the task, or more where such runs took more here. Both correct what was
        counted, so none is corrected twice. No correction makes a run not fit."""
        corrected_bytes = self.book.corrected(self._key(run, division), division.estimated_bytes)
        return max(division.activation_bytes, min(corrected_bytes, self._vram.activation_room(run.uses, new=run.specs)))

    def _weight_bytes(self, run: Run[Any], trying: Try) -> int:
        """About how much of the run's weights is resident in this try, at most."""
        room_bytes = self._vram.activation_room(run.uses, new=run.specs) - self._activation_bytes(run, trying.division)
        whole_bytes = sum({patcher.key: patcher.spec().weight_bytes for patcher, _ in run.wanted}.values())
        most_bytes = whole_bytes if trying.most_weight_bytes is None else trying.most_weight_bytes
        return max(0, min(whole_bytes, most_bytes, room_bytes))

    def _available_bytes(self) -> int:
        """What weights, activations and scratch may take together now: less than the budget where other programs took
        some of the device."""
        return self._vram.room_bytes + self._vram.residency().used_bytes

    def _wants(self, run: Run[Any] | None) -> AheadWants | None:
        """What `run` would lease."""
        if run is None:
            return None
        return AheadWants(run.wanted, self._activation_bytes(run, self._first_division(run)))

    def _learn(self, run: Run[Any], division: Division, cost: RunCost) -> None:
        measured = measured_activations(cost, max(use.scratch_bytes for use in run.uses))
        if measured is not None:
            self.book.learn(self._key(run, division), division.estimated_bytes, *measured)

    def _key(self, run: Run[Any], way: Division) -> ActivationKey:
        return ActivationKey(
            run.uses[0].component, run.task.stage, self._device.kind.value, way.batch, way.tile, run.together
        )

    @contextmanager
    def _copying_ahead(self, allowed: bool) -> Iterator[None]:
        """Inside the block runs make copies ahead of use only where that is `allowed`."""
        before_bytes = self._road.ahead_bytes
        self._road.ahead_bytes = before_bytes if allowed else 0
        try:
            yield
        finally:
            self._road.ahead_bytes = before_bytes


def _said(division: Division, task: TaskSpec) -> Division | None:
    """`division` as stages and reports have it: None for the whole run."""
    return None if division == ways(task)[0] else division
