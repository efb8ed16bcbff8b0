"""What the core believes of each machine: which files its memory holds, and how fast its disks are.

Workers of one machine share both. Files are named by the components in them, and read from the disk once; the machine
keeps them in memory until later ones need the room, the one that was not read for the longest first. What a run will
read is assumed when it is placed, and confirmed or corrected by what its worker read from disks. Knows bytes; no run,
no worker and no patch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from modelpool.pool.specs.spec import ComponentKey, NodeId, WorkerSpec
from modelpool.scheduler.tables.estimates import Estimate

#: files, and how many bytes of each are read
Reads: TypeAlias = tuple[tuple[ComponentKey, int], ...]

#: fewer bytes from disks are a library that was loaded, or a directory
LEAST_READ_BYTES = 1 << 20
#: of what was expected, so much more or less is not worth a correction
LEAST_PART = 0.1
#: a smaller difference of speed is noise, and not worth computing every prediction again
LEAST_DIFFERENCE = 0.02
#: machines that are remembered; those that are gone are forgotten when so many came after them
MOST_NODES = 4096


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run that starts was expected to read.

    storage_bytes  of `reads`, what comes from the disk
    sure           nobody else was bringing the rest at that time
    wait_seconds   until the disk had done with what it was asked for before
    done_at        when it should have done with this; 0 where nothing was to be read
    """

    reads: Reads
    storage_bytes: int
    sure: bool
    wait_seconds: float
    done_at: float = 0.0


