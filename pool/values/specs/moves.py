"""Values of a plan of `pool.weights.plan.eviction_plan`: bytes that leave a GPU and bytes that arrive.

Created for every event of the scheduler, and therefore not frozen (see `pool.values.specs.resident`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelpool.pool.values.specs.name_types import ComponentKey
from modelpool.pool.values.specs.resident import Residency


@dataclass(slots=True, unsafe_hash=True)
class Move:
    """`bytes` of weights of one component that leave the GPU or arrive on it."""

    component: Final[ComponentKey]
    bytes: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class ResidencyPlan:
    """A transition between residencies: evict first, then upload.

    evict            weights to evict, in order
    upload           weights to upload, or to upload again with other patches; bytes on the bus
    switched         components that were resident with another patch set
    after            residency during and after the run
    streamed_bytes   bytes on the bus during the run, over all its passes
    """

    evict: Final[tuple[Move, ...]]
    upload: Final[tuple[Move, ...]]
    switched: Final[tuple[ComponentKey, ...]]
    after: Final[Residency]
    streamed_bytes: Final[int]

    @property
    def upload_bytes(self) -> int:
        """Bytes on the bus before the run."""
        return sum(m.bytes for m in self.upload)

    @property
    def evicted_bytes(self) -> int:
        """Bytes of evicted weights."""
        return sum(m.bytes for m in self.evict)

    @property
    def all_resident(self) -> bool:
        """Whether nothing is uploaded or streamed."""
        return not self.upload and self.streamed_bytes == 0
