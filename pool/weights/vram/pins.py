"""`Pins`: components that must stay on a GPU, and eviction priorities.

Values about managed components; `pool.weights.vram.vram_manager` plans with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec


class Pins:
    """Pinned components and priorities. `forget` removes both."""

    def __init__(self, specs: Mapping[ComponentKey, ComponentSpec]) -> None:
        """`specs` has the sizes of all managed components, now and later; read only."""
        self._specs = specs
        self._pinned: dict[ComponentKey, int] = {}
        self._priorities: dict[ComponentKey, int] = {}

    @property
    def pinned(self) -> Mapping[ComponentKey, int]:
        """Pinned bytes, by component."""
        return MappingProxyType(self._pinned)

    @property
    def priorities(self) -> Mapping[ComponentKey, int]:
        """Priorities other than the default 0."""
        return MappingProxyType(self._priorities)

    def pin(self, key: ComponentKey, size_bytes: int | None = None) -> None:
        """Pin at least `size_bytes` (None: all) of the resident bytes of a component.

        Loads nothing. Runs that do not fit next to pinned bytes are refused. Raises UnknownName.
        """
        weight_bytes = self._known(key).weight_bytes
        self._pinned[key] = weight_bytes if size_bytes is None else min(size_bytes, weight_bytes)

    def unpin(self, key: ComponentKey) -> None:
        """Remove a pin. Does nothing if there is none."""
        self._pinned.pop(key, None)

    def prioritize(self, key: ComponentKey, priority: int) -> None:
        """Evict a component before others (below 0) or after them (above 0), overriding all other rules; 0 is the
        default. Raises UnknownName."""
        assert self._known(key)
        self._priorities[key] = priority
        if priority == 0:
            del self._priorities[key]

    def forget(self, key: ComponentKey) -> None:
        """Forget a component that is no longer managed."""
        self._pinned.pop(key, None)
        self._priorities.pop(key, None)

    def _known(self, key: ComponentKey) -> ComponentSpec:
        if key not in self._specs:
            raise unknown_name("component", key, self._specs)
        return self._specs[key]
