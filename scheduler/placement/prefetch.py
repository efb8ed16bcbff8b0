"""Which files a machine should read ahead while its workers run: those that are soon needed there and nowhere at hand.

Rules
1. A worker that begins a run is told of one task to come, with what follows from it, and of no other before its next
   run; one that runs and was told of nothing is told when a job comes in that nobody has the files for.
2. What follows from the run itself comes first, then what waits, in order: the first of these for which files are
   missing. Files that another machine has in memory, or that are on another GPU, are not missing: the task is expected
   there. LoRAs are read where their model is, and on one machine: in the benchmark of the calibrated workload, reading
   them wherever their task may run read half as many again as were used.
3. Nothing is read ahead for which a file would have to leave that a task needs which comes sooner.
4. Only where disks are slower than the link (elsewhere a run that reads does not wait for the disk), and only what the
   disk can begin with before the run ends, after all that it was asked for before. What it will have read by then is
   taken to be in memory, and no more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from modelpool.pool.specs.spec import ComponentKey, WorkerId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.eviction_hints import followers
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.messages import Command, Prefetch
from modelpool.scheduler.tables.nodes import LEAST_READ_BYTES, Node, Reads
from modelpool.scheduler.tables.worker_index import Whereabouts
from modelpool.scheduler.tables.workers import Worker

#: lines of waiting tasks, in order, that are looked at
MOST_LINES = 8
#: a disk that has less time than this before the run ends is not asked: whoever needs the file reads it then, and may
#: do so elsewhere
LEAST_SPARE_SECONDS = 0.5
#: busy workers, soonest free first, that are told when a job comes in
MOST_TOLD = 4


class Wanted(NamedTuple):
    """What one task would read on a worker.

    shared  files that serve any patch set
    own     LoRAs of its patch sets
    """

    shared: Reads
    own: Reads


def next_for(
    node: Node,
    groups: Iterable[Sequence[Wanted]],
    sooner: Reads,
    here: Container[ComponentKey] = (),
    at_hand: Container[ComponentKey] = (),
) -> Reads:
    """The files to read ahead on `node`: what is missing of the first group that misses any, as far as there is room.

    groups   tasks with what follows from them, soonest first
    sooner   what is being read there now
    here     components that are on the GPU of the worker, in part or with other patches
    at_hand  those that are on any GPU, or in the memory of any machine
    """
    files, looked_at = node.files, []
    for group in groups:
        looked_at.append(group)
        missing: list[tuple[ComponentKey, int]] = []
        for shared, own in group:
            is_here = True
            for key, size in shared:
                if files.get(key, 0) >= size:
                    continue
                if key in here or key in files or key not in at_hand:
                    missing.append((key, size))
                else:
                    is_here = False
            if is_here:
                missing += [(k, size) for k, size in own if files.get(k, 0) < size and (k in files or k not in at_hand)]
        if missing:
            kept = {key for key, _ in sooner}
            for earlier in looked_at:
                kept.update(key for shared, own in earlier for key, _ in (*shared, *own))
            return _fitting(node, tuple(dict(missing).items()), kept)
    return ()


def within(node: Node, reads: Reads, room_bytes: int) -> Reads:
    """What of `reads` comes first, when so many bytes of what is missing arrive."""
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


class ReadingAhead:
    """Tells workers what to read ahead. Appends its commands to `out`."""

    def __init__(self, costs: Costs, demand: Demand, whereabouts: Whereabouts, out: list[Command]) -> None:
        self._costs = costs
        self._demand = demand
        self._whereabouts = whereabouts
        self._out = out
        #: workers that were told of something since their run began
        self._told: set[WorkerId] = set()
        self._at_hand = _AtHand(costs, whereabouts)

    def run_started(self, worker: Worker) -> None:
        """A worker began a run, and what that leaves on it is assumed."""
        if self._costs.nodes.nodes:
            self._told.discard(worker.worker_id)
            self._tell(worker)

    def job_came(self) -> None:
        """A job came in, and all that can start has started."""
        if not self._costs.nodes.nodes or not len(self._demand.backlog):
            return
        for _, _, worker in self._whereabouts.busy[:MOST_TOLD]:
            if worker.worker_id not in self._told:
                self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        node = self._costs.nodes.of(worker.spec)
        if node is None or worker.expected_end is None or node.storage_bytes_per_second >= worker.link_bytes_per_second:
            return
        spare_seconds = worker.expected_end - node.idle_from(self._costs.at)
        room_bytes = int(spare_seconds * node.storage_bytes_per_second)
        if spare_seconds < LEAST_SPARE_SECONDS or room_bytes < LEAST_READ_BYTES:
            return
        reads = next_for(node, self._groups(worker), self._costs.reads(worker), worker.entries, self._at_hand)
        if reads:
            arriving = within(node, reads, room_bytes)
            node.expect(arriving, self._costs.at, is_ahead=True)
            self._told.add(worker.worker_id)
            self._out.append(Prefetch(worker.worker_id, worker.incarnation, tuple(key for key, _ in arriving)))

    def _groups(self, worker: Worker) -> Iterable[Sequence[Wanted]]:
        for task_id in worker.task_ids:
            yield self._wanted(self._following(self._demand.tasks[task_id]), worker)
        for line in islice(self._demand.backlog.lines(worker.capacity_bytes or 0), MOST_LINES):
            yield self._wanted((line.head, *self._following(line.head)), worker)

    def _following(self, task: Task) -> Iterable[Task]:
        return followers(task, self._demand.tasks, self._demand.results.readers)

    def _wanted(self, tasks: Iterable[Task], worker: Worker) -> list[Wanted]:
        found = []
        for task in tasks:
            setup = self._costs.setup(task.signature, worker)
            if setup is not None and setup.reads:
                loras = task.signature.adapters
                if not loras:
                    found.append(Wanted(setup.reads, ()))
                    continue
                shared = tuple([read for read in setup.reads if read[0] not in loras])
                found.append(Wanted(shared, tuple([read for read in setup.reads if read[0] in loras])))
        return found


class _AtHand:
    """The files that are on a GPU, or in the memory of any machine."""

    def __init__(self, costs: Costs, whereabouts: Whereabouts) -> None:
        self._on_nodes = costs.nodes.holders
        self._holders = whereabouts.holders
        self._up = whereabouts.on_node

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str), f"{key} is no component"
        return key in self._holders or not self._up.keys().isdisjoint(self._on_nodes.get(ComponentKey(key), ()))
