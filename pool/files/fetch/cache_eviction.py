"""Decides which cached files leave the disk so that another one fits. A pure function of sizes, times and hints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file in the cache.

    key         its SHA-256; of an abandoned partial file its key there
    used_at     when it was last used, in any unit that grows
    is_partial  an interrupted fetch that no process continues
    """

    key: str
    size_bytes: int
    used_at: float
    is_partial: bool = False


def eviction_order(files: Iterable[CachedFile], needed_next: Sequence[str] = ()) -> tuple[CachedFile, ...]:
    """Return `files` in the order in which they leave: those that are not expected to be needed, abandoned fetches
    first, then the least recently used; at last those in `needed_next`, which begins with the one needed soonest."""
    place = {key: -index for index, key in enumerate(needed_next, start=1)}

    def rank(file: CachedFile) -> tuple[bool, int, bool, float, str]:
        return file.key in place, place.get(file.key, 0), not file.is_partial, file.used_at, file.key

    return tuple(sorted(files, key=rank))
