"""Prefetch: which files a machine should read while its workers run, for tasks expected there next.

Rules
1. A worker that begins a run is sent the files of one later task and its followers, and no others before its next run;
   a busy worker that was sent nothing is considered again when a job is submitted with files that no machine has.
2. Followers of the run itself come first, then waiting tasks, in order: the first of these with missing files. Files in
   the memory of another machine or on another GPU are not missing: the task is expected there. LoRAs are read where
   their model is, and on one machine: in the benchmark of the calibrated workload, reading them wherever their task may
   run read one and a half times the files that were used.
3. No file is read that would evict a file of a task that comes sooner.
4. Only if disks are slower than the link (otherwise a run that reads does not wait for the disk), and only what the
   disk can begin to read before the run ends, after its earlier requests. What it will have read by then is assumed to
   be in memory, and no more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from modelpool.pool.values.specs.spec import ComponentKey, WorkerId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.eviction_hints import followers
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.messages import Command, Prefetch
from modelpool.scheduler.model.nodes import LEAST_READ_BYTES, Node, Reads
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker

#: lines of waiting tasks, in order, that are considered
MOST_LINES = 8
#: no prefetch if the disk has less time than this before the run ends: the task that needs the file reads it then,
#: possibly elsewhere
LEAST_SPARE_SECONDS = 0.5
#: busy workers, earliest end first, that are considered when a job is submitted
MOST_NOTIFIED = 4


class PrefetchNeed(NamedTuple):
    """The files that one task would read on a worker.

    shared  files that serve any patch set
    own     LoRAs of its patch sets
    """

    shared: Reads
    loras: Reads


def files_to_prefetch(
    node: Node,
    groups: Iterable[Sequence[PrefetchNeed]],
    sooner: Reads,
    here: Container[ComponentKey] = (),
    available: Container[ComponentKey] = (),
) -> Reads:
    """Return the files to prefetch on `node`: the missing files of the first group that misses any, as far as there is
    room.

    groups     tasks with their followers, soonest first
    sooner     files that are being read there now
    here       components on the GPU of the worker, in part or with other patches
    available  components on any GPU, or in the memory of any machine
    """
    files, looked_at = node.files, []
    for group in groups:
        looked_at.append(group)
        missing: list[tuple[ComponentKey, int]] = []
        for shared, loras in group:
            is_here = True
            for key, size in shared:
                if files.get(key, 0) >= size:
                    continue
                if key in here or key in files or key not in available:
                    missing.append((key, size))
                else:
                    is_here = False
            if is_here:
                missing += [
                    (k, size) for k, size in loras if files.get(k, 0) < size and (k in files or k not in available)
                ]
        if missing:
            kept = {key for key, _ in sooner}
            for earlier in looked_at:
                kept.update(key for shared, loras in earlier for key, _ in (*shared, *loras))
            return _fitting(node, tuple(dict(missing).items()), kept)
    return ()


def within(node: Node, reads: Reads, room_bytes: int) -> Reads:
    """The first of `reads`, up to `room_bytes` missing bytes."""
    arriving: list[tuple[ComponentKey, int]] = []
    for key, size in reads:
        held_bytes = node.files.get(key, 0)
        come_bytes = min(size - held_bytes, room_bytes)
        if come_bytes > 0:
            arriving.append((key, held_bytes + come_bytes))
            room_bytes -= come_bytes
    return tuple(arriving)


def _fitting(node: Node, missing: Reads, kept: Container[ComponentKey]) -> Reads:
    room_bytes = node.room_bytes(sum(size for _, size in missing), kept)
    fitting: list[tuple[ComponentKey, int]] = []
    for key, size in missing:
        room_bytes -= size - node.files.get(key, 0)
        if room_bytes < 0:
            break
        fitting.append((key, size))
    return tuple(fitting)


class PrefetchPlanner:
    """Sends prefetch commands to workers. Appends them to `out`."""

    def __init__(self, costs: Costs, demand: Demand, worker_index: WorkerIndex, out: list[Command]) -> None:
        self._costs = costs
        self._demand = demand
        self._worker_index = worker_index
        self._out = out
        #: workers that were sent one since their run began
        self._notified: set[WorkerId] = set()
        self._available = _AvailableFiles(costs, worker_index)

    def run_started(self, worker: Worker) -> None:
        """A worker began a run, and the residency after it is assumed."""
        if self._costs.nodes.nodes:
            self._notified.discard(worker.worker_id)
            self._notify(worker)

    def job_came(self) -> None:
        """A job was submitted, and all that can start has started."""
        if not self._costs.nodes.nodes or not len(self._demand.backlog):
            return
        for _, _, worker in self._worker_index.busy[:MOST_NOTIFIED]:
            if worker.worker_id not in self._notified:
                self._notify(worker)

    def _notify(self, worker: Worker) -> None:
        node = self._costs.nodes.of(worker.spec)
        if not worker.takes_tasks:
            return
        if node is None or worker.expected_end is None or node.storage_bytes_per_second >= worker.link_bytes_per_second:
            return
        spare_seconds = worker.expected_end - node.idle_from(self._costs.at)
        room_bytes = int(spare_seconds * node.storage_bytes_per_second)
        if spare_seconds < LEAST_SPARE_SECONDS or room_bytes < LEAST_READ_BYTES:
            return
        reads = files_to_prefetch(
            node, self._groups(worker), self._costs.reads(worker), worker.entries, self._available
        )
        if reads:
            arriving = within(node, reads, room_bytes)
            node.expect(arriving, self._costs.at, is_prefetch=True)
            self._notified.add(worker.worker_id)
            self._out.append(Prefetch(worker.worker_id, worker.incarnation, tuple(key for key, _ in arriving)))

    def _groups(self, worker: Worker) -> Iterable[Sequence[PrefetchNeed]]:
        for task_id in worker.task_ids:
            yield self._wanted(self._following(self._demand.tasks[task_id]), worker)
        for line in islice(self._demand.backlog.lines(worker.capacity_bytes or 0), MOST_LINES):
            yield self._wanted((line.head, *self._following(line.head)), worker)

    def _following(self, task: Task) -> Iterable[Task]:
        return followers(task, self._demand.tasks, self._demand.results.readers)

    def _wanted(self, tasks: Iterable[Task], worker: Worker) -> list[PrefetchNeed]:
        found = []
        for task in tasks:
            load = self._costs.load_estimate(task.cost_class, worker)
            if load is not None and load.reads:
                loras = task.cost_class.adapters
                if not loras:
                    found.append(PrefetchNeed(load.reads, ()))
                    continue
                shared = tuple([read for read in load.reads if read[0] not in loras])
                found.append(PrefetchNeed(shared, tuple([read for read in load.reads if read[0] in loras])))
        return found


class _AvailableFiles:
    """The components that are on a GPU, or in the memory of any machine."""

    def __init__(self, costs: Costs, worker_index: WorkerIndex) -> None:
        self._on_nodes = costs.nodes.holders
        self._holders = worker_index.holders
        self._up = worker_index.on_node

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str), f"{key} is not a component"
        return key in self._holders or not self._up.keys().isdisjoint(self._on_nodes.get(ComponentKey(key), ()))
