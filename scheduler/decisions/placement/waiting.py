"""Decides whether a task should wait for a busy worker, and reserves that worker's time within one placement.

A busy worker can take the tasks of one line or of another, not both: time that is reserved on it counts for the lines
that are considered later in the same placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.decisions.placement.idle_workers import near
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery, is_divided
from modelpool.scheduler.decisions.queue.backlog import BacklogLine
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.placement_record import WaitEvaluation
from modelpool.scheduler.model.workers import Worker

#: busy workers, earliest end first, that are considered for one line; and holders of what it uses
MOST_BUSY = 16
_NO_HOLDERS: Mapping[Worker, None] = MappingProxyType({})


class Reservations:
    """One placement: the query, and the reservations on busy workers made so far."""

    __slots__ = ("considered", "query", "reserved", "waiting")

    def __init__(self, query: PlacementQuery) -> None:
        self.query = query
        #: seconds until a busy worker has finished what waits for it
        self.reserved: dict[WorkerId, float] = {}
        #: lines that wait for busy workers with reservations
        self.waiting: set[BacklogLine] = set()
        self.considered: list[tuple[float, float, Worker]] = []


def first_to_start(reservations: Reservations, line: BacklogLine, idle: Worker, extra_seconds: float) -> int | None:
    """Return the place in the line of the first task (of its head's priority) that the worker `idle` should finish
    sooner than busy ones, which take the tasks before it; None if they take all. Reserves what they take."""
    query = reservations.query
    if line in reservations.waiting:
        return None
    if query.workers.busy_count == 0 or (extra_seconds == 0.0 and query.workers.are_similar):
        return 0
    costs, task = query.costs, line.head
    finish_seconds = extra_seconds + costs.resident_seconds(task.spec, task.cost_class, idle)
    place, first_considered = 0, len(reservations.considered)
    for seconds, run_seconds, worker in sorted(
        _sooner(reservations, task, idle, finish_seconds), key=lambda found: found[0]
    ):
        fits = 1 if run_seconds <= 0 else 1 + int((finish_seconds - seconds) / run_seconds)
        taken = min(fits, len(line.tasks) - place)
        reservations.reserved[worker.worker_id] = seconds + (taken - 1) * run_seconds
        place += taken
        if place >= len(line.tasks):
            reservations.waiting.add(line)
            _keep_evaluation(reservations, task, idle, extra_seconds, first_considered)
            return None
    return place if line.tasks[place].priority == task.priority else None


def is_sooner_elsewhere(reservations: Reservations, task: Task, idle: Worker, extra_seconds: float) -> bool:
    """Whether a busy worker should finish this task before the idle one could. Reserves it then."""
    query = reservations.query
    if query.workers.busy_count == 0 or (extra_seconds == 0.0 and query.workers.are_similar):
        return False
    finish_seconds = extra_seconds + query.costs.resident_seconds(task.spec, task.cost_class, idle)
    first_considered = len(reservations.considered)
    found = min(_sooner(reservations, task, idle, finish_seconds), key=lambda found: found[0], default=None)
    if found is not None:
        reservations.reserved[found[2].worker_id] = found[0]
        _keep_evaluation(reservations, task, idle, extra_seconds, first_considered)
    return found is not None


def _keep_evaluation(
    reservations: Reservations, task: Task, idle: Worker, extra_seconds: float, first_considered: int
) -> None:
    """Keep, for users, what was considered for a task that waits now."""
    considered = reservations.considered[first_considered:]
    busy = tuple([(worker.worker_id, wait, extra) for wait, extra, worker in considered])
    task.evaluation = WaitEvaluation(reservations.query.at, idle.worker_id, extra_seconds, busy)


def _sooner(
    reservations: Reservations, task: Task, idle: Worker, finish_seconds: float
) -> list[tuple[float, float, Worker]]:
    """Busy workers that should finish `task` before that: seconds until then, run seconds of these, worker. If the idle
    one would divide it, one that runs it undivided need only be no later."""
    query, found = reservations.query, []
    costs, cost_class = query.costs, task.cost_class
    divided = is_divided(cost_class, idle)
    for worker in _busy(query, cost_class, finish_seconds):
        wait_seconds = reservations.reserved.get(worker.worker_id)
        if wait_seconds is None:
            wait_seconds = worker.wait_seconds(query.at)
        if wait_seconds is None or wait_seconds >= finish_seconds:
            continue
        extra_seconds = costs.extra_seconds(task.spec, cost_class, worker)
        if extra_seconds is None:
            continue
        reservations.considered.append((wait_seconds, extra_seconds, worker))
        run_seconds = costs.resident_seconds(task.spec, cost_class, worker)
        seconds = wait_seconds + extra_seconds + run_seconds
        whole_instead = divided and not is_divided(cost_class, worker)
        if seconds < finish_seconds or (whole_instead and seconds == finish_seconds):
            found.append((seconds, run_seconds, worker))
    return found


def _busy(query: PlacementQuery, cost_class: CostClass, finish_seconds: float) -> Iterable[Worker]:
    """Some of the busy workers that may be free before that: holders of what it uses and workers near its adapters,
    since others of the same class would take no less time than an idle one; if there are other classes, also the
    first to end."""
    workers, latest = query.workers, query.at + finish_seconds
    found: dict[Worker, None] = {}
    for use in cost_class.uses:
        holders = workers.holders.get(use.component, _NO_HOLDERS)
        if len(holders) <= MOST_BUSY:
            for worker in holders:
                if not worker.is_idle:
                    found[worker] = None
        else:
            first = islice(workers.busy, MOST_BUSY)
            found.update((w, None) for end, _, w in first if end < latest and w in holders)
    found.update((w, None) for w in near(query, cost_class) if not w.is_idle)
    if not workers.are_similar:
        found.update((w, None) for end, _, w in islice(workers.busy, MOST_BUSY) if end < latest)
    return found
