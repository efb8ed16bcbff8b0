"""Quarantine: work that is refused for a while, because running it took memory or workers away from all other work.

Stores keys with reasons, within limits; what a key is, and what follows, is decided elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from modelpool.pool.values.specs.spec import RunErrorKind

#: keys that are remembered, the oldest forgotten first
MOST_KEYS = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why work is refused, and until when.

    capacity_bytes  most memory of any worker at that time
    """

    until: float
    capacity_bytes: int
    kind: RunErrorKind
    reason: str


class Quarantine:
    """Keys of refused work, each for a configured time."""

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
        """The refusal of the first of `keys` that is refused; None if none is."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and at < entry.until:
                return entry
            self._entries.pop(key, None)
        return None

    def lift(self, key: Hashable) -> None:
        """Stop refusing work with this key: it succeeded."""
        self._entries.pop(key, None)

    def grown(self, capacity_bytes: int) -> None:
        """A worker with this much memory is up: drop refusals that were for lack of it."""
        for key in [k for k, entry in self._entries.items() if entry.capacity_bytes < capacity_bytes]:
            del self._entries[key]
