"""`ActivationCounts`: activation bytes by everything that they depend on. Torch-free. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from modelpool.pool.values.core.lru_cache import LruCache

#: counts that are kept, some hundred bytes each
COUNTS_REMEMBERED = 4096


class ActivationCounts:
    """Counted bytes, without corrections and margins, so that estimators of several catalogs may share them.

    Models of one structure share them too: fine-tunes of one model are counted once.
    """

    def __init__(self) -> None:
        self._counts: LruCache[Hashable, int] = LruCache(COUNTS_REMEMBERED)

    def get(self, key: Hashable, count: Callable[[], int]) -> int:
        """Return the bytes of `key`, by `count` if they are unknown. `key` states everything that `count` reads."""
        return self._counts.get(key, count)

    def __len__(self) -> int:
        return len(self._counts)
