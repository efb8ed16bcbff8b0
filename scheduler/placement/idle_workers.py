"""Which idle worker is best for a task. Functions of what they are shown; they change nothing.

Of many idle workers only some are looked at: those that have a part of what the task uses, and some of every sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from modelpool.pool.specs.spec import WorkerId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.rules import Question, is_divided
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.workers import Worker

#: idle workers of one sort, and idle holders of a component, that one line is held against
MOST_IDLE = 8
#: machines that have an adapter
MOST_MACHINES = 8


def best_idle(question: Question, task: Task) -> tuple[Worker, float] | None:
    """The idle worker that should finish it first, with its extra seconds; of equal ones the one that runs it whole,
    then the one that evicts least, then the one that is idle longest, then by name; None when it fits on none."""
    workers, costs, signature = question.workers, question.costs, task.signature
    if workers.idle_count == 1:
        (worker,) = workers.some_idle(1)
        extra = costs.extra_seconds(task.spec, signature, worker)
        return None if extra is None else (worker, extra)
    best: list[tuple[Worker, float]] = []
    least_seconds = 0.0
    is_few = workers.idle_count <= MOST_IDLE
    for worker in workers.some_idle(MOST_IDLE) if is_few else _some_idle(question, signature):
        extra_seconds = costs.extra_seconds(task.spec, signature, worker)
        if extra_seconds is None:
            continue
        seconds = extra_seconds + costs.resident_seconds(task.spec, signature, worker)
        if not best or seconds < least_seconds:
            best, least_seconds = [(worker, extra_seconds)], seconds
        elif seconds == least_seconds:
            best.append((worker, extra_seconds))
    if len(best) < 2:
        return best[0] if best else None
    chosen = least_evicting(costs, signature, [worker for worker, _ in best])
    return next(pair for pair in best if pair[0] is chosen)


def _some_idle(question: Question, signature: Signature) -> Iterable[Worker]:
    """Of many idle workers those that hold what it uses or are near its adapters, and some of every sort."""
    workers = question.workers
    found = dict.fromkeys(w for use in signature.uses for w in workers.idle_holders(use.component, MOST_IDLE))
    found.update((w, None) for w in near(question, signature) if w.is_idle)
    for sort in workers.idle.values():
        found.update(dict.fromkeys(islice(sort, MOST_IDLE)))
    return found


def near(question: Question, signature: Signature) -> list[Worker]:
    """Some workers on machines that have adapters of it in memory."""
    on_node, holders = question.workers.on_node, question.costs.nodes.holders
    if not holders:
        return []
    return [
        worker
        for use in signature.uses
        for adapter in use.adapters
        for node in islice((node for node in holders.get(adapter, ()) if node in on_node), MOST_MACHINES)
        for worker in on_node[node]
    ]


def least_evicting(costs: Costs, signature: Signature, workers: Sequence[Worker]) -> Worker:
    """The worker of these, which should finish it equally soon, that it harms least."""
    if len(workers) == 1:
        return workers[0]
    return min(workers, key=lambda w: _harm(costs, signature, w))


def _harm(costs: Costs, signature: Signature, worker: Worker) -> tuple[bool, int, float, WorkerId]:
    """What of two workers that should finish it equally soon the better one has less of. The last but one sends new
    adapters where nothing was asked for lately."""
    setup = costs.setup(signature, worker)
    evicted_bytes = 0 if setup is None else setup.evicted_bytes(worker)
    return is_divided(signature, worker), evicted_bytes, worker.idle_since, worker.worker_id
