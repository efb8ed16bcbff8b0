"""`PatchedShelf`: patched weights of modules that were switched away from, kept for when they are switched back to.

A module's device tensors move onto the shelf and off it again; nothing is copied, so the bytes of a tensor are counted
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
    """What a run whose weights change is to save: time or memory."""

    MAX_SPEED = "max_speed"
    MIN_VRAM = "min_vram"

    def shelf_bytes(self, free_bytes: int, activation_bytes: int) -> int:
        """Bytes for a shelf on a device with `free_bytes` left beside the weights, for a run whose forward pass takes
        `activation_bytes`: all that is free but twice that, or none. Source: ComfyUI's margin for its hook cache."""
        return max(0, free_bytes - 2 * activation_bytes) if self is HookMode.MAX_SPEED else 0


#: (module name, digest of the patches that its bytes carry)
ShelfKey: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Shelved:
    """The device tensors of one module, by the names that it has for them."""

    parameters: Mapping[str, nn.Parameter | None]
    buffers: Mapping[str, Tensor | None]
    held_bytes: int


class PatchedShelf:
    """Least recently shelved first out. Invariant: `held_bytes` never exceeds `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        assert budget_bytes >= 0, f"a budget of {budget_bytes} bytes"
        self.budget_bytes = budget_bytes
        self._shelved: OrderedDict[ShelfKey, Shelved] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of everything on the shelf."""
        return self._held_bytes

    def put(self, key: ShelfKey, shelved: Shelved) -> None:
        """Keep `shelved`, giving up older ones for it; not kept at all when it is larger than the budget."""
        assert key not in self._shelved, f"{key} is on the shelf already"
        if shelved.held_bytes > self.budget_bytes:
            return
        while self._held_bytes + shelved.held_bytes > self.budget_bytes:
            _, oldest = self._shelved.popitem(last=False)
            self._held_bytes -= oldest.held_bytes
        self._shelved[key] = shelved
        self._held_bytes += shelved.held_bytes

    def take(self, key: ShelfKey) -> Shelved | None:
        """What was kept under `key`, no longer on the shelf; None when it is not there."""
        shelved = self._shelved.pop(key, None)
        if shelved is not None:
            self._held_bytes -= shelved.held_bytes
        return shelved

    def clear(self) -> None:
        """Give up everything."""
        self._shelved.clear()
        self._held_bytes = 0
