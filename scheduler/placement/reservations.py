"""What busy workers would take sooner than an idle one: whether a task should wait. Changes nothing but its own notes.

A busy worker can take one line's tasks or another's, not both: what it was promised in one placement counts for the
lines that are asked about later in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType

from modelpool.pool.specs.spec import WorkerId
from modelpool.scheduler.placement.idle_workers import near
from modelpool.scheduler.placement.rules import Question, is_divided
from modelpool.scheduler.queue.backlog import Line
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.workers import Worker

#: busy workers, soonest free first, that one line is held against; and holders of what it uses
MOST_BUSY = 16
_NOBODY: Mapping[Worker, None] = MappingProxyType({})


class Look:
    """One placement: the question, and what busy workers were promised on the way."""

    __slots__ = ("promised", "question", "seen", "waiting")

    def __init__(self, question: Question) -> None:
        self.question = question
        #: seconds until a busy worker is free of what waits for it
        self.promised: dict[WorkerId, float] = {}
        #: lines that wait for busy workers, to which these were promised
        self.waiting: set[Line] = set()
        self.seen: list[tuple[float, float, Worker]] = []


def first_for_idle(look: Look, line: Line, idle: Worker, extra_seconds: float) -> int | None:
    """The place in the line of the first task (of its head's priority) that the worker `idle` should finish sooner than
    busy ones, which take those before it; None when they take all. What they take is promised."""
    question = look.question
    if line in look.waiting:
        return None
    if question.workers.busy_count == 0 or (extra_seconds == 0.0 and question.workers.are_alike):
        return 0
    costs, task = question.costs, line.head
    finish_seconds = extra_seconds + costs.resident_seconds(task.spec, task.signature, idle)
    place = 0
    for seconds, run_seconds, worker in sorted(_sooner(look, task, idle, finish_seconds), key=lambda found: found[0]):
        fits = 1 if run_seconds <= 0 else 1 + int((finish_seconds - seconds) / run_seconds)
        taken = min(fits, len(line.tasks) - place)
        look.promised[worker.worker_id] = seconds + (taken - 1) * run_seconds
        place += taken
        if place >= len(line.tasks):
            look.waiting.add(line)
            return None
    return place if line.tasks[place].priority == task.priority else None


def is_sooner_elsewhere(look: Look, task: Task, idle: Worker, extra_seconds: float) -> bool:
    """A busy worker should have finished this one task before the idle one could. It is promised that then."""
    question = look.question
    if question.workers.busy_count == 0 or (extra_seconds == 0.0 and question.workers.are_alike):
        return False
    finish_seconds = extra_seconds + question.costs.resident_seconds(task.spec, task.signature, idle)
    found = min(_sooner(look, task, idle, finish_seconds), key=lambda found: found[0], default=None)
    if found is not None:
        look.promised[found[2].worker_id] = found[0]
    return found is not None


def _sooner(look: Look, task: Task, idle: Worker, finish_seconds: float) -> list[tuple[float, float, Worker]]:
    """Busy workers that should have finished `task` before that: in how many seconds, of which how many it runs. Where
    the idle one would run it in parts, one that runs it whole need only be no later."""
    question, found = look.question, []
    costs, signature = question.costs, task.signature
    divided = is_divided(signature, idle)
    for worker in _busy(question, signature, finish_seconds):
        wait_seconds = look.promised.get(worker.worker_id)
        if wait_seconds is None:
            wait_seconds = worker.wait_seconds(question.at)
        if wait_seconds is None or wait_seconds >= finish_seconds:
            continue
        extra_seconds = costs.extra_seconds(task.spec, signature, worker)
        if extra_seconds is None:
            continue
        look.seen.append((wait_seconds, extra_seconds, worker))
        run_seconds = costs.resident_seconds(task.spec, signature, worker)
        seconds = wait_seconds + extra_seconds + run_seconds
        whole_instead = divided and not is_divided(signature, worker)
        if seconds < finish_seconds or (whole_instead and seconds == finish_seconds):
            found.append((seconds, run_seconds, worker))
    return found


def _busy(question: Question, signature: Signature, finish_seconds: float) -> Iterable[Worker]:
    """Busy workers that may be free before that, some of them: those that hold what it uses or are near its adapters,
    since on others of the same sort it would take no less than on an idle one; where there are other sorts, also the
    first of all."""
    workers, latest = question.workers, question.at + finish_seconds
    found: dict[Worker, None] = {}
    for use in signature.uses:
        holders = workers.holders.get(use.component, _NOBODY)
        if len(holders) <= MOST_BUSY:
            for worker in holders:
                if not worker.is_idle:
                    found[worker] = None
        else:
            first = islice(workers.busy, MOST_BUSY)
            found.update((w, None) for end, _, w in first if end < latest and w in holders)
    found.update((w, None) for w in near(question, signature) if not w.is_idle)
    if not workers.are_alike:
        found.update((w, None) for end, _, w in islice(workers.busy, MOST_BUSY) if end < latest)
    return found
