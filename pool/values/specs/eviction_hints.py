"""Hints for eviction: components expected next, pinned bytes and priorities.

Values for `pool.weights.plan.eviction_plan.plan`; torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from modelpool.pool.values.specs.spec import ComponentKey


@dataclass(slots=True, unsafe_hash=True)
class EvictionHints:
    """Hints that a plan considers in addition to its own task.

    needed_next   components of tasks expected on this GPU, soonest first; each at most once
    pinned_bytes  bytes of components that must stay on the GPU; a task that does not fit next to them is refused
    priorities    components that are evicted before others (below 0) or after them (above 0), overriding all other
                  rules
    """

    needed_next: Final[tuple[ComponentKey, ...]] = ()
    pinned_bytes: Final[Mapping[ComponentKey, int]] = field(default_factory=dict)
    priorities: Final[Mapping[ComponentKey, int]] = field(default_factory=dict)


#: no hints
NO_HINTS = EvictionHints()
