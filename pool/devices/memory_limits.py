"""Host memory available to this process: of the machine, or of its control groups if they limit it. Torch-free.

Reads control groups of version 2 (`memory.max`) and version 1 (`memory.limit_in_bytes`), for the process's group and
all above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
#: version 1 writes a number of about 2**63 for "no limit"
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for this process.

    total_bytes      the smallest limit
    available_bytes  the rest under every limit
    """

    total_bytes: int
    available_bytes: int


def host_memory(root: Path = CGROUP_ROOT, own_groups: Path = OWN_GROUPS) -> HostMemory:
    """Return the memory of the machine, limited by each control group of this process.

    Missing or unreadable files impose no limit.
    """
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = int(machine.total), int(machine.available)
    for limit_bytes, used_bytes in _limits(root, own_groups):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, limit_bytes - used_bytes)
    return HostMemory(total_bytes, max(0, available_bytes))


def _limits(root: Path, own_groups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of every group with a limit."""
    for line in _text(own_groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            yield from _up(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _up(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _up(top: Path, path: str, limit_name: str, used_name: str) -> Iterator[tuple[int, int]]:
    """Limits of the group at `path` and its parents. In a container the group's own folder may be the top."""
    group = top / path.strip("/")
    for folder in dict.fromkeys((group, *group.parents)):
        if not folder.is_relative_to(top):
            return
        limit_bytes = _number(folder / limit_name)
        if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
            used_bytes = (_number(folder / used_name) or 0) - _reclaimable_bytes(folder / "memory.stat")
            yield limit_bytes, max(0, used_bytes)


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
