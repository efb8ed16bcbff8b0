"""Where to look for a worker: idle ones by sort, holders of a component, busy ones by when they should be free.

An index over the workers that may be used, kept by `scheduler.tables.workers.Fleet`. Decides nothing, and knows no
task.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from modelpool.pool.plan.residency import Resident
from modelpool.pool.specs.spec import ComponentKey, NodeId, WorkerId, WorkerSpec

if TYPE_CHECKING:
    from modelpool.scheduler.tables.workers import Worker

#: workers of one sort differ in their weights and links only: memory and device name
Sort: TypeAlias = tuple[int, str]


#: memories of one size: the larger one over the smaller
ALIKE = 1.05


class _Filed:
    """What a worker was filed under."""

    __slots__ = ("capacity_bytes", "end", "entries", "is_idle", "node", "sort", "spec")

    def __init__(
        self,
        is_idle: bool,
        sort: Sort,
        spec: WorkerSpec | None,
        node: NodeId,
        end: float | None,
        entries: Mapping[ComponentKey, Resident],
    ) -> None:
        self.is_idle = is_idle
        #: what `sort` was made from
        self.capacity_bytes, self.spec = sort[0], spec
        self.sort = sort
        self.node = node
        self.end = end
        self.entries = entries


class Whereabouts:
    """The wanted workers that are up. Attributes are for reading; `note` writes."""

    def __init__(self) -> None:
        #: by sort, the one that is idle longest first
        self.idle: dict[Sort, dict[Worker, None]] = {}
        #: by when they should be free, soonest first
        self.busy: list[tuple[float, WorkerId, Worker]] = []
        #: workers, idle and busy, with bytes of a component
        self.holders: dict[ComponentKey, dict[Worker, None]] = {}
        #: workers, idle and busy, on a machine that has a name
        self.on_node: dict[NodeId, dict[Worker, None]] = {}
        self.idle_count = 0
        #: most memory of an idle worker; 0 when there is none
        self.largest_idle_bytes = 0
        #: workers that are up, idle and busy
        self.count = 0
        self._filed: dict[Worker, _Filed] = {}
        #: sort -> workers of it, idle and busy
        self._sorts: dict[Sort, int] = {}
        self._are_alike = True

    @property
    def are_alike(self) -> bool:
        """They are of one device, and their memories differ by little: what is free on a card differs by some pages."""
        return self._are_alike

    @property
    def busy_count(self) -> int:
        """Workers that run something."""
        return self.count - self.idle_count

    @property
    def capacities(self) -> tuple[int, ...]:
        """Distinct memory sizes of the workers that are up, ascending."""
        return tuple(sorted({capacity_bytes for capacity_bytes, _ in self._sorts}))

    def idle_workers(self) -> Iterator[Worker]:
        """All of them, sort by sort."""
        for workers in self.idle.values():
            yield from workers

    def some_idle(self, most: int) -> list[Worker]:
        """So many of them, or all, as `idle_workers` has them."""
        found: list[Worker] = []
        for workers in self.idle.values():
            for worker in workers:
                if len(found) == most:
                    return found
                found.append(worker)
        return found

    def idle_holders(self, component: ComponentKey, most: int) -> list[Worker]:
        """Up to so many idle workers with bytes of the component."""
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
        """File the worker as it is now; take it out when it is not `usable`."""
        filed = self._filed.get(worker)
        if not usable:
            if filed is not None:
                self._unfile_state(worker, filed)
                self._uncount_sort(filed.sort)
                self._hold(worker, filed.entries, {})
                self._leave_node(worker, filed)
                del self._filed[worker]
                self.count = len(self._filed)
            return
        spec, capacity_bytes = worker.spec, worker.capacity_bytes or 0
        is_idle, end = worker.is_idle, worker.expected_end
        if filed is None:
            sort = (capacity_bytes, "" if spec is None else spec.device_name)
            node = NodeId("" if spec is None else spec.node)
            filed = self._filed[worker] = _Filed(is_idle, sort, spec, node, end, {})
            self.count = len(self._filed)
            if node:
                self.on_node.setdefault(node, {})[worker] = None
            self._count_sort(sort)
            self._file_state(worker, filed)
        elif filed.capacity_bytes != capacity_bytes or filed.spec is not spec:
            self._unfile_state(worker, filed)
            self._uncount_sort(filed.sort)
            filed.sort = (capacity_bytes, "" if spec is None else spec.device_name)
            filed.capacity_bytes, filed.spec = capacity_bytes, spec
            self._count_sort(filed.sort)
            filed.is_idle, filed.end = is_idle, end
            self._file_state(worker, filed)
        elif filed.is_idle != is_idle or filed.end != end:
            self._unfile_state(worker, filed)
            filed.is_idle, filed.end = is_idle, end
            self._file_state(worker, filed)
        if filed.entries is not worker.entries:
            self._hold(worker, filed.entries, worker.entries)
            filed.entries = worker.entries

    def _file_state(self, worker: Worker, filed: _Filed) -> None:
        if filed.is_idle:
            self.idle_count += 1
            workers = self.idle.get(filed.sort)
            if workers is None:
                workers = self.idle[filed.sort] = {}
                self.largest_idle_bytes = max(self.largest_idle_bytes, filed.sort[0])
            workers[worker] = None
        elif filed.end is not None:
            insort(self.busy, (filed.end, worker.worker_id, worker))

    def _count_sort(self, sort: Sort) -> None:
        count = self._sorts.get(sort, 0)
        self._sorts[sort] = count + 1
        if not count:
            self._compare_sorts()

    def _uncount_sort(self, sort: Sort) -> None:
        self._sorts[sort] -= 1
        if not self._sorts[sort]:
            del self._sorts[sort]
            self._compare_sorts()

    def _compare_sorts(self) -> None:
        sizes = [capacity_bytes for capacity_bytes, _ in self._sorts]
        few_devices = len({device for _, device in self._sorts}) < 2
        self._are_alike = few_devices and max(sizes, default=0) <= ALIKE * min(sizes, default=0)

    def _unfile_state(self, worker: Worker, filed: _Filed) -> None:
        if filed.is_idle:
            self.idle_count -= 1
            workers = self.idle[filed.sort]
            del workers[worker]
            if not workers:
                del self.idle[filed.sort]
                self.largest_idle_bytes = 0
                for capacity_bytes, _ in self.idle:
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

    def _leave_node(self, worker: Worker, filed: _Filed) -> None:
        if filed.node:
            workers = self.on_node[filed.node]
            del workers[worker]
            if not workers:
                del self.on_node[filed.node]
