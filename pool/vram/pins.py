"""`Wishes`: what somebody wants kept on a GPU, whatever plans would do.

Values about managed components; moves nothing. `pool.vram.vram_manager` makes plans that respect them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.core.errors import unknown_name
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec


class Wishes:
    """Components that are held, and priorities of components. Ends with the components: `forget`."""

    def __init__(self, specs: Mapping[ComponentKey, ComponentSpec]) -> None:
        """`specs` has the sizes of all managed components, now and later; it is only read."""
        self._specs = specs
        self._held: dict[ComponentKey, int] = {}
        self._priorities: dict[ComponentKey, int] = {}

    @property
    def held(self) -> Mapping[ComponentKey, int]:
        """Bytes that are held, by component."""
        return MappingProxyType(self._held)

    @property
    def priorities(self) -> Mapping[ComponentKey, int]:
        """Priorities other than the usual 0."""
        return MappingProxyType(self._priorities)

    def hold(self, key: ComponentKey, size_bytes: int | None = None) -> None:
        """From now on plans leave at least `size_bytes` (None: all) of what is resident of a component where it is.

        Nothing is brought in by it. Runs for which too little is left do not fit. Raises UnknownName.
        """
        weight_bytes = self._known(key).weight_bytes
        self._held[key] = weight_bytes if size_bytes is None else min(size_bytes, weight_bytes)

    def release(self, key: ComponentKey) -> None:
        """End a `hold`. Does nothing where there is none."""
        self._held.pop(key, None)

    def prioritize(self, key: ComponentKey, priority: int) -> None:
        """Let a component leave before others (below 0) or after them (above 0), whatever else is known; 0 is as usual.
        Raises UnknownName."""
        assert self._known(key)
        self._priorities[key] = priority
        if priority == 0:
            del self._priorities[key]

    def forget(self, key: ComponentKey) -> None:
        """A component is managed no more."""
        self._held.pop(key, None)
        self._priorities.pop(key, None)

    def _known(self, key: ComponentKey) -> ComponentSpec:
        if key not in self._specs:
            raise unknown_name("component", key, self._specs)
        return self._specs[key]
