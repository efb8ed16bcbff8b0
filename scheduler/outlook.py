"""Which components a worker is expected to need after the run that starts now: the hint that its plan is made with.

Only components that are on the worker, or come to it now, are told: others cannot be evicted. Reads tasks and results;
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pool.spec import ComponentKey, TaskId
from scheduler.costs import Costs
from scheduler.demand import Demand
from scheduler.jobs import Task
from scheduler.whereabouts import Whereabouts
from scheduler.workers import Worker

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
    readers: Mapping[TaskId, Mapping[TaskId, None]],
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
    running = (other for other in running if other.spec.task_id in readers)
    following = (follower for other in running for follower in followers(other, tasks, readers))
    for expected in chain(followers(task, tasks, readers), waiting, following):
        if expected is not task:
            for key in expected.signature.components:
                if key in here:
                    told[key] = None
            if len(told) >= most:
                break
    return tuple(told)[:most]


def followers(
    task: Task, tasks: Mapping[TaskId, Task], readers: Mapping[TaskId, Mapping[TaskId, None]]
) -> Iterator[Task]:
    """The tasks that read its result, then those that read theirs."""
    made = [task.spec.task_id]
    left = MOST_FOLLOWERS
    for task_id in made:  # which grows meanwhile
        for reader in readers.get(task_id, ()):
            if not left:
                return
            left -= 1
            yield tasks[reader]
            made.append(reader)
