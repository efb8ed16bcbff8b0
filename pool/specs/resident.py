"""What is on one GPU, in bytes: values that travel between processes. Decides nothing; plans are
`pool.plan.residency`'s.

Their `__init__` is written out: the scheduler makes them with every event, a frozen dataclass sets each field by a
call, and the one that a dataclass gets is never compiled. `Final` says that nobody writes to one that is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelpool.pool.specs.names import ComponentKey
from modelpool.pool.specs.sent import Sent


@dataclass(slots=True, init=False, eq=False)
class Resident(Sent):
    """The part of one component that is on the GPU.

    patch_digest   the patch set that these bytes carry; as `pool.specs.spec.UNPATCHED` the empty one
    patched_bytes  bytes of the modules that this patch set touches, resident or not
    """

    component: Final[ComponentKey]
    resident_bytes: Final[int]
    patch_digest: Final[str]
    patched_bytes: Final[int]

    def __init__(
        self, component: ComponentKey, resident_bytes: int, patch_digest: str = "", patched_bytes: int = 0
    ) -> None:
        self.component = component
        self.resident_bytes = resident_bytes
        self.patch_digest = patch_digest
        self.patched_bytes = patched_bytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Resident):
            return NotImplemented
        return (
            self.resident_bytes == other.resident_bytes
            and self.component == other.component
            and self.patch_digest == other.patch_digest
            and self.patched_bytes == other.patched_bytes
        )

    def __hash__(self) -> int:
        return hash((self.component, self.resident_bytes, self.patch_digest))


@dataclass(slots=True, init=False, unsafe_hash=True)
class Residency(Sent):
    """What is on one GPU: at most one entry a component, least recently used first. Only entries with bytes."""

    capacity_bytes: Final[int]
    entries: Final[tuple[Resident, ...]]

    def __init__(self, capacity_bytes: int, entries: tuple[Resident, ...] = ()) -> None:
        self.capacity_bytes = capacity_bytes
        self.entries = entries

    @property
    def used_bytes(self) -> int:
        """Bytes of weights on the GPU."""
        return sum([e.resident_bytes for e in self.entries])

    def of(self, component: ComponentKey) -> Resident | None:
        """The entry of `component`, or None when no byte of it is resident."""
        for entry in self.entries:
            if entry.component == component:
                return entry
        return None
