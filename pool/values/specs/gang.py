"""A gang: the workers that share one run, each with a part of its computation. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.pool.values.specs.wire_value import WireValue

#: numbers of GPUs that may share a run
DEGREES: Final = (1, 2, 4, 8)
#: `SampleParams.gpus`: as many as the scheduler chooses
ANY_GPUS: Final = -1


@dataclass(frozen=True, slots=True)
class Gang(WireValue):
    """One worker's place in a gang. Every member gets the run, with the same inputs and its own rank.

    gang_id  identifies the gang among all of the pool, also of earlier controllers
    members  in the order of their ranks. The first leads: its result and its cost are the run's
    rank     the place of this worker in `members`
    address  "host:port" of the leader's store, at which the members meet (`GpuWorker.gang_address`)
    """

    gang_id: str
    members: tuple[WorkerId, ...]
    rank: int
    address: str = ""

    @property
    def degree(self) -> int:
        """The number of GPUs that share the run."""
        return len(self.members)

    @property
    def leads(self) -> bool:
        """Whether this member's result is the run's."""
        return self.rank == 0
