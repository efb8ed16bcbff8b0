"""Model of the disks of all machines, for files that they fetch: which machine has which, and how fast others arrive.

Three tiers below host memory (`scheduler.model.nodes`): on the machine's disk nothing has to be fetched; a file that
another machine has comes from there; any other from its source. Files leave a disk in LRU order when its bound is
reached. Fetches of a run are assumed when it is placed, and corrected by its report. Speeds are estimates until they
are measured, for each machine. Empty, and without cost, in a pool without sources.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, NodeId, RunCost, WorkerSpec
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.nodes import LEAST_DIFFERENCE, MOST_NODES, Reads

#: bytes per second before anything was measured. Assumptions: an object store over a shared 2.5 Gbit/s, and a 25 Gbit/s
#: network within a cluster at a third of its speed
SOURCE_BYTES_PER_SECOND, PEER_BYTES_PER_SECOND = 300e6, 1e9
#: smaller fetches measure latency
LEAST_FETCHED_BYTES = 1 << 20
#: a fetch counts for the speed of the tier that at least this part of its bytes came from
MOST_PART = 0.9


class NodeDisk:
    """The fetched files of one machine, least recently used first, and the speeds at which it fetches."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` is the bound of its cache; 0 is unlimited."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.files: OrderedDict[str, int] = OrderedDict()
        self.source_bytes_per_second = SOURCE_BYTES_PER_SECOND
        self.peer_bytes_per_second = PEER_BYTES_PER_SECOND
        self.source = Estimate()
        self.peer = Estimate()


class FetchedFiles:
    """The fetched files of all machines."""

    def __init__(self) -> None:
        #: the files of each component that is fetched: their key, and all their bytes
        self.sets: dict[ComponentKey, tuple[str, int]] = {}
        self.disks: dict[NodeId, NodeDisk] = {}
        #: the machines that have a file
        self.holders: dict[str, dict[NodeId, None]] = {}

    def know(self, components: Iterable[ComponentSpec]) -> None:
        """Take in which components are fetched."""
        for spec in components:
            if spec.fetch_key:
                self.sets[spec.key] = (spec.fetch_key, spec.fetch_bytes)

    def prune(self, kept: Iterable[ComponentKey]) -> None:
        """Forget components that are not in `kept`."""
        if self.sets:
            self.sets = {key: self.sets[key] for key in kept if key in self.sets}

    def seconds(self, spec: WorkerSpec, reads: Reads) -> float:
        """Seconds to fetch the files of `reads` that the machine of a worker does not have."""
        source_bytes, peer_bytes = self.missing(spec, reads)
        if not source_bytes and not peer_bytes:
            return 0.0
        disk = self.disk_of(spec)
        return source_bytes / disk.source_bytes_per_second + peer_bytes / disk.peer_bytes_per_second

    def missing(self, spec: WorkerSpec, reads: Reads) -> tuple[int, int]:
        """Bytes of `reads` that have to be fetched to the machine of a worker: from sources, and from other
        machines."""
        source_bytes = peer_bytes = 0
        disk: NodeDisk | None = None
        counted: list[str] = []
        for component, _ in reads:
            files = self.sets.get(component)
            if files is None:
                continue
            if disk is None:
                disk = self.disk_of(spec)
            key, fetch_bytes = files
            if key in disk.files or key in counted:
                continue
            counted.append(key)
            if self.holders.get(key) and disk.peer_bytes_per_second > disk.source_bytes_per_second:
                peer_bytes += fetch_bytes
            else:
                source_bytes += fetch_bytes
        return source_bytes, peer_bytes

    def expect(self, spec: WorkerSpec, reads: Reads) -> Reads:
        """Record that a run that reads these files starts on that worker: they are on its machine from now on. Return
        those that it has to fetch."""
        brought = []
        for component, size_bytes in reads:
            files = self.sets.get(component)
            if files is None:
                continue
            key, fetch_bytes = files
            disk = self.disk_of(spec)
            if key in disk.files:
                disk.files.move_to_end(key)
                continue
            brought.append((component, size_bytes))
            self._bring(spec.node, disk, key, fetch_bytes)
        return tuple(brought)

    def learn(self, spec: WorkerSpec, cost: RunCost) -> bool:
        """Learn the speeds of fetches from the report of a run. Return whether an estimate changed."""
        fetched_bytes = (cost.fetched_bytes + cost.peer_bytes) * cost.batched
        seconds = cost.fetch_seconds * cost.batched
        if fetched_bytes < LEAST_FETCHED_BYTES or seconds <= 0:
            return False
        disk, speed = self.disk_of(spec), fetched_bytes / seconds
        if cost.fetched_bytes * cost.batched >= MOST_PART * fetched_bytes:
            disk.source.add(speed)
            known, measured = disk.source_bytes_per_second, disk.source.value
            if measured is not None and abs(measured - known) > LEAST_DIFFERENCE * measured:
                disk.source_bytes_per_second = measured
                return True
        elif cost.peer_bytes * cost.batched >= MOST_PART * fetched_bytes:
            disk.peer.add(speed)
            known, measured = disk.peer_bytes_per_second, disk.peer.value
            if measured is not None and abs(measured - known) > LEAST_DIFFERENCE * measured:
                disk.peer_bytes_per_second = measured
                return True
        return False

    def forget(self, spec: WorkerSpec, reads: Reads) -> bool:
        """Forget files that a failed run should have brought. Return whether any was known."""
        disk, changed = self.disks.get(spec.node), False
        for component, _ in reads if disk is not None else ():
            files = self.sets.get(component)
            if files is not None and disk is not None and files[0] in disk.files:
                self._remove(spec.node, disk, files[0])
                changed = True
        return changed

    def disk_of(self, spec: WorkerSpec) -> NodeDisk:
        """The disk of a worker's machine; what it had when the worker started is on it."""
        disk = self.disks.get(spec.node)
        if disk is None:
            disk = self.disks[spec.node] = NodeDisk(spec.cache_bytes)
            for file in spec.cached_files:
                self._bring(spec.node, disk, file.key, file.size_bytes)
            if len(self.disks) > MOST_NODES:
                oldest = next(iter(self.disks))
                for key in tuple(self.disks[oldest].files):
                    self._remove(oldest, self.disks[oldest], key)
                del self.disks[oldest]
        return disk

    def node_gone(self, node: NodeId) -> bool:
        """Forget a machine that is gone: nothing can be fetched from it. Return whether it had files."""
        disk = self.disks.pop(node, None)
        if disk is None:
            return False
        had_files = bool(disk.files)
        for key in tuple(disk.files):
            self._remove(node, disk, key)
        return had_files

    def _bring(self, node: NodeId, disk: NodeDisk, key: str, size_bytes: int) -> None:
        disk.files[key] = size_bytes
        disk.used_bytes += size_bytes
        self.holders.setdefault(key, {})[node] = None
        while disk.limit_bytes and disk.used_bytes > disk.limit_bytes and len(disk.files) > 1:
            self._remove(node, disk, next(iter(disk.files)))

    def _remove(self, node: NodeId, disk: NodeDisk, key: str) -> None:
        disk.used_bytes -= disk.files.pop(key)
        holders = self.holders[key]
        del holders[node]
        if not holders:
            del self.holders[key]
