"""Which files a worker with a known plan has read ahead: those it will need first, as many as memory has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, TaskSpec


@dataclass(slots=True)
class ReadingAhead:
    """The files of one worker's plan in the order of their first use."""

    _planned: int = 0
    _seen: set[ComponentKey] = field(default_factory=set)
    #: (step, file) not asked for yet; (step, bytes) asked for and not used yet
    _later: deque[tuple[int, ComponentKey]] = field(default_factory=deque)
    _asked: deque[tuple[int, int]] = field(default_factory=deque)

    def expect(self, tasks: Iterable[TaskSpec]) -> None:
        """These steps come after all those before."""
        for task in tasks:
            for key in (key for use in task.uses for key in (use.component, *use.adapters)):
                if key not in self._seen:
                    self._seen.add(key)
                    self._later.append((self._planned, key))
            self._planned += 1

    def at_step(
        self, step: int, room_bytes: int, components: Mapping[ComponentKey, ComponentSpec]
    ) -> tuple[ComponentKey, ...]:
        """What to ask for as this step begins: the next files, together with those that wait already within
        `room_bytes`, and at least one."""
        while self._later and self._later[0][0] <= step:
            self._later.popleft()
        while self._asked and self._asked[0][0] <= step:
            self._asked.popleft()
        waiting_bytes = sum(size for _, size in self._asked)
        found: list[ComponentKey] = []
        while self._later:
            first_use, key = self._later[0]
            size_bytes = components[key].upload_bytes
            if self._asked and waiting_bytes + size_bytes > room_bytes:
                break
            self._later.popleft()
            self._asked.append((first_use, size_bytes))
            waiting_bytes += size_bytes
            found.append(key)
        return tuple(found)
