"""`RunLedger`: which runs are under way, and what each has cost when it ends; when each submission made progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from modelpool.actors.control.history.event_rules import FailedRun
from modelpool.actors.control.history.history_values import CostKey, RunCharge, RunEnd
from modelpool.pool.values.specs.spec import RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.jobs import Task, TaskStatus
from modelpool.scheduler.model.messages import RunTask

#: submissions that are followed before those that have ended are forgotten: a program may have one for each job
MOST_FOLLOWED = 10_000
#: separates the LoRAs of one run
LORAS_JOINED = " + "


@dataclass(slots=True)
class _Run:
    """A run that a worker has, or will begin by itself.

    task      of the core, which may have forgotten it by the end of the run
    began_at  on the core's clock; infinity: it has not begun
    """

    task: Task
    incarnation: int
    attempt: int
    model: str
    lora: str
    group: str
    began_at: float


@dataclass(slots=True)
class _WorkerRuns:
    """The runs of one worker in the order in which it begins them, and how many of them have begun."""

    runs: dict[TaskId, _Run] = field(default_factory=dict)
    begun: int = 0

    def add(self, task_id: TaskId, run: _Run) -> None:
        """A run is sent."""
        before, self.runs[task_id] = self.runs.get(task_id), run
        if before is not None:
            self.begun -= before.began_at < inf
        self.begun += run.began_at < inf

    def remove(self, task_id: TaskId) -> _Run | None:
        """Remove and return a run, if it is known."""
        run = self.runs.pop(task_id, None)
        if run is not None:
            self.begun -= run.began_at < inf
        return run

    def begin_next(self, at: float) -> None:
        """The next run begins by itself if none has begun."""
        if not self.begun and self.runs:
            next(iter(self.runs.values())).began_at = at
            self.begun = 1


class RunLedger:
    """Follows the runs of one core. Its memory grows with workers, not with jobs."""

    def __init__(self, state: SchedulerState, model_of: Callable[[TaskId], str]) -> None:
        """`state` is read only. `model_of` returns the name of the model that a live task runs."""
        self._state = state
        self._model_of = model_of
        self._workers: dict[WorkerId, _WorkerRuns] = {}
        groups = state.config.groups
        #: money of a GPU-second, by group
        self.prices = {group.name: group.price_per_hour / group.gpus_per_node / 3600.0 for group in groups}
        #: when a run of each submission began or ended last, on the core's clock
        self.progress: dict[str, float] = {}
        self._most_followed = MOST_FOLLOWED

    def sent(self, command: RunTask, at: float, is_charged: bool = True) -> None:
        """Runs are sent to a worker; what they cost is asked for later if they are `is_charged`."""
        table = self._state.worker_table.workers.get(command.worker_id)
        group = "" if table is None else table.group
        runs = self._workers.get(command.worker_id)
        if runs is None:
            runs = self._workers[command.worker_id] = _WorkerRuns()
        for task_id in (command.task_id, *(mate.task_id for mate in command.batch_mates)):
            task = self._state.demand.tasks.get(task_id)
            if task is None:
                continue
            began_at = inf if command.queued else at
            model, lora = (self._model_of(task_id), loras_of(task)) if is_charged else ("", "")
            runs.add(task_id, _Run(task, command.incarnation, task.attempt, model, lora, group, began_at))
            if task.batch:
                self.progress[task.batch] = at
        if len(self.progress) > self._most_followed:
            self._forget_ended()

    def ended(
        self, worker_id: WorkerId, incarnation: int, task_id: TaskId, attempt: int, at: float
    ) -> tuple[Task, str, str, str] | None:
        """A run ended with a report: return its task, model, LoRAs and group; None if it is unknown."""
        runs = self._workers.get(worker_id)
        run = None if runs is None else runs.runs.get(task_id)
        if runs is None or run is None or run.incarnation != incarnation or run.attempt != attempt:
            return None
        runs.remove(task_id)
        if run.task.batch:
            self.progress[run.task.batch] = at
        runs.begin_next(at)
        return run.task, run.model, run.lora, run.group

    def revoked(self, worker_id: WorkerId, task_id: TaskId, at: float) -> None:
        """A queued run was taken back."""
        runs = self._workers.get(worker_id)
        if runs is not None and runs.remove(task_id) is not None:
            runs.begin_next(at)

    def lost(self, worker_id: WorkerId, before_incarnation: int, at: float, hour: int) -> tuple[RunCharge, ...]:
        """Processes of a worker before this one are gone: return the costs of the runs that had begun there."""
        runs = self._workers.get(worker_id, _WorkerRuns())
        lost = {task_id: run for task_id, run in runs.runs.items() if run.incarnation < before_incarnation}
        for task_id in lost:
            runs.remove(task_id)
        if not runs.runs:
            self._workers.pop(worker_id, None)
        begun = [run for run in lost.values() if run.began_at < inf]
        return tuple(
            RunCharge(
                CostKey(hour, str(run.task.payer), run.model, run.lora, run.group),
                RunEnd.LOST,
                max(0.0, at - run.began_at) / len(begun),  # the runs of a batch share the GPU
                price=self.prices.get(run.group, 0.0),
            )
            for run in begun
        )

    def failed(self, task: Task, model: str) -> FailedRun:
        """Return the message about a run of the task that ended with an error."""
        return FailedRun(task.spec.stage, model, task.name in self._state.demand.tasks)

    def running_submissions(self) -> set[str]:
        """Return the submissions with a run that has begun."""
        return {
            run.task.batch
            for runs in self._workers.values()
            for run in runs.runs.values()
            if run.task.batch and run.began_at < inf
        }

    def stalled(self, at: float) -> dict[str, float]:
        """Return the submissions with unfinished jobs and no running task, and the seconds since a run of each began or
        ended, or since it was seen first. Forgets those that have ended."""
        for name in self._forget_ended() - self.progress.keys():
            self.progress[name] = at
        running = self.running_submissions()
        return {name: at - since for name, since in self.progress.items() if name not in running}

    def _forget_ended(self) -> set[str]:
        """Forget submissions without unfinished jobs; return the others."""
        live = {job.spec.batch for job in self._state.demand.jobs.values() if job.spec.batch}
        for name in self.progress.keys() - live:
            del self.progress[name]
        # twice as many, so that this stays rare
        self._most_followed = max(MOST_FOLLOWED, 2 * len(self.progress))
        return live


def run_end(error: RunErrorKind | None, has_state: bool) -> RunEnd:
    """Return how a run with this error counts."""
    return RunEnd.USED if error is None or has_state else RunEnd.FAILED


def loras_of(task: Task) -> str:
    """Return the names of the LoRAs of a task; "" for none."""
    names: dict[str, None] = {}
    for use in task.spec.uses:
        for adapter in use.adapters:
            names[adapter.rsplit("@", 1)[0].removesuffix("/lora")] = None
    return LORAS_JOINED.join(sorted(names)) if names else ""


def oldest_waiting(tasks: Sequence[Task], at: float) -> float:
    """Return for how long the oldest task has waited that could start, or that waits behind the run of a worker; 0 if
    none waits."""
    oldest = at
    for task in tasks:
        if task.status is TaskStatus.READY and task.ready_at is not None:
            oldest = min(oldest, task.ready_at)
        elif task.status is TaskStatus.QUEUED and not task.follows:
            oldest = min(oldest, task.started_at - task.queue_seconds)
    return max(0.0, at - oldest)
