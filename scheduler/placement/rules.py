"""Which ready task starts next, and on which idle worker: the question, the answer, and the rules to choose from.

Placements are interchangeable: ours (`scheduler.placement.expected_completion`), and plain ones to compare it with.
Each is asked again after every start, until it returns None. They change nothing. `scheduler.placement.registry` has
them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.queue.backlog import Backlog
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.placement_record import Candidate, Rule, Why
from modelpool.scheduler.tables.worker_index import Whereabouts
from modelpool.scheduler.tables.workers import Worker

#: candidates that a choice keeps beside the chosen one
MOST_OTHERS = 4


@dataclass(slots=True, init=False)
class Question:
    """What a placement is shown. At least one worker is idle.

    switch_seconds  GPU-seconds that loads may take now for the sake of tasks that waited long
    (`scheduler.placement.switch_budget`)
    account_seconds  what the account holds, also where nobody had waited long a moment ago
    patience        for how many times the length of its load such a task waited
    """

    at: float
    backlog: Backlog
    workers: Whereabouts
    costs: Costs
    config: SchedulerConfig
    switch_seconds: float
    patience: float
    account_seconds: float

    def __init__(
        self,
        at: float,
        backlog: Backlog,
        workers: Whereabouts,
        costs: Costs,
        config: SchedulerConfig,
        switch_seconds: float = 0.0,
        patience: float = 20.0,
        account_seconds: float = 0.0,
    ) -> None:
        self.at = at
        self.backlog = backlog
        self.workers = workers
        self.costs = costs
        self.config = config
        self.switch_seconds = switch_seconds
        self.patience = patience
        self.account_seconds = account_seconds


@dataclass(slots=True, init=False)
class Choice:
    """Start `task` on `worker`.

    seconds        until its result should be there
    why            what the choice was made of
    spent_seconds  what it takes of `Question.switch_seconds`
    beside         a task that would have gone first but for its load: its weights are to be brought beside this run
    """

    task: Task
    worker: Worker
    seconds: float
    why: Why
    spent_seconds: float
    beside: Task | None

    def __init__(self, task: Task, worker: Worker, seconds: float, why: Why, spent_seconds: float = 0.0) -> None:
        self.task = task
        self.worker = worker
        self.seconds = seconds
        self.why = why
        self.spent_seconds = spent_seconds
        self.beside = None


Placement: TypeAlias = Callable[[Question], Choice | None]


def choice_of(
    question: Question,
    task: Task,
    worker: Worker,
    rule: Rule,
    note: str = "",
    others: Sequence[tuple[float, float, Worker]] = (),
    spent_seconds: float = 0.0,
) -> Choice:
    """The start of `task` on `worker`, on which it fits, with what it was made of.

    others         what else was looked at, as waiting seconds, extra seconds and worker
    spent_seconds  what it takes of `Question.switch_seconds`
    """
    costs, signature = question.costs, task.signature
    extra_seconds = costs.extra_seconds(task.spec, signature, worker)
    assert extra_seconds is not None, f"{task.name} does not fit on {worker.worker_id}"
    run_seconds = costs.resident_seconds(task.spec, signature, worker)
    upload_bytes, streamed_bytes, switches, slowdown = 0, 0, 0, 1.0
    if extra_seconds:
        setup = costs.setup(signature, worker)
        assert setup is not None, f"{task.name} does not fit on {worker.worker_id}"
        upload_bytes, streamed_bytes, switches = setup.upload_bytes, setup.streamed_bytes, setup.switches
        if is_divided(signature, worker):
            slowdown = setup.way.slowdown
    best_others: tuple[Candidate, ...] = ()
    if others:
        found = [
            Candidate(w.worker_id, wait, extra, costs.resident_seconds(task.spec, signature, w))
            for wait, extra, w in others
        ]
        found.sort(key=lambda other: (other.seconds, other.worker_id))
        best_others = tuple(found[:MOST_OTHERS])
    chosen = Candidate(worker.worker_id, 0.0, extra_seconds, run_seconds)
    workers = question.workers
    why = Why(
        rule,
        chosen,
        best_others,
        workers.idle_count,
        workers.busy_count,
        upload_bytes,
        streamed_bytes,
        switches,
        slowdown,
        int(task.passed),
        note,
        worker.ahead.get(signature, 0),
    )
    return Choice(task, worker, extra_seconds + run_seconds, why, spent_seconds)


def is_divided(signature: Signature, worker: Worker) -> bool:
    """The worker would run it in parts."""
    if not signature.pattern.divisions:
        return False
    return signature.way(worker.capacity_bytes or 0) in signature.pattern.divisions


def arrival_order(question: Question) -> Choice | None:
    """The first ready task, on the worker that is idle longest. Blind to what is resident: a baseline."""
    workers = sorted(question.workers.idle_workers(), key=lambda w: (w.idle_since, w.worker_id))
    return _first_fit(question, workers, "next in order, on the worker that is idle longest")


def least_loaded(question: Question) -> Choice | None:
    """The first ready task, on the idle worker with fewest runs so far: a baseline."""
    workers = sorted(question.workers.idle_workers(), key=lambda w: (w.totals.runs, w.worker_id))
    return _first_fit(question, workers, "next in order, on the worker with fewest runs")


def _first_fit(question: Question, workers: Sequence[Worker], reason: str) -> Choice | None:
    task = question.backlog.oldest(question.workers.largest_idle_bytes)
    if task is None:
        return None
    for worker in workers:
        if question.costs.extra_seconds(task.spec, task.signature, worker) is not None:
            return choice_of(question, task, worker, Rule.IN_ORDER, reason)
    return None
