"""Index of usable workers: idle ones by worker class, holders of each component, busy ones by expected end.

Maintained by `scheduler.model.workers.WorkerTable`. Decides nothing, and knows no tasks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from modelpool.pool.values.specs.spec import NO_NODE, ComponentKey, NodeId, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Resident

if TYPE_CHECKING:
    from modelpool.scheduler.model.workers import Worker

#: workers of one class differ in their weights and links only: memory, device name, and the machine if that restricts
#: what they can run
WorkerClass: TypeAlias = tuple[int, str, NodeId]


#: memory sizes count as similar up to this ratio of the larger to the smaller
SIMILAR_MEMORY = 1.05


class _IndexedWorker:
    """The index keys of one worker."""

    __slots__ = ("capacity_bytes", "end", "entries", "is_idle", "node", "spec", "worker_class")

    def __init__(
        self,
        is_idle: bool,
        worker_class: WorkerClass,
        spec: WorkerSpec | None,
        node: NodeId,
        end: float | None,
        entries: Mapping[ComponentKey, Resident],
    ) -> None:
        self.is_idle = is_idle
        #: the source of `worker_class`
        self.capacity_bytes, self.spec = worker_class[0], spec
        self.worker_class = worker_class
        self.node = node
        self.end = end
        self.entries = entries


class WorkerIndex:
    """The wanted workers that are up. Attributes are for reading; `note` writes."""

    def __init__(self) -> None:
        #: by class, the one that is idle longest first
        self.idle: dict[WorkerClass, dict[Worker, None]] = {}
        #: by expected end, soonest first
        self.busy: list[tuple[float, WorkerId, Worker]] = []
        #: workers, idle and busy, with bytes of a component
        self.holders: dict[ComponentKey, dict[Worker, None]] = {}
        #: workers, idle and busy, on a named machine
        self.on_node: dict[NodeId, dict[Worker, None]] = {}
        #: machines on which some tasks cannot run: they are drained, or lack files
        self.restricted: set[NodeId] = set()
        self.idle_count = 0
        #: most memory of an idle worker; 0 if there is none
        self.largest_idle_bytes = 0
        #: workers that are up, idle and busy
        self.count = 0
        self._filed: dict[Worker, _IndexedWorker] = {}
        #: class -> number of its workers, idle and busy
        self._class_counts: dict[WorkerClass, int] = {}
        self._are_similar = True
        #: device names of the workers that are up
        self.devices: frozenset[str] = frozenset()

    @property
    def are_similar(self) -> bool:
        """Whether all have the same device and similar memory: free memory of equal cards differs by some pages."""
        return self._are_similar

    @property
    def busy_count(self) -> int:
        """Number of workers that run something."""
        return self.count - self.idle_count

    @property
    def capacities(self) -> tuple[int, ...]:
        """Distinct memory sizes of the workers that are up, ascending."""
        return tuple(sorted({worker_class[0] for worker_class in self._class_counts}))

    def idle_workers(self) -> Iterator[Worker]:
        """All idle workers, class by class."""
        for workers in self.idle.values():
            yield from workers

    def some_idle(self, most: int) -> list[Worker]:
        """Up to `most` of them, in the order of `idle_workers`."""
        found: list[Worker] = []
        for workers in self.idle.values():
            for worker in workers:
                if len(found) == most:
                    return found
                found.append(worker)
        return found

    def idle_holders(self, component: ComponentKey, most: int) -> list[Worker]:
        """Up to `most` idle workers with bytes of the component."""
        holders = self.holders.get(component)
        if not holders:
            return []
        found: list[Worker] = []
        if self.idle_count < len(holders):
            for worker in self.idle_workers():
                if worker in holders:
                    found.append(worker)
                    if len(found) == most:
                        break
            return found
        for worker in holders:
            if self._filed[worker].is_idle:
                found.append(worker)
                if len(found) == most:
                    break
        return found

    def note(self, worker: Worker, usable: bool) -> None:
        """Index the worker in its current state; remove it if it is not `usable`."""
        filed = self._filed.get(worker)
        if not usable:
            if filed is not None:
                self._unfile_state(worker, filed)
                self._uncount_class(filed.worker_class)
                self._hold(worker, filed.entries, {})
                self._leave_node(worker, filed)
                del self._filed[worker]
                self.count = len(self._filed)
            return
        spec, capacity_bytes = worker.spec, worker.capacity_bytes or 0
        is_idle, end = worker.is_idle, worker.expected_end
        if filed is None:
            worker_class = self._class_of(capacity_bytes, spec)
            node = NodeId("" if spec is None else spec.node)
            filed = self._filed[worker] = _IndexedWorker(is_idle, worker_class, spec, node, end, {})
            self.count = len(self._filed)
            if node:
                self.on_node.setdefault(node, {})[worker] = None
            self._count_class(worker_class)
            self._file_state(worker, filed)
        elif filed.capacity_bytes != capacity_bytes or filed.spec is not spec:
            self._unfile_state(worker, filed)
            self._uncount_class(filed.worker_class)
            filed.worker_class = self._class_of(capacity_bytes, spec)
            filed.capacity_bytes, filed.spec = capacity_bytes, spec
            self._count_class(filed.worker_class)
            filed.is_idle, filed.end = is_idle, end
            self._file_state(worker, filed)
        elif filed.is_idle != is_idle or filed.end != end:
            self._unfile_state(worker, filed)
            filed.is_idle, filed.end = is_idle, end
            self._file_state(worker, filed)
        if filed.entries is not worker.entries:
            self._hold(worker, filed.entries, worker.entries)
            filed.entries = worker.entries

    def restrict(self, node: NodeId, is_restricted: bool) -> None:
        """Note whether some tasks cannot run on the machine. Its workers then form classes of their own: a limited
        number of workers of each class is considered for a task, and these must not hide others."""
        if is_restricted == (node in self.restricted):
            return
        if is_restricted:
            self.restricted.add(node)
        else:
            self.restricted.discard(node)
        for worker in self.on_node.get(node, ()):
            filed = self._filed[worker]
            self._unfile_state(worker, filed)
            self._uncount_class(filed.worker_class)
            filed.worker_class = self._class_of(filed.capacity_bytes, filed.spec)
            self._count_class(filed.worker_class)
            self._file_state(worker, filed)

    def _class_of(self, capacity_bytes: int, spec: WorkerSpec | None) -> WorkerClass:
        if spec is None:
            return capacity_bytes, "", NO_NODE
        return capacity_bytes, spec.device_name, spec.node if spec.node in self.restricted else NO_NODE

    def _file_state(self, worker: Worker, filed: _IndexedWorker) -> None:
        if filed.is_idle:
            self.idle_count += 1
            workers = self.idle.get(filed.worker_class)
            if workers is None:
                workers = self.idle[filed.worker_class] = {}
                self.largest_idle_bytes = max(self.largest_idle_bytes, filed.worker_class[0])
            workers[worker] = None
        elif filed.end is not None:
            insort(self.busy, (filed.end, worker.worker_id, worker))

    def _count_class(self, worker_class: WorkerClass) -> None:
        count = self._class_counts.get(worker_class, 0)
        self._class_counts[worker_class] = count + 1
        if not count:
            self._compare_classes()

    def _uncount_class(self, worker_class: WorkerClass) -> None:
        self._class_counts[worker_class] -= 1
        if not self._class_counts[worker_class]:
            del self._class_counts[worker_class]
            self._compare_classes()

    def _compare_classes(self) -> None:
        sizes = [capacity_bytes for capacity_bytes, _, _ in self._class_counts]
        self.devices = frozenset([device for _, device, _ in self._class_counts])
        self._are_similar = len(self.devices) < 2 and max(sizes, default=0) <= SIMILAR_MEMORY * min(sizes, default=0)

    def _unfile_state(self, worker: Worker, filed: _IndexedWorker) -> None:
        if filed.is_idle:
            self.idle_count -= 1
            workers = self.idle[filed.worker_class]
            del workers[worker]
            if not workers:
                del self.idle[filed.worker_class]
                self.largest_idle_bytes = 0
                for capacity_bytes, _, _ in self.idle:
                    if capacity_bytes > self.largest_idle_bytes:
                        self.largest_idle_bytes = capacity_bytes
        elif filed.end is not None:
            del self.busy[bisect_left(self.busy, (filed.end, worker.worker_id))]

    def _hold(
        self, worker: Worker, before: Mapping[ComponentKey, Resident], after: Mapping[ComponentKey, Resident]
    ) -> None:
        for component in before:
            if component not in after:
                holders = self.holders[component]
                del holders[worker]
                if not holders:
                    del self.holders[component]
        for component in after:
            if component not in before:
                self.holders.setdefault(component, {})[worker] = None

    def _leave_node(self, worker: Worker, filed: _IndexedWorker) -> None:
        if filed.node:
            workers = self.on_node[filed.node]
            del workers[worker]
            if not workers:
                del self.on_node[filed.node]
