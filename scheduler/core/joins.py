"""Sends ready tasks to workers that run a pass which they may join (`scheduler.decisions.placement.joining`).

A task that joins is a batch mate of the tasks in the pass from then on: it ends by itself, and the worker is free after
the last of them.
"""

from __future__ import annotations

from collections.abc import Callable

from modelpool.scheduler.decisions.placement.joining import ends_with_pass, joining_seconds, joining_task, takes_joining
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.messages import Command, RunLink, RunTask
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.workers import Worker, WorkerTable


class Joins:
    """Lets tasks join passes. Appends its commands to `out`."""

    def __init__(
        self,
        worker_table: WorkerTable,
        demand: Demand,
        assign: Callable[[PlacementDecision, bool], None],
        out: list[Command],
    ) -> None:
        """`assign` takes a task out of the backlog and assigns it to the worker; its second argument is whether the
        pass takes longer for it, so that it goes before the tasks that have waited longer."""
        self._worker_table = worker_table
        self._demand = demand
        self._assign = assign
        self._out = out

    def join_ready(self, query: Callable[[], PlacementQuery]) -> None:
        """Fill the free rows of all passes with ready tasks."""
        for worker in tuple(self._worker_table.open_passes.values()):
            while self._demand.backlog.count and self._takes_joining(worker):
                asked = query()
                task = joining_task(asked, worker, self._demand.fair_queue.may_start)
                if task is None:
                    break
                self._join(asked, task, worker)

    def _takes_joining(self, worker: Worker) -> bool:
        return takes_joining(worker, [self._demand.tasks[task_id] for task_id in worker.task_ids])

    def _join(self, query: PlacementQuery, task: Task, worker: Worker) -> None:
        note = f"joins the pass of {worker.task_id}"
        decision = make_decision(query, task, worker, PlacementRule.RESIDENT, note)
        end = query.at + joining_seconds(query, task, worker)
        self._assign(decision, not ends_with_pass(query, task, worker))
        self._worker_table.joined_pass(worker, task.name, end)
        self._out.append(
            RunTask(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                task_id=task.name,
                attempt=task.attempt,
                why=decision.why,
                resume=task.kept is not None,
                provisional=bool(task.origins),
                link=RunLink.ENTERS,
            )
        )
