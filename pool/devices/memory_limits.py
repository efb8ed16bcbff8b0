"""Host memory available to this process: of the machine, or of its control groups if they limit it. Torch-free.

Reads control groups of version 2 (`memory.max`) and version 1 (`memory.limit_in_bytes`), for the process's group and
all above it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
#: version 1 writes a number of about 2**63 for "no limit"
_NO_LIMIT_BYTES = 1 << 60
#: how long a reader assumes that no group gets another limit
LIMITS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for this process.

    total_bytes      the smallest limit
    available_bytes  the rest under every limit
    """

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _Limit:
    """The limit of a control group, and the files with its use."""

    limit_bytes: int
    used: Path
    stat: Path

    def used_bytes(self) -> int:
        return max(0, (_number(self.used) or 0) - _reclaimable_bytes(self.stat))


def host_memory(root: Path = CGROUP_ROOT, own_groups: Path = OWN_GROUPS) -> HostMemory:
    """Return the memory of the machine, limited by each control group of this process.

    Missing or unreadable files impose no limit.
    """
    return _memory_under(tuple(_limits(root, own_groups)))


class HostMemoryReader:
    """Returns what `host_memory` does, for callers that ask several times per run.

    It looks for limits once per `LIMITS_SECONDS`: to find that no group of a process has one takes five times as long
    as everything else. The use of groups with a limit is read each time. One reader may serve several threads.
    """

    def __init__(
        self,
        root: Path = CGROUP_ROOT,
        own_groups: Path = OWN_GROUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._own_groups, self._clock = root, own_groups, clock
        self._limits: tuple[_Limit, ...] = ()
        self._outdated_at = -math.inf

    def __call__(self) -> HostMemory:
        """Return the memory now."""
        if (now := self._clock()) >= self._outdated_at:
            self._limits = tuple(_limits(self._root, self._own_groups))
            self._outdated_at = now + LIMITS_SECONDS
        return _memory_under(self._limits)


def _memory_under(limits: Sequence[_Limit]) -> HostMemory:
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = int(machine.total), int(machine.available)
    for limit in limits:
        total_bytes = min(total_bytes, limit.limit_bytes)
        available_bytes = min(available_bytes, limit.limit_bytes - limit.used_bytes())
    return HostMemory(total_bytes, max(0, available_bytes))


def _limits(root: Path, own_groups: Path) -> Iterator[_Limit]:
    """Every group with a limit."""
    for line in _text(own_groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            yield from _up(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _up(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _up(top: Path, path: str, limit_name: str, used_name: str) -> Iterator[_Limit]:
    """Limits of the group at `path` and its parents. In a container the group's own folder may be the top."""
    group = top / path.strip("/")
    for folder in dict.fromkeys((group, *group.parents)):
        if not folder.is_relative_to(top):
            return
        limit_bytes = _number(folder / limit_name)
        if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
            yield _Limit(limit_bytes, folder / used_name, folder / "memory.stat")


def _reclaimable_bytes(stat: Path) -> int:
    """Inactive file pages: counted as used, but reclaimable."""
    for line in _text(stat).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
