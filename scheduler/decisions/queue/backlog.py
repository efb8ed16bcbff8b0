"""The ready tasks in order: higher priority first, then by share and order of submission. Knows sizes, no placement.

Tasks of one cost class form one line: they cost the same to load, so only the first of a line matters. Lines are found
in order (of their first tasks), by the content of a worker, and by the adapters that they read; lines that only a busy
large worker can run do not hide what a small idle one could run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TypeVar

from modelpool.pool.values.specs.spec import ComponentKey, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.decisions.queue.sorted_sequence import SortedSequence
from modelpool.scheduler.decisions.queue.urgent import AT_ONCE, UrgentTasks
from modelpool.scheduler.model.cost_classes import LAST_RANK, CostClass
from modelpool.scheduler.model.jobs import Order, Task

_ORDER = attrgetter("order")

#: lines of one batch that are searched for a task of another batch that is passed over
MOST_OF_A_BATCH = 256

_Key = TypeVar("_Key")


class BacklogLine:
    """The ready tasks of one cost class, in order; never empty while it is in the backlog."""

    __slots__ = ("cost_class", "fits", "head", "order", "tasks")

    def __init__(self, task: Task) -> None:
        self.cost_class = task.cost_class
        self.tasks: SortedSequence[Task] = SortedSequence()
        self.tasks.add(task)
        #: the first task, and its order: the sort key of the line
        self.head = task
        self.order = task.order
        #: index of the smallest known capacity that it fits in, when it was inserted
        self.fits = 0


class Backlog:
    """All ready tasks, except those that wait for one worker each (`Pinned`)."""

    def __init__(self) -> None:
        #: distinct capacities of the live workers, ascending
        self.capacities: tuple[int, ...] = ()
        #: the tasks that go before all others of their priority, until they are removed
        self.urgent = UrgentTasks()
        #: waiting tasks, by the batch that they were submitted with
        self._batches: dict[str, int] = {}
        #: the current time; a task that is added is ready since then
        self.at = 0.0
        #: lines by the smallest known capacity that they fit in, and a last class for those that fit in none
        self._classes: list[SortedSequence[BacklogLine]] = [SortedSequence()]
        self._lines: dict[CostClass, BacklogLine] = {}
        #: lines by the first component that they use (with patches), by that component alone, and by the adapters that
        #: they read
        self._by_use: dict[ComponentKey, dict[str, dict[BacklogLine, None]]] = {}
        self._without_uses: dict[BacklogLine, None] = {}
        self._by_component: dict[ComponentKey, SortedSequence[BacklogLine]] = {}
        self._by_adapter: dict[ComponentKey, dict[BacklogLine, None]] = {}
        #: lines of the last stage
        self._finishing: SortedSequence[BacklogLine] = SortedSequence()
        #: number of tasks; for reading
        self.count = 0
        #: ready tasks that never run on one worker, in order. They are in no line, and not counted
        self.shared_only: SortedSequence[Task] = SortedSequence()
        #: number of tasks that use each component; for reading
        self.wanted: dict[ComponentKey, int] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        """Every task, in order."""
        return iter(sorted((t for line in self._lines.values() for t in line.tasks), key=_ORDER))

    @property
    def line_count(self) -> int:
        """Number of lines."""
        return len(self._lines)

    def add(self, task: Task) -> None:
        """Insert a task that has become ready, at its place in the order."""
        if task.ready_at is None:
            task.ready_at = self.at
        if task.degrees[0] > 1:
            self.shared_only.add(task)
            return
        if task.batch:
            self._batches[task.batch] = self._batches.get(task.batch, 0) + 1
        line = self._lines.get(task.cost_class)
        if line is None:
            line = self._lines[task.cost_class] = BacklogLine(task)
            self._file(line)
        elif task.order < line.order:
            self._reorder(line, task)
            line.tasks.add(task)
        else:
            line.tasks.add(task)
        if task.goes_first or task.overdue:
            self.urgent.add(task, AT_ONCE)
        elif task.urgent_by < inf:
            self.urgent.add(task, task.urgent_by)
        self.count += 1
        wanted = self.wanted
        for key in task.cost_class.components:
            wanted[key] = wanted.get(key, 0) + 1

    def remove(self, task: Task) -> None:
        """Remove a task; its order must be unchanged since it was added."""
        if task.degrees[0] > 1:
            self.shared_only.remove(task)
            return
        line = self._lines[task.cost_class]
        line.tasks.remove(task)
        head = line.tasks.head
        if head is None:
            self._unfile(line)
            del self._lines[task.cost_class]
        elif head is not line.head:
            self._reorder(line, head)
        self.urgent.discard(task)
        if task.batch:
            self._batches[task.batch] -= 1
            if not self._batches[task.batch]:
                del self._batches[task.batch]
        self.count -= 1
        wanted = self.wanted
        for key in task.cost_class.components:
            if wanted[key] > 1:
                wanted[key] -= 1
            else:
                del wanted[key]

    def start(self, task: Task, capacity_bytes: int, workers: float, limit: float) -> None:
        """Remove a task that starts on a worker of this capacity, one of `workers` that are up (infinity counts
        nothing). Count the longest waiting task that it passes over, if this task waits longest of all that fit there
        and belongs to another batch. A task that was passed over `limit` times goes before all others of its priority
        from then on."""
        passed = None if task.degrees[0] > 1 else self.passed_by(task, capacity_bytes)
        if passed is not None:
            passed.passed += 1.0 / workers
            if passed.passed >= limit:
                passed.overdue = True
                self.urgent.add(passed, AT_ONCE)
        self.remove(task)

    def passed_by(self, task: Task, capacity_bytes: int) -> Task | None:
        """The task that waits longest of those that this start passes over; None if there is none."""
        if task in self.urgent:
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
        """Set the distinct capacities of the live workers."""
        if capacities == self.capacities:
            return
        self.capacities = capacities
        self._classes = [SortedSequence() for _ in range(len(capacities) + 1)]
        for line in sorted(self._lines.values(), key=_ORDER):
            line.fits = bisect_left(capacities, line.cost_class.needed_bytes)
            self._classes[line.fits].add(line)

    def oldest(self, capacity_bytes: int) -> Task | None:
        """The first task in order that fits in `capacity_bytes`, which must be one of the known capacities."""
        first: BacklogLine | None = None
        for place in range(self._within(capacity_bytes)):
            line = self._classes[place].head
            if line is not None and (first is None or line.order < first.order):
                first = line
        return None if first is None else first.head

    def lines(self, capacity_bytes: int, after: Order | tuple[int, ...] | None = None) -> Iterator[BacklogLine]:
        """Every line that fits in it, in order of the first tasks; from those that do not come before `after`."""
        filled = self._filled(capacity_bytes)
        parts = [iter(lines) if after is None else lines.from_order(after) for lines in filled]
        return parts[0] if len(parts) == 1 else merge(*parts, key=_ORDER)

    def first_lines(self, capacity_bytes: int, most: int) -> Iterable[BacklogLine]:
        """The first of `lines`."""
        filled = self._filled(capacity_bytes)
        return filled[0].first(most) if len(filled) == 1 else islice(merge(*filled, key=_ORDER), most)

    @property
    def reads_adapters(self) -> bool:
        """Whether a task here reads an adapter."""
        return bool(self._by_adapter)

    def before(self, order: Order) -> Iterator[tuple[BacklogLine, int]]:
        """The lines with tasks before this place in the order, each with their number."""
        return ((line, line.tasks.place_of(order)) for line in self._lines.values() if line.order < order)

    def line(self, cost_class: CostClass) -> BacklogLine | None:
        """The line of this cost class, if any task waits."""
        return self._lines.get(cost_class)

    def using(self, entries: Iterable[Resident]) -> list[BacklogLine]:
        """The lines that first use one of these components with its patches, or that use none."""
        found = list(self._without_uses) if self._without_uses else []
        by_use = self._by_use
        for entry in entries:
            by_patches = by_use.get(entry.component)
            if by_patches is not None:
                lines = by_patches.get(entry.patch_digest)
                if lines is not None:
                    found += lines
        return found

    def of_component(self, component: ComponentKey, most: int) -> list[BacklogLine]:
        """The first lines, in order, that first use this component, with any patches."""
        lines = self._by_component.get(component)
        return [] if lines is None else lines.first(most)

    def finishing(self, most: int) -> list[BacklogLine]:
        """The first lines, in order, of tasks that finish a job's work."""
        return self._finishing.first(most)

    def of_adapter(self, adapter: ComponentKey) -> Mapping[BacklogLine, None]:
        """The lines that read this adapter."""
        return self._by_adapter.get(adapter, {})

    def _file(self, line: BacklogLine) -> None:
        cost_class = line.cost_class
        line.fits = bisect_left(self.capacities, cost_class.needed_bytes)
        self._classes[line.fits].add(line)
        if cost_class.first_use is None:
            self._without_uses[line] = None
        else:
            component, digest = cost_class.first_use
            self._by_use.setdefault(component, {}).setdefault(digest, {})[line] = None
        if cost_class.rank == LAST_RANK:
            self._finishing.add(line)
        if cost_class.components:
            in_order = self._by_component.get(cost_class.components[0])
            if in_order is None:
                in_order = self._by_component[cost_class.components[0]] = SortedSequence()
            in_order.add(line)
        for adapter in cost_class.adapters:
            self._by_adapter.setdefault(adapter, {})[line] = None

    def _unfile(self, line: BacklogLine) -> None:
        self._classes[line.fits].remove(line)
        cost_class = line.cost_class
        if cost_class.first_use is None:
            del self._without_uses[line]
        else:
            component, digest = cost_class.first_use
            _drop(self._by_use[component], digest, line)
            if not self._by_use[component]:
                del self._by_use[component]
        if cost_class.rank == LAST_RANK:
            self._finishing.remove(line)
        if cost_class.components:
            lines = self._by_component[cost_class.components[0]]
            lines.remove(line)
            if lines.head is None:
                del self._by_component[cost_class.components[0]]
        for adapter in cost_class.adapters:
            _drop(self._by_adapter, adapter, line)

    def _reorder(self, line: BacklogLine, head: Task) -> None:
        """Sort the line again: its first task changed."""
        filed, order = [self._classes[line.fits]], head.order
        if line.cost_class.components:
            filed.append(self._by_component[line.cost_class.components[0]])
        if line.cost_class.rank == LAST_RANK:
            filed.append(self._finishing)
        is_later = line.order < order  # then a line that stays the first one keeps its place
        moved = [lines for lines in filed if not (is_later and lines.head is line and lines.raise_head(order))]
        for lines in moved:
            lines.remove(line)
        line.head, line.order = head, order
        for lines in moved:
            lines.add(line)

    def _filled(self, capacity_bytes: int) -> list[SortedSequence[BacklogLine]]:
        return [lines for lines in self._classes[: self._within(capacity_bytes)] if lines.head is not None]

    def _within(self, capacity_bytes: int) -> int:
        """Number of classes with lines that fit in it."""
        known = self.capacities
        return len(known) if known and known[-1] == capacity_bytes else bisect_left(known, capacity_bytes) + 1