@dataclass(slots=True, eq=False)
class Node:
    """One machine, as far as it is known."""

    node: NodeId
    #: what its memory keeps of files; infinite where nobody said
    told_bytes: float = inf
    #: the same, corrected by what runs had to read again
    limit_bytes: float = inf
    #: from its disks; infinite where nobody said: as fast as any link
    storage_bytes_per_second: float = inf
    #: bytes of files that are in memory, the one read last at the end
    files: OrderedDict[ComponentKey, int] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    #: of `files`, what somebody was to bring, and no run that read it has ended since
    coming: set[ComponentKey] = field(default_factory=set)
    #: when the disk should have done with what runs want of it
    free_at: float = 0.0
    #: grows when files come or go, or the speed is not what it was
    version: int = 0
    #: of all machines together: those that have a file in memory
    holders: dict[ComponentKey, dict[NodeId, None]] = field(default_factory=dict)
    _ahead_free_at: float = 0.0
    _storage: Estimate = field(default_factory=Estimate)

    def missing_bytes(self, reads: Reads) -> int:
        """What of `reads` comes from the disk."""
        missing = 0
        for key, wanted_bytes in reads:
            held_bytes = self.files.get(key, 0)
            if wanted_bytes > held_bytes:
                missing += wanted_bytes - held_bytes
        return missing

    def has(self, reads: Reads, at: float) -> bool:
        """All of `reads` is in memory, and not only on its way there; or comes from disks as fast as over any link."""
        if self.storage_bytes_per_second == inf:
            return True
        if self.missing_bytes(reads):
            return False
        return self.idle_from(at) <= at or self.coming.isdisjoint(key for key, _ in reads)

    def idle_from(self, at: float) -> float:
        """When the disk should have done with all that it was asked for, at the earliest `at`."""
        return max(at, self.free_at, self._ahead_free_at)

    def expect(self, reads: Reads, at: float = 0.0, is_ahead: bool = False) -> Expected:
        """These files are read from now on, after what the disk was asked for before; or ahead of their use, which lets
        runs go first. The oldest leave where they need the room."""
        missing = self.missing_bytes(reads)
        sure = self.coming.isdisjoint(key for key, _ in reads)
        wait_seconds, end = max(0.0, self.free_at - at), 0.0
        if missing:
            begin = self.idle_from(at) if is_ahead else max(at, self.free_at)
            end = begin + missing / self.storage_bytes_per_second
            if is_ahead:
                self._ahead_free_at = end
            else:
                self.free_at = end
            self._bring(reads)
            self.version += 1
            while self.used_bytes > self.limit_bytes and len(self.files) > 1:
                self._forget(next(iter(self.files)))
        else:
            for key, _ in reads:
                self.files.move_to_end(key)
        return Expected(reads, missing, sure, wait_seconds, end)

    def _bring(self, reads: Reads) -> None:
        for key, wanted_bytes in reads:
            held_bytes = self.files.get(key, 0)
            if wanted_bytes > held_bytes:
                if not held_bytes:
                    self.holders.setdefault(key, {})[self.node] = None
                self.files[key] = wanted_bytes
                self.used_bytes += wanted_bytes - held_bytes
                self.coming.add(key)
            self.files.move_to_end(key)

    def confirm(self, expected: Expected, storage_bytes: int, at: float = 0.0) -> None:
        """A run ended well that read so many bytes from disks: were they those that were expected?"""
        reads = expected.reads
        if expected.done_at > at:  # the disk is faster than it was thought to be, or had not to read
            self.free_at = max(at, self.free_at - (expected.done_at - at))
        self.coming.difference_update(key for key, _ in reads)
        noise_bytes = max(LEAST_READ_BYTES, LEAST_PART * sum(wanted_bytes for _, wanted_bytes in reads))
        if storage_bytes < expected.storage_bytes - noise_bytes:
            # They were there: the memory keeps more than it was thought to, though not more than there is of it.
            self.limit_bytes = min(self.told_bytes, self.limit_bytes + expected.storage_bytes - storage_bytes)
        elif storage_bytes > expected.storage_bytes + noise_bytes and expected.sure:
            self._shrink(reads, storage_bytes - expected.storage_bytes)

    def room_bytes(self, wanted_bytes: int, kept: Container[ComponentKey]) -> float:
        """How much can be read, of so much, before a file leaves that is among `kept` or is just being brought."""
        room_bytes = self.limit_bytes - self.used_bytes
        for key, held_bytes in self.files.items():
            if room_bytes >= wanted_bytes or key in kept or key in self.coming:
                break
            room_bytes += held_bytes
        return room_bytes

    def learn_storage(self, bytes_per_second: float) -> None:
        """The disk was this fast."""
        self._storage.add(bytes_per_second)
        speed = self._storage.value
        assert speed is not None, "something was measured"
        if abs(speed - self.storage_bytes_per_second) > LEAST_DIFFERENCE * speed:
            self.storage_bytes_per_second = speed
            self.version += 1

    def forget_all(self) -> None:
        """The machine is gone, as far as anybody knows."""
        for key in list(self.files):
            self._forget(key)

    def _shrink(self, reads: Reads, unexpected_bytes: int) -> None:
        """So many bytes of `reads`, which are in memory now, were not there before: nor was what is older than they."""
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
        self.coming.discard(key)
        del self.holders[key][self.node]
        if not self.holders[key]:
            del self.holders[key]
        self.used_bytes -= gone_bytes
        self.version += 1
        return gone_bytes


class Nodes:
    """The machines that workers said they are on."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Node] = {}
        #: the machines that have a file in memory
        self.holders: dict[ComponentKey, dict[NodeId, None]] = {}

    def of(self, spec: WorkerSpec | None) -> Node | None:
        """The machine of a worker; None for a worker that says nothing of it, to which all files are at hand."""
        if spec is None or not spec.node:
            return None
        node = self.nodes.get(spec.node)
        if node is None:
            node = self.nodes[spec.node] = Node(spec.node, holders=self.holders)
            if len(self.nodes) > MOST_NODES:
                self.nodes.pop(next(iter(self.nodes))).forget_all()
        if node.told_bytes == inf and spec.host_bytes > 0:
            node.told_bytes = float(spec.host_bytes)
            node.limit_bytes = min(node.limit_bytes, node.told_bytes)
        if node.storage_bytes_per_second == inf and spec.storage_bytes_per_second > 0:
            node.storage_bytes_per_second = spec.storage_bytes_per_second
        return node
