"""Moves work off machines that will end: stops runs that would end too late, and copies off what only they hold.

A run on such a machine continues as long as possible: it is asked to stop, with its state, so late that its current
step, its report and the copy of the state end before the deadline. A run that ends in time is not stopped. Results are
copied at once, in the order in which they are needed: those that tasks will read, then those kept for later jobs.

Knows deadlines by machine; not where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from modelpool.pool.values.specs.spec import NO_NODE, NodeId, Stage, TaskId
from modelpool.scheduler.core.preemption import Preemption
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.kept_states import state_id, step_seconds
from modelpool.scheduler.model.messages import Command, CopyResult
from modelpool.scheduler.model.workers import Worker, WorkerTable

#: seconds between the end of the last step and the deadline: the report, and the copy of the state or the result
LEAVE_SECONDS = 3.0
#: a step may take this many times as long as expected
STEP_MARGIN = 1.5


def latest_stop(
    at: float, deadline: float, expected_end: float | None, step_seconds: float, leave_seconds: float = LEAVE_SECONDS
) -> float:
    """Return the time at which a run must be asked to stop to leave a machine by `deadline`: infinity if it ends in
    time, `at` if it is late already.

    expected_end  of the run; None if unknown: then it is stopped
    step_seconds  expected seconds of a step: a run stops after the one in progress
    """
    if expected_end is not None and expected_end + leave_seconds <= deadline:
        return inf
    return max(at, deadline - leave_seconds - STEP_MARGIN * step_seconds)


class Leaving:
    """Prepares the ends of machines. Methods append the commands that they cause to `out`."""

    def __init__(
        self, costs: Costs, worker_table: WorkerTable, demand: Demand, preemption: Preemption, out: list[Command]
    ) -> None:
        self._costs = costs
        self._worker_table = worker_table
        self._demand = demand
        self._preemption = preemption
        self._out = out

    def prepare(self, deadlines: Mapping[NodeId, float], at: float) -> float:
        """Stop the runs that are due, and copy all results off machines with a deadline. Call when deadlines change.
        Returns the time at which the next run is due; infinity if none is."""
        due = self.stop_runs(deadlines, at)
        self.copy_results(deadlines)
        return due

    def stop_runs(self, deadlines: Mapping[NodeId, float], at: float) -> float:
        """As `prepare`, without copies. Call after every event while there are such machines."""
        due = inf
        for worker in self._worker_table.workers.values():
            deadline = None if worker.spec is None else deadlines.get(worker.spec.node)
            if deadline is not None and worker.task_id is not None:
                stop_at = self.stop_at(worker, deadline, at)
                if stop_at <= at:
                    self._preemption.pause(worker, f"as its machine ends in {deadline - at:.1f} s", at)
                else:
                    due = min(due, stop_at)
        return due

    def stop_what_outlasts(self, deadline: float, at: float) -> None:
        """Stop, with their state, the runs that are not expected to end before the pool does at `deadline`. They stop
        now: what they could do by then would not be finished."""
        for worker in self._worker_table.workers.values():
            if worker.task_id is not None and self.stop_at(worker, deadline, at) < inf:
                self._preemption.pause(worker, f"as the pool ends in {deadline - at:.1f} s", at)

    def copy_result_of(self, task_id: TaskId, deadlines: Mapping[NodeId, float]) -> None:
        """A run of the task ended: copy its result, or its state, if it is on such a machine."""
        result, task = self._demand.results.held.get(task_id), self._demand.tasks.get(task_id)
        if result is not None and result.node and result.node in deadlines:
            result.node = NO_NODE
            self._out.append(CopyResult(task_id))
        if task is not None and task.kept is not None and task.kept.node and task.kept.node in deadlines:
            task.kept = task.kept.moved()
            self._out.append(CopyResult(state_id(task_id)))

    def stop_at(self, worker: Worker, deadline: float, at: float) -> float:
        """Return the time at which the run of `worker` must be asked to stop; infinity if it ends in time, cannot stop
        with a state, or was asked before."""
        tasks = [self._demand.tasks[name] for name in worker.task_ids]
        first = tasks[0]
        if first.spec.stage is not Stage.SAMPLE or all(task.is_stopping for task in tasks):
            return inf
        run_seconds = self._costs.resident_seconds(first.spec, first.cost_class, worker)
        if worker.expected_end is not None:  # it streams, or shares its run: then steps take longer
            run_seconds = max(run_seconds, worker.expected_end - (worker.loaded_at or first.started_at))
        seconds = step_seconds(first.spec, run_seconds, first.remaining)
        return latest_stop(at, deadline, worker.expected_end, seconds)

    def copy_results(self, deadlines: Mapping[NodeId, float]) -> None:
        """Copy all results off these machines, each once: from then on it counts as safe. One that could not be copied
        is reported as lost. Results of unknown machines are safe or cannot be saved."""
        results = self._demand.results
        found: list[TaskId] = []
        for task_id, result in results.held.items():
            if result.node and result.node in deadlines:
                found.append(task_id)
        found.sort(key=lambda task_id: task_id not in results.readers)
        for task_id in found:
            results.held[task_id].node = NO_NODE
        for task in self._demand.tasks.values():
            if task.kept is not None and task.kept.node and task.kept.node in deadlines:
                found.insert(0, state_id(task.name))
                task.kept = task.kept.moved()
        self._out += [CopyResult(task_id) for task_id in found]
