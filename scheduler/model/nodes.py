"""Model of each machine: which files its page cache holds, which it lacks, and how fast its disks are.

Workers of one machine share all of these. Files are named by the components in them and read from the disk once; they
stay in memory, in LRU order, until later ones need the room. The reads of a run are assumed when it is placed, and
confirmed or corrected by the bytes that its worker read from disks. Knows bytes only; no runs, workers or patches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from modelpool.pool.values.specs.spec import ComponentKey, JudgedFile, NodeId, ReadFile, WorkerSpec
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.file_table import FileTable

#: files, and the bytes that are read of each
Reads: TypeAlias = tuple[tuple[ComponentKey, int], ...]

#: fewer bytes from disks are a library that was loaded, or a directory
LEAST_READ_BYTES = 1 << 20
#: deviations from the expected bytes below this fraction are not corrected
LEAST_PART = 0.1
#: a smaller relative change of speed is noise, and not worth computing every prediction again
LEAST_DIFFERENCE = 0.02
#: how long a file counts as unavailable on a machine before it is tried again there: somebody may have copied it
UNAVAILABLE_SECONDS = 60.0
#: the same, before it is tried again because work was submitted
RETRY_SECONDS = 5.0
#: unavailable files that are remembered of one machine, the oldest forgotten first
MOST_UNAVAILABLE = 4096
#: machines that are remembered; of those that are gone, the oldest are forgotten
MOST_NODES = 4096


@dataclass(frozen=True, slots=True)
class ExpectedReads:
    """The expected reads of a run that starts.

    storage_bytes  the part of `reads` that comes from the disk
    sure           nothing else was reading the rest at that time
    wait_seconds   until the disk had finished earlier requests
    done_at        when it should have finished this one; 0 if nothing had to be read
    """

    reads: Reads
    storage_bytes: int
    sure: bool
    wait_seconds: float
    done_at: float = 0.0


@dataclass(frozen=True, slots=True)
class UnavailableFile:
    """A file that is missing on a machine, or is another file there. It is tried again after `until`. With
    `even_resident`, a worker there has refused a run although it had its weights on the GPU: these need the file, too.
    """

    until: float
    reason: str
    even_resident: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """The known state of one machine."""

    node: NodeId
    #: bytes of files that its memory holds, as reported; infinite if not reported
    reported_bytes: float = inf
    #: the same, corrected by what runs had to read again
    limit_bytes: float = inf
    #: read speed of its disks; infinite if not reported: as fast as any link
    storage_bytes_per_second: float = inf
    #: bytes of files in memory, least recently read first
    files: OrderedDict[ComponentKey, int] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    #: keys of `files` that are being read, until a run that reads them ends
    incoming: set[ComponentKey] = field(default_factory=set)
    #: files that it lacks
    unavailable: FileTable[UnavailableFile] = field(default_factory=lambda: FileTable(MOST_UNAVAILABLE))
    #: files that are not the expected ones, until a worker here finds the right one
    differing: FileTable[JudgedFile] = field(default_factory=lambda: FileTable(MOST_UNAVAILABLE))
    #: number of GPUs -> bytes per second of the link among so many here, as their last run measured it
    gang_links: dict[int, float] = field(default_factory=dict)
    #: when the disk should have finished the reads of runs
    free_at: float = 0.0
    #: grows when files come or go, or the speed changes
    version: int = 0
    #: of all machines: those that lack a file
    lacking: set[NodeId] = field(default_factory=set)
    #: of all machines: those that have a file in memory
    holders: dict[ComponentKey, dict[NodeId, None]] = field(default_factory=dict)
    _prefetch_free_at: float = 0.0
    _storage: Estimate = field(default_factory=Estimate)

    def missing_bytes(self, reads: Reads) -> int:
        """Bytes of `reads` that come from the disk."""
        missing = 0
        for key, wanted_bytes in reads:
            held_bytes = self.files.get(key, 0)
            if wanted_bytes > held_bytes:
                missing += wanted_bytes - held_bytes
        return missing

    def has(self, reads: Reads, at: float) -> bool:
        """Whether all of `reads` is in memory, not merely being read; also true if the disks are as fast as any
        link."""
        if self.storage_bytes_per_second == inf:
            return True
        if self.missing_bytes(reads):
            return False
        return self.idle_from(at) <= at or self.incoming.isdisjoint(key for key, _ in reads)

    def idle_from(self, at: float) -> float:
        """The time at which the disk should have finished all requests, `at` at the earliest."""
        return max(at, self.free_at, self._prefetch_free_at)

    def expect(self, reads: Reads, at: float = 0.0, is_prefetch: bool = False) -> ExpectedReads:
        """Record that these files are read from now on, after earlier requests of the disk; a prefetch also waits for
        the reads of runs. Evicts the least recently read files where room is needed."""
        missing = self.missing_bytes(reads)
        sure = self.incoming.isdisjoint(key for key, _ in reads)
        wait_seconds, end = max(0.0, self.free_at - at), 0.0
        if missing:
            begin = self.idle_from(at) if is_prefetch else max(at, self.free_at)
            end = begin + missing / self.storage_bytes_per_second
            if is_prefetch:
                self._prefetch_free_at = end
            else:
                self.free_at = end
            self._bring(reads)
            self.version += 1
            while self.used_bytes > self.limit_bytes and len(self.files) > 1:
                self._forget(next(iter(self.files)))
        else:
            for key, _ in reads:
                self.files.move_to_end(key)
        return ExpectedReads(reads, missing, sure, wait_seconds, end)

    def _bring(self, reads: Reads) -> None:
        for key, wanted_bytes in reads:
            held_bytes = self.files.get(key, 0)
            if wanted_bytes > held_bytes:
                if not held_bytes:
                    self.holders.setdefault(key, {})[self.node] = None
                self.files[key] = wanted_bytes
                self.used_bytes += wanted_bytes - held_bytes
                self.incoming.add(key)
            self.files.move_to_end(key)

    def confirm(self, expected: ExpectedReads, storage_bytes: int, at: float = 0.0) -> None:
        """Compare with the expectation what a successful run read from disks, and correct it."""
        reads = expected.reads
        if expected.done_at > at:  # the disk is faster than estimated, or did not have to read
            self.free_at = max(at, self.free_at - (expected.done_at - at))
        self.incoming.difference_update(key for key, _ in reads)
        noise_bytes = max(LEAST_READ_BYTES, LEAST_PART * sum(wanted_bytes for _, wanted_bytes in reads))
        if storage_bytes < expected.storage_bytes - noise_bytes:
            # They were in memory: it holds more than estimated, though not more than it has.
            self.limit_bytes = min(self.reported_bytes, self.limit_bytes + expected.storage_bytes - storage_bytes)
        elif storage_bytes > expected.storage_bytes + noise_bytes and expected.sure:
            self._shrink(reads, storage_bytes - expected.storage_bytes)

    def room_bytes(self, wanted_bytes: int, kept: Container[ComponentKey]) -> float:
        """Bytes, up to `wanted_bytes`, that can be read before a file has to leave that is in `kept` or is being
        read."""
        room_bytes = self.limit_bytes - self.used_bytes
        for key, held_bytes in self.files.items():
            if room_bytes >= wanted_bytes or key in kept or key in self.incoming:
                break
            room_bytes += held_bytes
        return room_bytes

    def lacks(self, files: Iterable[ReadFile], reason: str, at: float, resident: Container[ComponentKey] = ()) -> None:
        """Record that these files cannot be used here for the next UNAVAILABLE_SECONDS. A run was refused although it
        had `resident` components on its GPU."""
        for file in files:
            key, _ = file
            known = self.unavailable.of(file)
            even_resident = key in resident or (known is not None and known.even_resident)
            self.unavailable.put(file, UnavailableFile(at + UNAVAILABLE_SECONDS, reason, even_resident))
            if key in self.files:
                self._forget(key)
        self._note_lacking()

    def differs(self, file: JudgedFile) -> None:
        """Record that a file here is not the expected one: nothing that needs it runs here, also with weights that are
        on a GPU."""
        for key, name in file.files:
            self.differing.put((key, name), file)
            if key in self.files:
                self._forget(key)
        self._note_lacking()

    def is_right(self, files: Iterable[ReadFile]) -> None:
        """These files are here, and are the expected ones."""
        for file in files:
            if any((self.differing.remove(file), self.unavailable.remove(file))):
                self._note_lacking()

    def forget_differing(self, at: float) -> None:
        """Nobody here watches the files any more that differed: they are tried again as other unavailable ones."""
        differing = tuple(self.differing.items())
        self.differing.clear()
        for read, file in differing:
            self.lacks((read,), file.reason, at)

    def differing_of(self, files: Iterable[ReadFile]) -> JudgedFile | None:
        """The first of `files` that is not the expected one here; None if none is known not to be."""
        return self.differing.first_of(files)

    def unavailable_of(self, files: Iterable[ReadFile], at: float) -> UnavailableFile | None:
        """The first of `files` that cannot be used here; None if all can, or may be tried again."""
        if self.unavailable:
            for file in files:
                entry = self.unavailable.of(file)
                if entry is not None and at < entry.until:
                    return entry
        return None

    def refused_of(self, files: Iterable[ReadFile], at: float) -> UnavailableFile | None:
        """The first of `files` that cannot be used here even by a worker with the weights on its GPU; None if all can,
        or may be tried again."""
        if self.unavailable:
            for file in files:
                entry = self.unavailable.of(file)
                if entry is not None and entry.even_resident and at < entry.until:
                    return entry
        return None

    def has_all(self, files: Iterable[ReadFile]) -> None:
        """A run used these files: they are here."""
        found = [file for file in files if self.unavailable.remove(file)]
        if found:
            self._note_lacking()

    def try_again(self, at: float) -> None:
        """Forget unavailable files, except those that were found so within the last RETRY_SECONDS."""
        if self.unavailable.remove_if(lambda entry: entry.until - UNAVAILABLE_SECONDS + RETRY_SECONDS <= at):
            self._note_lacking()

    def _note_lacking(self) -> None:
        self.version += 1
        if self.unavailable or self.differing:
            self.lacking.add(self.node)
        else:
            self.lacking.discard(self.node)

    def learn_storage(self, bytes_per_second: float) -> None:
        """Take in a measured speed of the disk."""
        self._storage.add(bytes_per_second)
        speed = self._storage.value
        assert speed is not None, "something was measured"
        if abs(speed - self.storage_bytes_per_second) > LEAST_DIFFERENCE * speed:
            self.storage_bytes_per_second = speed
            self.version += 1

    def forget_all(self) -> None:
        """Forget all files: the machine is gone."""
        for key in list(self.files):
            self._forget(key)
        self.unavailable.clear()
        self.differing.clear()
        self._note_lacking()

    def _shrink(self, reads: Reads, unexpected_bytes: int) -> None:
        """Lower the limit: of `reads`, which are in memory now, `unexpected_bytes` were missing before. Forgets the
        least recently read files of that size, since files that were read before these are missing too."""
        just_read = {key for key, _ in reads}
        left = min(unexpected_bytes, sum(wanted_bytes for _, wanted_bytes in reads))
        for key in list(self.files):
            if left <= 0:
                break
            if key not in just_read:
                left -= self._forget(key)
        self.limit_bytes = float(self.used_bytes)

    def _forget(self, key: ComponentKey) -> int:
        gone_bytes = self.files.pop(key)
        self.incoming.discard(key)
        del self.holders[key][self.node]
        if not self.holders[key]:
            del self.holders[key]
        self.used_bytes -= gone_bytes
        self.version += 1
        return gone_bytes


class Nodes:
    """The machines that workers reported."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Node] = {}
        #: the machines that have a file in memory
        self.holders: dict[ComponentKey, dict[NodeId, None]] = {}
        #: the machines that lack a file
        self.lacking: set[NodeId] = set()

    def try_again(self, at: float) -> tuple[NodeId, ...]:
        """New work was submitted: try files again that were found unavailable some time ago. Returns the machines that
        lacked files."""
        lacking = tuple(sorted(self.lacking))
        for name in lacking:
            self.nodes[name].try_again(at)
        return lacking

    def of(self, spec: WorkerSpec | None) -> Node | None:
        """The machine of a worker; None if the worker reported none: all files are then available to it."""
        if spec is None or not spec.node:
            return None
        node = self.nodes.get(spec.node)
        if node is None:
            node = self.nodes[spec.node] = Node(spec.node, lacking=self.lacking, holders=self.holders)
            if len(self.nodes) > MOST_NODES:
                self.nodes.pop(next(iter(self.nodes))).forget_all()
        if node.reported_bytes == inf and spec.host_bytes > 0:
            node.reported_bytes = float(spec.host_bytes)
            node.limit_bytes = min(node.limit_bytes, node.reported_bytes)
        if node.storage_bytes_per_second == inf and spec.storage_bytes_per_second > 0:
            node.storage_bytes_per_second = spec.storage_bytes_per_second
        return node

    def are_missing(self, files: Iterable[ReadFile], spec: WorkerSpec | None, at: float) -> bool:
        """Return whether one of `files` is unavailable on the machine of a worker."""
        node = self.of(spec) if self.lacking else None
        return node is not None and node.unavailable_of(files, at) is not None
