"""What a plan of `pool.plan.residency` says: which bytes leave a GPU, and which arrive. Values; decides nothing.

Made with every event of the scheduler: their `__init__` is written out (`pool.specs.resident` says why).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelpool.pool.specs.names import ComponentKey
from modelpool.pool.specs.resident import Residency


@dataclass(slots=True, init=False, unsafe_hash=True)
class Move:
    """`bytes` of weights of one component that leave the GPU or arrive on it."""

    component: Final[ComponentKey]
    bytes: Final[int]

    def __init__(self, component: ComponentKey, bytes: int) -> None:  # noqa: A002
        self.component = component
        self.bytes = bytes


@dataclass(slots=True, init=False, unsafe_hash=True)
class ResidencyPlan:
    """A move from one residency to the next: evict first, then upload.

    evict            weights that leave, in order
    upload           weights that arrive or arrive again with other patches; bytes as they cross the bus
    switched         components that were resident with another patch set
    after            residency while the task runs and when it has run
    streamed_bytes   bytes that cross the bus during the run, over all its passes
    """

    evict: Final[tuple[Move, ...]]
    upload: Final[tuple[Move, ...]]
    switched: Final[tuple[ComponentKey, ...]]
    after: Final[Residency]
    streamed_bytes: Final[int]

    def __init__(
        self,
        evict: tuple[Move, ...],
        upload: tuple[Move, ...],
        switched: tuple[ComponentKey, ...],
        after: Residency,
        streamed_bytes: int,
    ) -> None:
        self.evict = evict
        self.upload = upload
        self.switched = switched
        self.after = after
        self.streamed_bytes = streamed_bytes

    @property
    def upload_bytes(self) -> int:
        """Bytes that cross the bus before the run."""
        return sum(m.bytes for m in self.upload)

    @property
    def evicted_bytes(self) -> int:
        """Bytes of weights that leave."""
        return sum(m.bytes for m in self.evict)

    @property
    def all_resident(self) -> bool:
        """Nothing to upload and nothing to stream."""
        return not self.upload and self.streamed_bytes == 0
