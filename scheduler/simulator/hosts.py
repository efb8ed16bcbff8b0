"""Page cache and disks of a simulated machine: which weight files are cached, and when the disks are free.

Reads of runs go one after the other at the storage's rate; prefetches get the time in between. A file that is being
read is available as far as it has been read: a run that needs more of it waits until then, and reads nothing twice. All
bytes from storage are counted here, for any purpose.

Files are known by component and size. Only the number of cached bytes of a file is modelled, not which: the rest of a
partly evicted file serves any read of that many bytes, which favours partial reads. A file that is larger than the
memory is never cached: when its end is read, its beginning is gone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.spec import ComponentKey, NodeId, WorkerId


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """One machine: its memory for files, and the speed of its disks. Raises UnusableField."""

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
    """The read of a run: the first bytes of one file."""

    bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReading:
    """The reads from storage for one run.

    missing       bytes of each file that are read for it; only files with missing bytes
    waited_bytes  bytes that are being read for other runs, and that it waits for
    loaded_at     time at which everything that it needs before it computes is in memory
    streamed_at   time at which everything that it needs is in memory
    """

    missing: Mapping[ComponentKey, int]
    waited_bytes: int
    loaded_at: float
    streamed_at: float


@dataclass(frozen=True, slots=True)
class StorageReads:
    """Bytes read from storage for any purpose.

    ahead_bytes  of `bytes`, those that were prefetched
    loads        how often each file was read; an interrupted read counts once
    """

    bytes: int = 0
    ahead_bytes: int = 0
    loads: Mapping[ComponentKey, int] = field(default_factory=dict)


def summed(reads: Iterable[StorageReads]) -> StorageReads:
    """The sum of several."""
    total_bytes = ahead_bytes = 0
    loads: Counter[ComponentKey] = Counter()
    for one in reads:
        total_bytes += one.bytes
        ahead_bytes += one.ahead_bytes
        loads.update(one.loads)
    return StorageReads(total_bytes, ahead_bytes, loads)


@dataclass(slots=True)
class _Arrival:
    """Bytes of a file that are read in sequence. `is_load`: counted as a load of the file."""

    key: ComponentKey
    begin: float
    from_bytes: int
    to_bytes: int
    is_load: bool


@dataclass(slots=True)
class _Turn:
    """The reads of the storage for one run. `shared`: another run waits for some of them."""

    worker_id: WorkerId
    begin: float
    arrivals: list[_Arrival] = field(default_factory=list)
    shared: bool = False


class Host:
    """The file cache of one machine, in LRU order, and its storage.

    `host_bytes` None means unlimited memory.
    """

    def __init__(self, host_bytes: int | None, storage_bytes_per_second: float) -> None:
        self.storage_bytes_per_second = storage_bytes_per_second
        self._host_bytes = host_bytes
        #: bytes of each file that are cached or being read, least recently used first
        self._cached: OrderedDict[ComponentKey, int] = OrderedDict()
        self._used_bytes = 0
        #: files that are being read for runs
        self._arriving: dict[ComponentKey, list[tuple[_Turn, _Arrival]]] = {}
        #: files that are being prefetched, in order: the bytes of each that will be cached
        self._ahead: OrderedDict[ComponentKey, int] = OrderedDict()
        #: time up to which prefetches were simulated
        self._followed_at = 0.0
        #: seconds of storage that were too short to read a byte
        self._spare_seconds = 0.0
        #: when all reads of runs are done, and the worker of the last of them
        self._free_at = 0.0
        self._last: _Turn | None = None
        self._read_bytes = 0
        self._ahead_bytes = 0
        self._loads: Counter[ComponentKey] = Counter()
        #: files with an interrupted read that was counted as a load: resuming it is no further load
        self._begun: set[ComponentKey] = set()

    @property
    def cached(self) -> Mapping[ComponentKey, int]:
        """Bytes of each file that are in memory or being read, least recently used first."""
        return self._cached

    def reads(self, now: float) -> StorageReads:
        """Bytes read from storage, including reads of runs that are still pending."""
        self._follow(now)
        return StorageReads(self._read_bytes, self._ahead_bytes, Counter(self._loads))

    def read(
        self,
        now: float,
        worker_id: WorkerId,
        loading: Mapping[ComponentKey, FileRead],
        streaming: Mapping[ComponentKey, FileRead],
    ) -> NodeReading:
        """Read what a run is missing, after all earlier requests: first `loading`, needed before it computes, then
        `streaming`. Afterwards the files are cached, as far as there is room."""
        self._follow(now)
        turn = _Turn(worker_id, max(now, self._free_at))
        at, waited_bytes = turn.begin, 0
        missing: dict[ComponentKey, int] = {}
        ready: list[float] = []
        for reads in (loading, streaming):
            ready_at = now
            for key, read in reads.items():
                self._ahead.pop(key, None)
                wanted_bytes = min(read.bytes, read.file_bytes)
                there_bytes = missing.get(key, 0) if self._exceeds(read.file_bytes) else self._cached.get(key, 0)
                there_at, coming_bytes = self._there(now, key, min(wanted_bytes, there_bytes))
                ready_at, waited_bytes = max(ready_at, there_at), waited_bytes + coming_bytes
                missing_bytes = max(0, wanted_bytes - there_bytes)
                if missing_bytes:
                    is_load = key not in missing and self._is_load(key)
                    missing[key] = missing.get(key, 0) + missing_bytes
                    self._arrive(turn, _Arrival(key, at, there_bytes, wanted_bytes, is_load))
                    at += missing_bytes / self.storage_bytes_per_second
                    ready_at = max(ready_at, at)
                if wanted_bytes or there_bytes:
                    self._keep(key, max(there_bytes, wanted_bytes))
            ready.append(ready_at)
        if missing:
            self._free_at, self._last = at, turn
        self._make_room()
        return NodeReading(missing, waited_bytes, ready[0], max(ready))

    def stop(self, now: float, worker_id: WorkerId) -> dict[ComponentKey, int]:
        """The run there was stopped: cancel its pending reads, unless another run waits for them or behind them.
        Returns the bytes of each file that are not read."""
        turn = self._last
        if turn is None or turn.worker_id != worker_id or turn.shared:
            return {}
        self._follow(now)
        unread: dict[ComponentKey, int] = {}
        untouched: set[ComponentKey] = set()
        for arrival in turn.arrivals:
            there_bytes = self._arrived(now, arrival)
            gone_bytes = arrival.to_bytes - there_bytes
            if not gone_bytes:
                continue
            unread[arrival.key] = unread.get(arrival.key, 0) + gone_bytes
            self._read_bytes -= gone_bytes
            self._lose(arrival.key, gone_bytes)
            if arrival.is_load and there_bytes == arrival.from_bytes:
                self._loads[arrival.key] -= 1
                untouched.add(arrival.key)
            elif arrival.key not in untouched:
                self._begun.add(arrival.key)
            # what was read is in memory already
            self._arriving.get(arrival.key, []).clear()
        self._free_at = min(self._free_at, max(now, turn.begin))
        self._last = None
        return unread

    def uses(self, now: float, key: ComponentKey, size_bytes: int) -> bool:
        """Whether this many bytes of a file are completely in memory now. Marks them as used."""
        self._follow(now)
        if self._cached.get(key, 0) < size_bytes or any(
            self._arrived(now, one) < min(size_bytes, one.to_bytes) for _, one in self._arriving.get(key, ())
        ):
            return False
        self._cached.move_to_end(key)
        return True

    def fetch(self, now: float, files: Sequence[tuple[ComponentKey, int]]) -> None:
        """Prefetch these files while no run reads, in this order, after earlier ones. A file that is larger than the
        memory is skipped."""
        self._follow(now)
        for key, file_bytes in files:
            if self._cached.get(key, 0) < file_bytes and not self._exceeds(file_bytes):
                self._ahead.setdefault(key, file_bytes)

    def _exceeds(self, file_bytes: int) -> bool:
        return self._host_bytes is not None and file_bytes > self._host_bytes

    def _is_load(self, key: ComponentKey) -> bool:
        """Count a load of the file, unless an interrupted one is resumed."""
        if key in self._begun:
            self._begun.discard(key)
            return False
        self._loads[key] += 1
        return True

    def _arrive(self, turn: _Turn, arrival: _Arrival) -> None:
        self._read_bytes += arrival.to_bytes - arrival.from_bytes
        turn.arrivals.append(arrival)
        self._arriving.setdefault(arrival.key, []).append((turn, arrival))

    def _there(self, now: float, key: ComponentKey, size_bytes: int) -> tuple[float, int]:
        """The time at which the first bytes of a cached file are available, and the number that is still being read."""
        incoming = self._arriving.get(key)
        if incoming is None:
            return now, 0
        left = [(turn, one) for turn, one in incoming if self._arrived(now, one) < one.to_bytes]
        if not left:
            del self._arriving[key]
            return now, 0
        self._arriving[key] = left
        there_at, coming_bytes = now, 0
        for turn, one in left:
            to_bytes, arrived_bytes = min(size_bytes, one.to_bytes), self._arrived(now, one)
            if to_bytes > arrived_bytes:
                there_at = max(there_at, one.begin + (to_bytes - one.from_bytes) / self.storage_bytes_per_second)
                coming_bytes += to_bytes - arrived_bytes
                turn.shared = True
        return there_at, coming_bytes

    def _arrived(self, now: float, one: _Arrival) -> int:
        """The byte up to which it has been read."""
        passed_bytes = (now - one.begin) * self.storage_bytes_per_second
        if passed_bytes >= one.to_bytes - one.from_bytes:
            return one.to_bytes
        return one.from_bytes + max(0, int(passed_bytes))

    def _follow(self, now: float) -> None:
        """Prefetch what fits into the time since the last call in which no run read."""
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
            if arriving_bytes:
                self._is_load(key)
                self._begun.add(key)
                self._read_bytes += arriving_bytes
                self._ahead_bytes += arriving_bytes
            self._keep(key, cached_bytes + arriving_bytes)
            room_bytes -= arriving_bytes
            if cached_bytes + arriving_bytes >= wanted_bytes:
                del self._ahead[key]
                self._begun.discard(key)
        self._make_room()

    def _keep(self, key: ComponentKey, size_bytes: int) -> None:
        self._used_bytes += size_bytes - self._cached.pop(key, 0)
        self._cached[key] = size_bytes

    def _lose(self, key: ComponentKey, size_bytes: int) -> None:
        """Remove bytes of a file that are missing, or no longer cached."""
        cached_bytes = self._cached.get(key, 0)
        left_bytes = max(0, cached_bytes - size_bytes)
        self._used_bytes -= cached_bytes - left_bytes
        if left_bytes:
            self._cached[key] = left_bytes
        else:
            self._cached.pop(key, None)

    def _make_room(self) -> None:
        """Evict the least recently used files, as many bytes as needed. Reading these again is another load."""
        if self._host_bytes is None:
            return
        while self._used_bytes > self._host_bytes:
            key = next(iter(self._cached))
            self._lose(key, self._used_bytes - self._host_bytes)
            self._begun.discard(key)