class Pinned:
    """Ready tasks that wait for one worker each: they ran out of memory elsewhere. Few; ordered per worker.

    They are not in the backlog, and go first on their worker: each was placed before.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, SortedSequence[Task]] = {}
        #: number of tasks; for reading
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        """Every task, by worker and then in order."""
        return (task for tasks in list(self._waiting.values()) for task in list(tasks))

    def add(self, task: Task) -> None:
        """Insert a ready task under the worker that it is pinned to."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        self._waiting.setdefault(task.pinned_to, SortedSequence()).add(task)
        self.count += 1

    def remove(self, task: Task) -> None:
        """Remove a task; its worker and order must be unchanged since it was added."""
        assert task.pinned_to is not None, f"{task.name} waits for no worker"
        tasks = self._waiting[task.pinned_to]
        tasks.remove(task)
        self.count -= 1
        if not tasks:
            del self._waiting[task.pinned_to]

    def first(self, worker_id: WorkerId) -> Task | None:
        """The first task that waits for this worker."""
        tasks = self._waiting.get(worker_id)
        return tasks[0] if tasks else None


def _drop(index: dict[_Key, dict[BacklogLine, None]], key: _Key, line: BacklogLine) -> None:
    lines = index[key]
    del lines[line]
    if not lines:
        del index[key]
