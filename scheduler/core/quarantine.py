"""Work that is refused for a while, because running it took memory or workers away from all other work.

Remembers keys with reasons, within bounds; what a key is, and what follows, is decided elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from modelpool.pool.specs.spec import RunErrorKind

#: keys that are remembered, the oldest forgotten first
MOST_KEYS = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why work is refused, and until when.

    capacity_bytes  most memory that a worker had when that was decided
    """

    until: float
    capacity_bytes: int
    kind: RunErrorKind
    reason: str


class Quarantine:
    """Keys of work, each for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, at: float, capacity_bytes: int, kind: RunErrorKind, reason: str) -> None:
        """Refuse `key` from now on; `capacity_bytes` is the most memory that a worker of the pool has."""
        self._entries.pop(key, None)
        self._entries[key] = Refusal(at + self._seconds, capacity_bytes, kind, reason)
        if len(self._entries) > MOST_KEYS:
            self._entries.popitem(last=False)

    def refusal(self, keys: Iterable[Hashable], at: float) -> Refusal | None:
        """Why one of `keys` is refused; None when none is."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and at < entry.until:
                return entry
            self._entries.pop(key, None)
        return None

    def lift(self, key: Hashable) -> None:
        """Work with this key ended well."""
        self._entries.pop(key, None)

    def grown(self, capacity_bytes: int) -> None:
        """A worker with so much memory is up: forget what was refused for want of it."""
        for key in [k for k, entry in self._entries.items() if entry.capacity_bytes < capacity_bytes]:
            del self._entries[key]
