"""Which components a worker is expected to need after the run that starts now: the hint that its plan is made with.

Only components that are on the worker, or come to it now, are told: others cannot be evicted. Reads tasks and results;
changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from modelpool.pool.specs.spec import ComponentKey, TaskId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.worker_index import Whereabouts
from modelpool.scheduler.tables.workers import Worker

#: components that are told, at most
MOST_TOLD = 16
#: runs elsewhere, the first to end first, whose followers are looked at
MOST_RUNNING = 32
#: lines of ready tasks, in order, that are looked at: of what a hint can save, 32 tasks save nearly all
#: (benchmarks/vram.py)
MOST_WAITING = 32
#: tasks that follow from one, at most, that are looked at
MOST_FOLLOWERS = 16


def hint(
    task: Task, worker: Worker, costs: Costs, demand: Demand, whereabouts: Whereabouts
) -> tuple[ComponentKey, ...]:
    """What the worker is to consider when it makes room for `task`; nothing where it need not."""
    return expected(task, worker, demand, whereabouts) if costs.makes_room(task.signature, worker) else ()


def expected(task: Task, worker: Worker, demand: Demand, whereabouts: Whereabouts) -> tuple[ComponentKey, ...]:
    """What the worker should need after `task`."""
    return needed_next(
        task,
        worker,
        (line.head for line in demand.backlog.first_lines(worker.capacity_bytes or 0, MOST_WAITING)),
        (demand.tasks[w.task_id] for _, _, w in whereabouts.busy[:MOST_RUNNING] if w.task_id is not None),
        demand.tasks,
        demand.results.readers,
    )


def needed_next(
    task: Task,
    worker: Worker,
    waiting: Iterable[Task],
    running: Iterable[Task],
    tasks: Mapping[TaskId, Task],
    readers: dict[TaskId, dict[TaskId, None]],
) -> tuple[ComponentKey, ...]:
    """Components, soonest first, each once.

    waiting  the ready tasks that fit the worker, in order
    running  what runs elsewhere
    First what follows from `task` itself: its result is ready here, and what reads it is preferred. Then what waits, in
    order. Then what follows from other runs.
    """
    here = {*worker.entries, *task.signature.components}
    most = min(MOST_TOLD, len(here))
    told: dict[ComponentKey, None] = {}
    is_all = _are_told(told, followers(task, tasks, readers), task, here, most)
    if is_all or _are_told(told, waiting, task, here, most):
        return tuple(told)[:most]
    for other in running:
        if _are_told(told, followers(other, tasks, readers), task, here, most):
            break
    return tuple(told)[:most]


def _are_told(
    told: dict[ComponentKey, None], expected: Iterable[Task], task: Task, here: Container[ComponentKey], most: int
) -> bool:
    """Note what these tasks use of what is `here`, until there is as much as is told."""
    for other in expected:
        if other is not task:
            for key in other.signature.components:
                if key in here:
                    told[key] = None
            if len(told) >= most:
                return True
    return False


def followers(task: Task, tasks: Mapping[TaskId, Task], readers: dict[TaskId, dict[TaskId, None]]) -> Sequence[Task]:
    """The tasks that read its result, then those that read theirs."""
    direct = readers.get(task.spec.task_id)
    if direct is None:
        return ()
    found, levels = list[Task](), [direct]
    for those in levels:  # which grow meanwhile
        for reader in those:
            if len(found) == MOST_FOLLOWERS:
                return found
            found.append(tasks[reader])
            following = readers.get(reader)
            if following is not None:
                levels.append(following)
    return found
