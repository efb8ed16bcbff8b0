"""The ready tasks in order: higher priority first, then by share and as submitted. Knows sizes, but no placement.

Tasks of one signature stand in one line: they cost the same to set up, so only the first of a line is ever of interest.
Lines are found in order (by their first tasks), by what is on a worker, and by the adapters that they read; those that
only a busy large worker can take do not hide what a small idle one could run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TypeVar

from modelpool.pool.plan.residency import Resident
from modelpool.pool.specs.spec import ComponentKey, WorkerId
from modelpool.scheduler.queue.sorted_sequence import Ordered
from modelpool.scheduler.queue.urgent import AT_ONCE, Hurried
from modelpool.scheduler.tables.cost_classes import LAST_RANK, Signature
from modelpool.scheduler.tables.jobs import Order, Task

_ORDER = attrgetter("order")

#: lines of one batch that are looked through for somebody else whom it passes over
MOST_OF_A_BATCH = 256

_Key = TypeVar("_Key")


class Line:
    """The ready tasks of one signature, in order; never empty while it is filed."""

    __slots__ = ("fits", "head", "order", "signature", "tasks")

    def __init__(self, task: Task) -> None:
        self.signature = task.signature
        self.tasks: Ordered[Task] = Ordered()
        self.tasks.add(task)
        #: the first task, and its order: what the line is filed under
        self.head = task
        self.order = task.order
        #: which of the known capacities it fits in, counted from the smallest; as it is filed
        self.fits = 0


class Backlog:
    """All ready tasks and nothing else, but for those that wait for one worker each (`Pinned`)."""

    def __init__(self) -> None:
        #: distinct capacities of the live workers, ascending
        self.capacities: tuple[int, ...] = ()
        #: the tasks here that go before all others of their priority, until they are taken out
        self.hurried = Hurried()
        #: tasks that wait, by what they were asked for with
        self._batches: dict[str, int] = {}
        #: the time now; a task that is filed is ready since then
        self.at = 0.0
        #: lines by the smallest known capacity that they fit in, and a last class for those that fit in none
        self._classes: list[Ordered[Line]] = [Ordered()]
        self._lines: dict[Signature, Line] = {}
        #: lines by the first thing that they use (component, then patches), by its component alone, and by the adapters
        #: that they read
        self._by_use: dict[ComponentKey, dict[str, dict[Line, None]]] = {}
        self._without_uses: dict[Line, None] = {}
        self._by_component: dict[ComponentKey, Ordered[Line]] = {}
        self._by_adapter: dict[ComponentKey, dict[Line, None]] = {}
        #: lines of the last stage
        self._finishing: Ordered[Line] = Ordered()
        #: tasks; for reading
        self.count = 0
        #: how many of them use each component; for reading
        self.wanted: dict[ComponentKey, int] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        """Every task, in order."""
        return iter(sorted((t for line in self._lines.values() for t in line.tasks), key=_ORDER))

    @property
    def line_count(self) -> int:
        """Lines of tasks."""
        return len(self._lines)

    def add(self, task: Task) -> None:
        """File a task that has become ready, at its place in the order."""
        if task.ready_at is None:
            task.ready_at = self.at
        if task.batch:
            self._batches[task.batch] = self._batches.get(task.batch, 0) + 1
        line = self._lines.get(task.signature)
        if line is None:
            line = self._lines[task.signature] = Line(task)
            self._file(line)
        elif task.order < line.order:
            self._reorder(line, task)
            line.tasks.add(task)
        else:
            line.tasks.add(task)
        if task.goes_first or task.overdue:
            self.hurried.add(task, AT_ONCE)
        elif task.hurried_by < inf:
            self.hurried.add(task, task.hurried_by)
        self.count += 1
        wanted = self.wanted
        for key in task.signature.components:
            wanted[key] = wanted.get(key, 0) + 1

    def remove(self, task: Task) -> None:
        """Take out a task; its order must be the one that it was filed with."""
        line = self._lines[task.signature]
        line.tasks.remove(task)
        head = line.tasks.head
        if head is None:
            self._unfile(line)
            del self._lines[task.signature]
        elif head is not line.head:
            self._reorder(line, head)
        self.hurried.discard(task)
        if task.batch:
            self._batches[task.batch] -= 1
            if not self._batches[task.batch]:
                del self._batches[task.batch]
        self.count -= 1
        wanted = self.wanted
        for key in task.signature.components:
            if wanted[key] > 1:
                wanted[key] -= 1
            else:
                del wanted[key]

    def start(self, task: Task, capacity_bytes: int, workers: int, limit: float) -> None:
        """Take out a task that a worker of this capacity starts, one of so many that are up. Whom it passes over is
        counted, if that waits longest of all that fit there and were not asked for together with it; who was passed
        over as often as `limit` goes before all others of its priority from then on, wherever it is filed."""
        passed = self._passed_by(task, capacity_bytes)
        if passed is not None:
            passed.passed += 1.0 / workers
            if passed.passed >= limit:
                passed.overdue = True
                self.hurried.add(passed, AT_ONCE)
        self.remove(task)

    def _passed_by(self, task: Task, capacity_bytes: int) -> Task | None:
        """Who waits longest of those that this start passes over; None when nobody does."""
        if task in self.hurried:
            return None
        oldest = self.oldest(capacity_bytes)
        if oldest is None or oldest is task or not task.batch or oldest.batch != task.batch:
            return None if oldest is task else oldest
        if self._batches[task.batch] == self.count:
            return None
        for line in islice(self.lines(capacity_bytes), MOST_OF_A_BATCH):
            if line.order >= task.order:
                return None
            if line.head.batch != task.batch:
                return line.head
        return None

    def set_capacities(self, capacities: tuple[int, ...]) -> None:
        """Live workers have these distinct capacities now."""
        if capacities == self.capacities:
            return
        self.capacities = capacities
        self._classes = [Ordered() for _ in range(len(capacities) + 1)]
        for line in sorted(self._lines.values(), key=_ORDER):
            line.fits = bisect_left(capacities, line.signature.needed_bytes)
            self._classes[line.fits].add(line)

    def oldest(self, capacity_bytes: int) -> Task | None:
        """The first task in order that fits in `capacity_bytes`, which is one of the known capacities."""
        first: Line | None = None
        for place in range(self._within(capacity_bytes)):
            line = self._classes[place].head
            if line is not None and (first is None or line.order < first.order):
                first = line
        return None if first is None else first.head

    def lines(self, capacity_bytes: int, after: Order | tuple[int, ...] | None = None) -> Iterator[Line]:
        """Every line that fits in it, in order of the first tasks; from those that do not come before `after`."""
        filled = self._filled(capacity_bytes)
        parts = [iter(lines) if after is None else lines.from_order(after) for lines in filled]
        return parts[0] if len(parts) == 1 else merge(*parts, key=_ORDER)

    def first_lines(self, capacity_bytes: int, most: int) -> Iterable[Line]:
        """The first of `lines`."""
        filled = self._filled(capacity_bytes)
        return filled[0].first(most) if len(filled) == 1 else islice(merge(*filled, key=_ORDER), most)

    @property
    def reads_adapters(self) -> bool:
        """A task here reads an adapter."""
        return bool(self._by_adapter)

    def line(self, signature: Signature) -> Line | None:
        """The line of these tasks, if any waits."""
        return self._lines.get(signature)

    def using(self, entries: Iterable[Resident]) -> list[Line]:
        """The lines that start with one of these components and patches, or with none."""
        found = list(self._without_uses) if self._without_uses else []
        by_use = self._by_use
        for entry in entries:
            by_patches = by_use.get(entry.component)
            if by_patches is not None:
                lines = by_patches.get(entry.patch_digest)
                if lines is not None:
                    found += lines
        return found

    def of_component(self, component: ComponentKey, most: int) -> list[Line]:
        """The first lines, in order, that start with this component, whatever its patches."""
        lines = self._by_component.get(component)
        return [] if lines is None else lines.first(most)

    def finishing(self, most: int) -> list[Line]:
        """The first lines, in order, of tasks that finish a job's work."""
        return self._finishing.first(most)

    def of_adapter(self, adapter: ComponentKey) -> Mapping[Line, None]:
        """The lines that read this adapter."""
        return self._by_adapter.get(adapter, {})

    def _file(self, line: Line) -> None:
        signature = line.signature
        line.fits = bisect_left(self.capacities, signature.needed_bytes)
        self._classes[line.fits].add(line)
        if signature.first_use is None:
            self._without_uses[line] = None
        else:
            component, digest = signature.first_use
            self._by_use.setdefault(component, {}).setdefault(digest, {})[line] = None
        if signature.rank == LAST_RANK:
            self._finishing.add(line)
        if signature.components:
            in_order = self._by_component.get(signature.components[0])
            if in_order is None:
                in_order = self._by_component[signature.components[0]] = Ordered()
            in_order.add(line)
        for adapter in signature.adapters:
            self._by_adapter.setdefault(adapter, {})[line] = None

    def _unfile(self, line: Line) -> None:
        self._classes[line.fits].remove(line)
        signature = line.signature
        if signature.first_use is None:
            del self._without_uses[line]
        else:
            component, digest = signature.first_use
            _drop(self._by_use[component], digest, line)
            if not self._by_use[component]:
                del self._by_use[component]
        if signature.rank == LAST_RANK:
            self._finishing.remove(line)
        if signature.components:
            lines = self._by_component[signature.components[0]]
            lines.remove(line)
            if lines.head is None:
                del self._by_component[signature.components[0]]
        for adapter in signature.adapters:
            _drop(self._by_adapter, adapter, line)

    def _reorder(self, line: Line, head: Task) -> None:
        """File the line anew: its first task is another one."""
        filed = [self._classes[line.fits]]
        if line.signature.components:
            filed.append(self._by_component[line.signature.components[0]])
        if line.signature.rank == LAST_RANK:
            filed.append(self._finishing)
        for lines in filed:
            lines.remove(line)
        line.head, line.order = head, head.order
        for lines in filed:
            lines.add(line)

    def _filled(self, capacity_bytes: int) -> list[Ordered[Line]]:
        return [lines for lines in self._classes[: self._within(capacity_bytes)] if lines.head is not None]

    def _within(self, capacity_bytes: int) -> int:
        """How many of the classes of lines fit in it."""
        known = self.capacities
        return len(known) if known and known[-1] == capacity_bytes else bisect_left(known, capacity_bytes) + 1


class Pinned:
    """Ready tasks that wait for one worker each: they ran out of memory elsewhere. Few; each worker's in order.

    They are not in the backlog, and go first on their worker: each was placed before.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, Ordered[Task]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        """Every task, by worker and then in order."""
        return (task for tasks in list(self._waiting.values()) for task in list(tasks))

    def add(self, task: Task) -> None:
        """File a ready task under the worker that it is pinned to."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        self._waiting.setdefault(task.pinned_to, Ordered()).add(task)
        self._count += 1

    def remove(self, task: Task) -> None:
        """Take out a task; its worker and order must be the ones that it was filed with."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        tasks = self._waiting[task.pinned_to]
        tasks.remove(task)
        self._count -= 1
        if not tasks:
            del self._waiting[task.pinned_to]

    def first(self, worker_id: WorkerId) -> Task | None:
        """The first task that waits for this worker."""
        tasks = self._waiting.get(worker_id)
        return tasks[0] if tasks else None


def _drop(index: dict[_Key, dict[Line, None]], key: _Key, line: Line) -> None:
    lines = index[key]
    del lines[line]
    if not lines:
        del index[key]
