"""`WorkerGrowth`: lets an idle worker take memory of its GPU that other processes have given back.

A run takes it, too: when it begins. During one, the driver of the GPU is not asked, as the question may wait for what
the GPU computes, such as an exchange of a gang, and delay that. But the scheduler knows the capacity of before, and has
no run for a worker that is too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from modelpool.actors.worker.worker_lease import WorkerLease
from modelpool.pool.weights.plan.eviction_plan import Residency


class Capacity(Protocol):
    """The memory of an engine: `pool.engine.engine_capacity.EngineCapacity`."""

    @property
    def may_grow(self) -> bool:
        """Whether `grow` would take memory now; on any thread."""

    def grow(self) -> None:
        """Take it; the next residency has the capacity."""


class GrowingEngine(Protocol):
    """The part of an engine that is needed here."""

    @property
    def capacity(self) -> Capacity:
        """Return its memory, which may grow."""

    def residency(self) -> Residency:
        """Return the weights on the device."""


class WorkerGrowth:
    """The growth of one worker. `engine` is None before its start; `in_turn` calls a function on the thread that uses
    the engine; `computes` tells whether something is called there."""

    def __init__(
        self,
        lease: WorkerLease,
        engine: Callable[[], GrowingEngine | None],
        in_turn: Callable[[Callable[[], Residency]], Residency],
        computes: Callable[[], bool],
    ) -> None:
        self._lease, self._engine, self._in_turn, self._computes = lease, engine, in_turn, computes

    def beat(self, epoch: int = 0) -> bool:
        """Answer, on any thread; return whether `grow` would give this worker more memory, False during a run. Raises
        OlderEpoch."""
        self._lease.check(epoch)
        engine = self._engine()
        return engine is not None and not self._computes() and engine.capacity.may_grow

    def grow(self, epoch: int = 0) -> Residency:
        """Take memory that other processes have given back, and return the weights on the GPU with the new capacity.
        Called where runs are. Raises OlderEpoch."""
        return self._in_turn(lambda: self._grown(epoch))

    def _grown(self, epoch: int) -> Residency:
        self._lease.check(epoch)
        engine = self._engine()
        assert engine is not None, "start comes before growing"
        engine.capacity.grow()
        return engine.residency()
