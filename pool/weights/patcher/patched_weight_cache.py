"""`PatchedWeightCache`: device copies of patched weights, kept after a switch to another patch set for switching back.

A module's device tensors move into the cache and out of it; nothing is copied, so the bytes of a tensor are counted
either as resident or here. Knows sizes and digests, not modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from torch import Tensor, nn


class HookMode(StrEnum):
    """Whether a run with changing weights should save time or memory."""

    MAX_SPEED = "max_speed"
    MIN_VRAM = "min_vram"

    def cache_bytes(self, free_bytes: int, activation_bytes: int) -> int:
        """Return the size of the cache on a device with `free_bytes` left next to the weights, for a forward pass of
        `activation_bytes`: all free bytes except twice that, or 0. Source: ComfyUI's margin for its hook
        cache."""
        return max(0, free_bytes - 2 * activation_bytes) if self is HookMode.MAX_SPEED else 0


#: (module name, digest of the patches merged into its bytes)
CacheKey: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """The device tensors of one module, by the module's names for them."""

    parameters: Mapping[str, nn.Parameter | None]
    buffers: Mapping[str, Tensor | None]
    held_bytes: int


class PatchedWeightCache:
    """An LRU cache. Invariant: `held_bytes` never exceeds `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        assert budget_bytes >= 0, f"a budget of {budget_bytes} bytes"
        self.budget_bytes = budget_bytes
        self._cached: OrderedDict[CacheKey, CachedWeights] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of everything in the cache."""
        return self._held_bytes

    def put(self, key: CacheKey, cached: CachedWeights) -> None:
        """Keep `cached`, dropping the oldest to make room; not kept if it is larger than the budget."""
        assert key not in self._cached, f"{key} is cached already"
        if cached.held_bytes > self.budget_bytes:
            return
        while self._held_bytes + cached.held_bytes > self.budget_bytes:
            _, oldest = self._cached.popitem(last=False)
            self._held_bytes -= oldest.held_bytes
        self._cached[key] = cached
        self._held_bytes += cached.held_bytes

    def take(self, key: CacheKey) -> CachedWeights | None:
        """Remove and return the entry of `key`; None if there is none."""
        cached = self._cached.pop(key, None)
        if cached is not None:
            self._held_bytes -= cached.held_bytes
        return cached

    def clear(self) -> None:
        """Drop everything."""
        self._cached.clear()
        self._held_bytes = 0
