"""Residency of one GPU in bytes: values that travel between processes. Plans are in `pool.weights.plan.eviction_plan`.

They are not frozen: the scheduler creates them for every event, and a frozen dataclass sets each field by a call.
`Final` marks them as immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from modelpool.pool.values.specs.name_types import ComponentKey
from modelpool.pool.values.specs.wire_value import WireValue


@dataclass(slots=True, eq=False)
class Resident(WireValue):
    """The resident part of one component.

    patch_digest   the patch set of these bytes; empty as `pool.values.specs.spec.UNPATCHED`
    patched_bytes  bytes of the modules that this patch set changes, resident or not
    """

    component: Final[ComponentKey]
    resident_bytes: Final[int]
    patch_digest: Final[str] = ""
    patched_bytes: Final[int] = 0

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


@dataclass(slots=True, unsafe_hash=True)
class Residency(WireValue):
    """Weights on one GPU: at most one entry per component, least recently used first. Only entries with bytes."""

    capacity_bytes: Final[int]
    entries: Final[tuple[Resident, ...]] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes of weights on the GPU."""
        return sum([e.resident_bytes for e in self.entries])

    def of(self, component: ComponentKey) -> Resident | None:
        """Return the entry of `component`, or None if none of it is resident."""
        for entry in self.entries:
            if entry.component == component:
                return entry
        return None
