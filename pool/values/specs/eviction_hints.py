"""Hints for eviction: components expected next, pinned bytes and priorities.

Values for `pool.weights.plan.eviction_plan.plan`; torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from modelpool.pool.values.specs.spec import ComponentKey


@dataclass(slots=True, init=False, unsafe_hash=True)
class EvictionHints:
    """Hints that a plan considers in addition to its own task.

    needed_next   components of tasks expected on this GPU, soonest first; each at most once
    pinned_bytes  bytes of components that must stay on the GPU; a task that does not fit next to them is refused
    priorities    components that are evicted before others (below 0) or after them (above 0), overriding all other
                  rules
    """

    needed_next: Final[tuple[ComponentKey, ...]]
    pinned_bytes: Final[Mapping[ComponentKey, int]]
    priorities: Final[Mapping[ComponentKey, int]]

    def __init__(
        self,
        needed_next: tuple[ComponentKey, ...] = (),
        pinned_bytes: Mapping[ComponentKey, int] | None = None,
        priorities: Mapping[ComponentKey, int] | None = None,
    ) -> None:
        self.needed_next = needed_next
        self.pinned_bytes = {} if pinned_bytes is None else pinned_bytes
        self.priorities = {} if priorities is None else priorities


#: no hints
NO_HINTS = EvictionHints()
