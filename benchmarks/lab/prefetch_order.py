"""Prefetch order of a worker with a known plan: the files that are needed first, as many as memory has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, TaskSpec


@dataclass(slots=True)
class PrefetchOrder:
    """The files of one worker's plan in the order of their first use."""

    _planned: int = 0
    _known: set[ComponentKey] = field(default_factory=set)
    #: (step, file) not requested yet; (step, bytes) requested and not used yet
    _later: deque[tuple[int, ComponentKey]] = field(default_factory=deque)
    _requested: deque[tuple[int, int]] = field(default_factory=deque)

    def expect(self, tasks: Iterable[TaskSpec]) -> None:
        """Append the steps of these tasks."""
        for task in tasks:
            for key in (key for use in task.uses for key in (use.component, *use.adapters)):
                if key not in self._known:
                    self._known.add(key)
                    self._later.append((self._planned, key))
            self._planned += 1

    def at_step(
        self, step: int, room_bytes: int, components: Mapping[ComponentKey, ComponentSpec]
    ) -> tuple[ComponentKey, ...]:
        """Return the files to request as this step begins: the next ones, within `room_bytes` together with those
        requested and not used yet, and at least one."""
        while self._later and self._later[0][0] <= step:
            self._later.popleft()
        while self._requested and self._requested[0][0] <= step:
            self._requested.popleft()
        waiting_bytes = sum(size for _, size in self._requested)
        found: list[ComponentKey] = []
        while self._later:
            first_use, key = self._later[0]
            size_bytes = components[key].upload_bytes
            if self._requested and waiting_bytes + size_bytes > room_bytes:
                break
            self._later.popleft()
            self._requested.append((first_use, size_bytes))
            waiting_bytes += size_bytes
            found.append(key)
        return tuple(found)
