"""Components that a worker is expected to need after the run that starts now: hints for eviction.

Contains only components that are on the worker or arrive with the run: others cannot be evicted. Those that known tasks
use come first, soonest first; then the others by their rate of demand. Reads tasks and results; changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from modelpool.pool.values.specs.spec import ComponentKey, TaskId
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker

#: maximum number of components in a hint
MOST_HINTS = 16
#: runs on other workers, earliest end first, with followers that are considered
MOST_RUNNING = 32
#: lines of ready tasks, in order, that are considered: of what a hint can save, 32 tasks save nearly all
#: (benchmarks/vram.py)
MOST_WAITING = 32
#: followers of one task that are considered
MOST_FOLLOWERS = 16


def hint(
    task: Task, worker: Worker, costs: Costs, demand: Demand, worker_index: WorkerIndex
) -> tuple[ComponentKey, ...]:
    """The components that the worker should keep when it evicts for `task`; empty if it need not evict."""
    return expected(task, worker, costs, demand, worker_index) if costs.makes_room(task.cost_class, worker) else ()


def with_pins(
    hints: tuple[ComponentKey, ...], worker: Worker, pins: Mapping[ComponentKey, int], worker_index: WorkerIndex
) -> tuple[ComponentKey, ...]:
    """The hints with the pinned components of the worker first, of which no more workers than required hold bytes."""
    kept = dict.fromkeys(
        key for key in worker.entries if key in pins and len(worker_index.holders.get(key, ())) <= pins[key]
    )
    return tuple({**kept, **dict.fromkeys(hints)})[:MOST_HINTS] if kept else hints


def expected(
    task: Task, worker: Worker, costs: Costs, demand: Demand, worker_index: WorkerIndex
) -> tuple[ComponentKey, ...]:
    """The components that the worker is expected to need after `task`: first those that known tasks use, then the
    others by demand rate."""
    known = needed_next(
        task,
        worker,
        (line.head for line in demand.backlog.first_lines(worker.capacity_bytes or 0, MOST_WAITING)),
        (demand.tasks[w.task_id] for _, _, w in worker_index.busy[:MOST_RUNNING] if w.task_id is not None),
        demand.tasks,
        demand.results.readers,
    )
    return (*known, *by_demand(task, worker, known, costs))[:MOST_HINTS]


def by_demand(task: Task, worker: Worker, known: Container[ComponentKey], costs: Costs) -> list[ComponentKey]:
    """The other components that are on the worker or arrive with the task, those first that cost most per second to be
    without: the rate of demand for them times the bytes that a byte of room saves on the bus. Complete ones first: a
    part of a component saves no time before the rest is there too."""
    rates, components, at = costs.rates, costs.components, costs.at
    used, entries = task.cost_class.components, worker.entries
    found: list[tuple[bool, float, ComponentKey]] = []
    for key in dict.fromkeys((*entries, *used)):
        if key not in known:
            spec, rate = components.get(key), rates.per_second(key, at)
            if rate and spec is not None:
                is_part = key not in used and entries[key].resident_bytes < spec.weight_bytes
                found.append((is_part, -rate * spec.upload_bytes / spec.weight_bytes, key))
    found.sort()
    return [key for _, _, key in found]


def needed_next(
    task: Task,
    worker: Worker,
    waiting: Iterable[Task],
    running: Iterable[Task],
    tasks: Mapping[TaskId, Task],
    readers: dict[TaskId, dict[TaskId, None]],
) -> tuple[ComponentKey, ...]:
    """Return components, soonest first, each once.

    waiting  the ready tasks that fit the worker, in order
    running  the tasks that run on other workers First the followers of `task` itself: its result is ready here, so its
             readers are preferred here. Then waiting tasks, in order. Then followers of other runs.
    """
    here = {*worker.entries, *task.cost_class.components}
    most = min(MOST_HINTS, len(here))
    hints: dict[ComponentKey, None] = {}
    is_all = _collect(hints, followers(task, tasks, readers), task, here, most)
    if is_all or _collect(hints, waiting, task, here, most):
        return tuple(hints)[:most]
    for other in running:
        if _collect(hints, followers(other, tasks, readers), task, here, most):
            break
    return tuple(hints)[:most]


def _collect(
    hints: dict[ComponentKey, None], expected: Iterable[Task], task: Task, here: Container[ComponentKey], most: int
) -> bool:
    """Add the components of these tasks that are `here`; return whether there are enough."""
    for other in expected:
        if other is not task:
            for key in other.cost_class.components:
                if key in here:
                    hints[key] = None
            if len(hints) >= most:
                return True
    return False


def followers(task: Task, tasks: Mapping[TaskId, Task], readers: dict[TaskId, dict[TaskId, None]]) -> Sequence[Task]:
    """The tasks that read its result, then those that read theirs."""
    direct = readers.get(task.spec.task_id)
    if direct is None:
        return ()
    found, levels = list[Task](), [direct]
    for those in levels:  # grows during the loop
        for reader in those:
            if len(found) == MOST_FOLLOWERS:
                return found
            found.append(tasks[reader])
            following = readers.get(reader)
            if following is not None:
                levels.append(following)
    return found
