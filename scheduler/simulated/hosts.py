"""The memory and the disks of a simulated machine: which files of weights are cached, and when the disks are free.

Reads of runs go one after the other at the storage's rate; what is fetched ahead gets the time in between. Files are
known by component and size; which bytes of a file are cached is not modelled, only how many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pool.errors import unusable_field
from pool.spec import ComponentKey, NodeId, WorkerId


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """One machine: what its memory keeps of files, and how fast its disks are. Raises UnusableField."""

    node: NodeId
    host_bytes: int
    storage_bytes_per_second: float

    def __post_init__(self) -> None:
        for name, found in (
            ("host_bytes", self.host_bytes),
            ("storage_bytes_per_second", self.storage_bytes_per_second),
        ):
            if not found > 0:
                raise unusable_field(f"{self.node}: {name}", found, "more than 0")


@dataclass(frozen=True, slots=True)
class FileRead:
    """What a run wants of one file: so many of its bytes, at once."""

    bytes: int
    file_bytes: int


class Host:
    """The file cache of one machine, least recently used first, and its storage.

    `host_bytes` None is a memory that keeps everything.
    """

    def __init__(self, host_bytes: int | None, storage_bytes_per_second: float) -> None:
        self.storage_bytes_per_second = storage_bytes_per_second
        self._host_bytes = host_bytes
        #: bytes of each file that are cached, the longest unused first
        self._cached: OrderedDict[ComponentKey, int] = OrderedDict()
        self._used_bytes = 0
        #: files that are fetched ahead, in order: the bytes of each that are to be cached
        self._ahead: OrderedDict[ComponentKey, int] = OrderedDict()
        #: until when fetching ahead has been followed
        self._followed_at = 0.0
        #: seconds of storage that were too short to fetch a whole byte
        self._spare_seconds = 0.0
        #: when all reads of runs are done
        self._free_at = 0.0
        #: whose read is the last of them, and when it began
        self._last: tuple[WorkerId, float] | None = None

    @property
    def cached(self) -> Mapping[ComponentKey, int]:
        """Bytes of each file that are in memory, the longest unused first."""
        return self._cached

    def take(self, now: float, reads: Mapping[ComponentKey, FileRead]) -> dict[ComponentKey, int]:
        """The bytes of each file that have to come from storage. Afterwards it is cached, as far as there is room."""
        self._follow(now)
        missing: dict[ComponentKey, int] = {}
        for key, read in reads.items():
            self._ahead.pop(key, None)
            cached_bytes = self._cached.get(key, 0)
            missing[key] = max(0, min(read.bytes, read.file_bytes) - cached_bytes)
            self._keep(key, cached_bytes + missing[key])
        self._make_room()
        return missing

    def read(self, now: float, worker_id: WorkerId, size_bytes: int) -> float:
        """Seconds from `now` until the storage begins with a read of this size, after all that it was asked for."""
        start = max(now, self._free_at)
        if size_bytes:
            self._free_at = start + size_bytes / self.storage_bytes_per_second
            self._last = (worker_id, start)
        return start - now

    def stop(self, now: float, worker_id: WorkerId) -> None:
        """The run there was stopped: what it still waits for is not read, unless somebody waits behind it."""
        if self._last is not None and self._last[0] == worker_id:
            self._follow(now)
            self._free_at = min(self._free_at, max(now, self._last[1]))
            self._last = None

    def fetch(self, now: float, files: Sequence[tuple[ComponentKey, int]]) -> None:
        """Bring these files into memory when no run reads, in this order, after those that are on their way."""
        self._follow(now)
        for key, file_bytes in files:
            if self._cached.get(key, 0) < file_bytes:
                self._ahead.setdefault(key, file_bytes)

    def _follow(self, now: float) -> None:
        """Fetch ahead what fits in the time since the last look in which no run read."""
        idle_seconds = max(0.0, now - max(self._followed_at, self._free_at))
        self._followed_at = max(now, self._followed_at)
        if not self._ahead:
            self._spare_seconds = 0.0
            return
        room_bytes = int((idle_seconds + self._spare_seconds) * self.storage_bytes_per_second)
        self._spare_seconds += idle_seconds - room_bytes / self.storage_bytes_per_second
        while self._ahead and room_bytes:
            key, wanted_bytes = next(iter(self._ahead.items()))
            cached_bytes = self._cached.get(key, 0)
            arriving_bytes = min(room_bytes, max(0, wanted_bytes - cached_bytes))
            self._keep(key, cached_bytes + arriving_bytes)
            room_bytes -= arriving_bytes
            if cached_bytes + arriving_bytes >= wanted_bytes:
                del self._ahead[key]
        self._make_room()

    def _keep(self, key: ComponentKey, size_bytes: int) -> None:
        self._used_bytes += size_bytes - self._cached.pop(key, 0)
        self._cached[key] = size_bytes

    def _make_room(self) -> None:
        """What was longest unused goes first, as many bytes as needed."""
        if self._host_bytes is None:
            return
        while self._used_bytes > self._host_bytes:
            key, size_bytes = next(iter(self._cached.items()))
            gone_bytes = min(size_bytes, self._used_bytes - self._host_bytes)
            self._used_bytes -= gone_bytes
            if gone_bytes == size_bytes:
                del self._cached[key]
            else:
                self._cached[key] = size_bytes - gone_bytes
