"""What is on one GPU, in bytes: values that travel between processes. Decides nothing; plans are `pool.residency`'s."""

from __future__ import annotations

from dataclasses import dataclass

from pool.spec import UNPATCHED, ComponentKey


@dataclass(frozen=True, slots=True)
class Resident:
    """The part of one component that is on the GPU."""

    component: ComponentKey
    resident_bytes: int
    #: the patch set that these bytes carry
    patch_digest: str = UNPATCHED
    #: bytes of the modules that this patch set touches, resident or not
    patched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Residency:
    """What is on one GPU: at most one entry a component, least recently used first. Only entries with bytes."""

    capacity_bytes: int
    entries: tuple[Resident, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes of weights on the GPU."""
        return sum(e.resident_bytes for e in self.entries)

    def of(self, component: ComponentKey) -> Resident | None:
        """The entry of `component`, or None when no byte of it is resident."""
        for entry in self.entries:
            if entry.component == component:
                return entry
        return None
