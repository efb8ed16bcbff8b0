"""The interface of placement policies: the query, the decision, and the reasons that a decision records.

Policies are interchangeable: the default (`scheduler.decisions.placement.expected_completion`), and baselines to
compare it with (`scheduler.decisions.placement.baseline_policies`). Each is called again after every start, until it
returns None. They change nothing. `scheduler.decisions.placement.registry` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.backlog import Backlog
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, Why
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker

#: other options that a decision records
MOST_OTHERS = 4


@dataclass(slots=True)
class PlacementQuery:
    """The input of a placement policy. At least one worker is idle.

    switch_seconds  GPU-seconds that loads for long-waiting tasks may take now
                    (`scheduler.decisions.placement.switch_budget`)
    budget_seconds  content of the switch budget, also if no task had waited long a moment ago
    wait_factor     a task counts as long-waiting after this multiple of its load time
    """

    at: float
    backlog: Backlog
    workers: WorkerIndex
    costs: Costs
    config: SchedulerConfig
    switch_seconds: float = 0.0
    wait_factor: float = 20.0
    budget_seconds: float = 0.0


@dataclass(slots=True)
class PlacementDecision:
    """Start `task` on `worker`.

    seconds        until its result should exist
    why            the reasons of the decision
    spent_seconds  the part of `PlacementQuery.switch_seconds` that it uses
    preload_first  a task that would have gone first except for its load: preload its weights during this run
    others         the other members of the gang that shares the run, in the order of their ranks
    """

    task: Task
    worker: Worker
    seconds: float
    why: Why
    spent_seconds: float = 0.0
    preload_first: Task | None = field(init=False, default=None)
    others: tuple[Worker, ...] = field(init=False, default=())


Placement: TypeAlias = Callable[[PlacementQuery], PlacementDecision | None]


def make_decision(
    query: PlacementQuery,
    task: Task,
    worker: Worker,
    rule: PlacementRule,
    note: str = "",
    others: Sequence[tuple[float, float, Worker]] = (),
    spent_seconds: float = 0.0,
) -> PlacementDecision:
    """Return the start of `task` on `worker`, on which it must fit, with its reasons.

    others         other options, as waiting seconds, extra seconds and worker
    spent_seconds  the part of `PlacementQuery.switch_seconds` that it uses
    """
    costs, cost_class = query.costs, task.cost_class
    extra_seconds = costs.extra_seconds(task.spec, cost_class, worker)
    assert extra_seconds is not None, f"{task.name} does not fit on {worker.worker_id}"
    run_seconds = costs.resident_seconds(task.spec, cost_class, worker)
    upload_bytes, streamed_bytes, switches, slowdown = 0, 0, 0, 1.0
    if extra_seconds:
        load = costs.load_estimate(cost_class, worker)
        assert load is not None, f"{task.name} does not fit on {worker.worker_id}"
        upload_bytes, streamed_bytes, switches = load.upload_bytes, load.streamed_bytes, load.switches
        if is_divided(cost_class, worker):
            slowdown = load.mode.slowdown
    best_others: tuple[PlacementOption, ...] = ()
    if others:
        found = [
            PlacementOption(w.worker_id, wait, extra, costs.resident_seconds(task.spec, cost_class, w))
            for wait, extra, w in others
        ]
        found.sort(key=lambda other: (other.seconds, other.worker_id))
        best_others = tuple(found[:MOST_OTHERS])
    chosen = PlacementOption(worker.worker_id, 0.0, extra_seconds, run_seconds)
    workers, preloaded = query.workers, worker.preloaded.get(cost_class)
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
        0 if preloaded is None else preloaded.hidden_bytes,
    )
    return PlacementDecision(task, worker, extra_seconds + run_seconds, why, spent_seconds)


def is_divided(cost_class: CostClass, worker: Worker) -> bool:
    """Whether the worker would divide the task."""
    if not cost_class.pattern.divisions:
        return False
    return cost_class.mode(worker.capacity_bytes or 0) in cost_class.pattern.divisions
