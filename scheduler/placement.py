"""Which ready task starts next, and on which idle worker. Functions of what they are shown; they change nothing.

`PLACEMENTS` are interchangeable: ours, and plain ones to compare it with. Each is asked again after every start, until
it returns None.

Rules of `soonest`
1. A higher priority is looked at first; within one, tasks that were passed over as often as the limit allows, in order.
2. Then what costs least beside the run itself (upload, patches, streaming), then the later stage, then as submitted.
3. A task may wait for a busy worker that should finish it sooner than any idle one, counting the tasks that wait for
   that worker already. One that was passed over too often does not wait, and none waits for a run of unknown length.
4. When no worker is busy, something starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

from pool.spec import WorkerId
from scheduler.backlog import Backlog
from scheduler.config import SchedulerConfig
from scheduler.costs import Costs, Signature
from scheduler.jobs import Task
from scheduler.why import Candidate, Rule, Why
from scheduler.workers import Worker


@dataclass(slots=True)
class Question:
    """What a placement is shown. `idle` is not empty; the backlog is read through its first `config.window` tasks."""

    at: float
    backlog: Backlog
    idle: Sequence[Worker]
    busy: Sequence[Worker]
    costs: Costs
    config: SchedulerConfig

    @property
    def largest_bytes(self) -> int:
        """Most memory of an idle worker."""
        return max(w.capacity_bytes or 0 for w in self.idle)

    def ready(self) -> list[Task]:
        """The first tasks in order that fit an idle worker."""
        return self.backlog.window(self.config.window, self.largest_bytes)


@dataclass(slots=True)
class Choice:
    """Start `task` on `worker`.

    seconds  until its result should be there
    why      what the choice was made of
    """

    task: Task
    worker: Worker
    seconds: float
    why: Why


Placement: TypeAlias = Callable[[Question], Choice | None]


def soonest(question: Question) -> Choice | None:
    """The start that costs the queue least now; None when every ready task is better off waiting for a busy worker."""
    choice = _costs_nothing(question)
    if choice is not None:
        return choice
    promised: dict[WorkerId, float] = {}  # seconds until a busy worker is free of what waits for it
    for _, equals in groupby(question.ready(), attrgetter("priority")):
        choice = _soonest_of_equals(question, list(equals), promised)
        if choice is not None:
            return choice
    return None


def arrival_order(question: Question) -> Choice | None:
    """The first ready task, on the worker that is idle longest. Blind to what is resident: a baseline."""
    workers = sorted(question.idle, key=lambda w: (w.idle_since, w.worker_id))
    return _first_fit(question, workers, "next in order, on the worker that is idle longest")


def least_loaded(question: Question) -> Choice | None:
    """The first ready task, on the idle worker with fewest runs so far: a baseline."""
    workers = sorted(question.idle, key=lambda w: (w.totals.runs, w.worker_id))
    return _first_fit(question, workers, "next in order, on the worker with fewest runs")


PLACEMENTS: Mapping[str, Placement] = {
    "soonest": soonest,
    "arrival_order": arrival_order,
    "least_loaded": least_loaded,
}


def _costs_nothing(question: Question) -> Choice | None:
    """What rules 1 and 2 choose when that is a task whose weights are all there. A shortcut: it finds nothing that
    `_soonest_of_equals` would not find, but looks at a few signatures only."""
    ends = question.backlog.ends(question.config.window, question.largest_bytes)
    if ends is None:
        return None
    first, last = ends
    if any(task.priority == first.priority for task in question.backlog.overdue):
        return None
    best: tuple[tuple[int, tuple[int, int]], Task, list[Worker]] | None = None
    for worker in question.idle:
        for task in question.backlog.first_using(worker.entries.values()):
            rank = (-task.signature.rank, task.number)
            if task.priority != first.priority or task.order > last.order or (best is not None and rank > best[0]):
                continue
            if question.costs.extra_seconds(task.spec, task.signature, worker) != 0.0:
                continue
            if best is not None and task is best[1]:
                best[2].append(worker)
            else:
                best = (rank, task, [worker])
    if best is None:
        return None
    _, task, workers = best
    return choice_of(question, task, _least_evicting(question.costs, task.signature, workers), Rule.RESIDENT)


def _soonest_of_equals(question: Question, tasks: Sequence[Task], promised: dict[WorkerId, float]) -> Choice | None:
    """`soonest` among tasks of one priority; adds to `promised` what it leaves to busy workers."""
    for task in tasks if question.backlog.overdue else ():
        if (
            task.passed >= question.config.limit_of(task.spec.stage)
            and (best := _best_idle(question, task)) is not None
        ):
            return choice_of(question, task, best[0], Rule.WAITED, f"passed over {task.passed} times, so it goes first")
    ranked: list[tuple[float, int, tuple[int, int], Task, Worker]] = []
    for task in {task.signature: task for task in reversed(tasks)}.values():  # the first of each signature
        best = _best_idle(question, task)
        if best is not None:
            ranked.append((best[1], -task.signature.rank, task.number, task, best[0]))
    heapify(ranked)  # numbers are unique: what stands behind them is never compared
    while ranked:
        extra_seconds, _, _, first, worker = heappop(ranked)
        if extra_seconds == 0.0 or not question.busy:
            return choice_of(question, first, worker, Rule.CHEAPEST)
        for task in tasks:
            if task.signature is not first.signature:
                continue
            finish_seconds = extra_seconds + question.costs.resident_seconds(task.spec, task.signature, worker)
            better = _sooner_elsewhere(question, task, worker, finish_seconds, promised)
            if better is None:
                return choice_of(question, task, worker, Rule.CHEAPEST)
            promised[better[0].worker_id] = better[1]
    return None


def _best_idle(question: Question, task: Task) -> tuple[Worker, float] | None:
    """The idle worker with least extra seconds, then one that runs it whole, then fewest evicted bytes, then by name;
    None when it fits on none."""
    costs, idle, spec, signature = question.costs, question.idle, task.spec, task.signature
    if len(idle) == 1:
        seconds = costs.extra_seconds(spec, signature, idle[0])
        return None if seconds is None else (idle[0], seconds)
    fits = [(seconds, w) for w in idle if (seconds := costs.extra_seconds(spec, signature, w)) is not None]
    if not fits:
        return None
    least_seconds = min(seconds for seconds, _ in fits)
    return _least_evicting(costs, signature, [w for seconds, w in fits if seconds == least_seconds]), least_seconds


def _least_evicting(costs: Costs, signature: Signature, workers: Sequence[Worker]) -> Worker:
    if len(workers) == 1:
        return workers[0]
    return min(workers, key=lambda w: (_divided(signature, w), _evicted_bytes(costs, signature, w), w.worker_id))


def _divided(signature: Signature, worker: Worker) -> bool:
    """The worker would run it in parts."""
    if not signature.pattern.divisions:
        return False
    return signature.way(worker.capacity_bytes or 0) in signature.pattern.divisions


def _evicted_bytes(costs: Costs, signature: Signature, worker: Worker) -> int:
    setup = costs.setup(signature, worker)
    return 0 if setup is None else setup.evicted_bytes(worker)


def _sooner_elsewhere(
    question: Question, task: Task, idle: Worker, finish_seconds: float, promised: Mapping[WorkerId, float]
) -> tuple[Worker, float] | None:
    """The busy worker that should have finished `task` before `finish_seconds` from now, and when; the soonest. That
    is when the worker `idle` should have; where that one would run it in parts, one that runs it whole need only be no
    later."""
    costs, divided = question.costs, _divided(task.signature, idle)
    best: tuple[Worker, float] | None = None
    for worker in question.busy:
        free_seconds = promised.get(worker.worker_id)
        if free_seconds is None:
            free_seconds = worker.wait_seconds(question.at)
        if free_seconds is None or free_seconds >= finish_seconds:
            continue
        extra_seconds = costs.extra_seconds(task.spec, task.signature, worker)
        if extra_seconds is None:
            continue
        seconds = free_seconds + extra_seconds + costs.resident_seconds(task.spec, task.signature, worker)
        whole_instead = divided and not _divided(task.signature, worker)
        if seconds < finish_seconds or (whole_instead and seconds == finish_seconds):
            best, finish_seconds, divided = (worker, seconds), seconds, divided and not whole_instead
    return best


def _first_fit(question: Question, workers: Sequence[Worker], reason: str) -> Choice | None:
    for task in question.ready():
        for worker in workers:
            if question.costs.extra_seconds(task.spec, task.signature, worker) is not None:
                return choice_of(question, task, worker, Rule.IN_ORDER, reason)
    return None


def choice_of(question: Question, task: Task, worker: Worker, rule: Rule, note: str = "") -> Choice:
    """The start of `task` on `worker`, on which it fits, with what it was made of."""
    costs = question.costs
    extra_seconds = costs.extra_seconds(task.spec, task.signature, worker)
    setup = costs.setup(task.signature, worker)
    assert extra_seconds is not None, f"{task.name} does not fit on {worker.worker_id}"
    assert setup is not None, f"{task.name} does not fit on {worker.worker_id}"
    run_seconds = costs.resident_seconds(task.spec, task.signature, worker)
    why = Why(
        rule=rule,
        chosen=Candidate(worker.worker_id, 0.0, extra_seconds, run_seconds),
        idle=len(question.idle),
        busy=len(question.busy),
        upload_bytes=setup.upload_bytes,
        streamed_bytes=setup.streamed_bytes,
        switches=setup.switches,
        slowdown=setup.way.slowdown if _divided(task.signature, worker) else 1.0,
        passed=task.passed,
        note=note,
    )
    return Choice(task, worker, extra_seconds + run_seconds, why)
