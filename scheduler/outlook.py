"""Which components a worker is expected to need after the run that starts now: the hint that its plan is made with.

Only components that are on the worker, or come to it now, are told: others cannot be evicted. Reads tasks and results;
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pool.spec import ComponentKey, TaskId
from scheduler.jobs import Task
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
    here = {*worker.entries, *(use.component for use in task.signature.uses)}
    most = min(MOST_TOLD, len(here))
    told: dict[ComponentKey, None] = {}
    for expected in _expected(task, waiting, running, tasks, readers):
        for use in expected.signature.uses:
            if use.component in here:
                told[use.component] = None
        if len(told) >= most:
            break
    return tuple(told)[:most]


def _expected(
    task: Task,
    waiting: Iterable[Task],
    running: Iterable[Task],
    tasks: Mapping[TaskId, Task],
    readers: Mapping[TaskId, Mapping[TaskId, None]],
) -> Iterator[Task]:
    yield from followers(task, tasks, readers)
    for other in waiting:
        if other is not task:
            yield other
    for other in running:
        if other is not task:
            yield from followers(other, tasks, readers)


def followers(
    task: Task, tasks: Mapping[TaskId, Task], readers: Mapping[TaskId, Mapping[TaskId, None]]
) -> Iterator[Task]:
    """The tasks that read its result, then those that read theirs."""
    front = [task.spec.task_id]
    left = MOST_FOLLOWERS
    while front:
        following = [reader for made in front for reader in readers.get(made, ())][:left]
        left -= len(following)
        for reader in following:
            yield tasks[reader]
        front = following
