"""Policies that a simulation can run: a core and the memory of its workers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from modelpool.pool.specs.spec import ComponentSpec
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.simulator.cluster import Core
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory, WorkerMemory
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: of policies that leave something to chance
SEED = 1

Made = tuple[Core, WorkerMemory]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to run a pool.

    source    whose rule it is, in a line
    is_ideal  nobody can run a pool so: it knows or has what nobody does. It is no bound: these are in
              `benchmarks.lab.bounds`
    """

    name: str
    source: str
    _make: Callable[[Sequence[SimulatedGpu], Random], Made]
    is_ideal: bool = False

    def make(
        self, gpus: Iterable[SimulatedGpu], components: Iterable[ComponentSpec] = (), rng: Random | None = None
    ) -> Made:
        """A new core and its workers' memory. Sizes come to the core by an event, so that no policy reads `components`
        yet; `rng` draws what is left to chance, by default always the same."""
        return self._make(tuple(gpus), rng or Random(SEED))


#: the placement that a live pool uses
OUR_POLICY = Policy(
    "modelpool",
    "this pool: expected completion time over components in bytes",
    lambda gpus, rng: (SchedulerState(), PlannedMemory()),
)
