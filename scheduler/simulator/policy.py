"""Policies that a simulation can run: a core and the eviction policy of its workers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from modelpool.pool.values.specs.spec import ComponentSpec
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.simulator.cluster import Core
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory, WorkerMemory
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: default seed of policies with randomness
SEED = 1

CoreAndMemory = tuple[Core, WorkerMemory]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy for running a pool.

    source    origin of the rule, in a line
    is_ideal  not realisable: it knows or has what no pool can. It is not a bound: these are in `benchmarks.lab.bounds`
    """

    name: str
    source: str
    _make: Callable[[Sequence[SimulatedGpu], Random], CoreAndMemory]
    is_ideal: bool = False

    def make(
        self, gpus: Iterable[SimulatedGpu], components: Iterable[ComponentSpec] = (), rng: Random | None = None
    ) -> CoreAndMemory:
        """Create a core and its workers' memory. The core learns sizes by an event, so no policy reads `components`
        yet; `rng` is the source of randomness, by default with a fixed seed."""
        return self._make(tuple(gpus), rng or Random(SEED))


#: the placement that a live pool uses
OUR_POLICY = Policy(
    "modelpool",
    "this pool: expected completion time over components in bytes",
    lambda gpus, rng: (SchedulerState(), PlannedMemory()),
)
