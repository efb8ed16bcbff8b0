"""`JobTraces`: collects what happened to each live job, and returns it as one value when the job ends.

Pure: no clock and no I/O. Holds the runs of tasks of jobs that have not ended, and nothing of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, RunErrorKind, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.messages import (
    Command,
    EndWorker,
    Event,
    Outcome,
    ResolveJob,
    RunEnded,
    RunInGang,
    RunTask,
    Submitted,
    TaskRevoked,
    WorkerDown,
)
from modelpool.scheduler.model.placement_record import Why

#: of a run that has not ended, or was lost with its worker
NO_COST = RunCost()


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One start of a task. Times are on the clock of the events.

    ready_at  since when the task could start
    sent_at   when it was sent; of one that waited at a busy worker, when the run before it ended
    ended_at  when its end was reported; of one that was reported with those that followed it, the length of the run
              after its begin
    end       "succeeded", or the kind of its error; "running" if the job did not wait for its end
    """

    task_id: TaskId
    attempt: int
    worker_id: WorkerId
    incarnation: int
    ready_at: float
    sent_at: float
    why: Why | None
    ended_at: float | None = None
    end: str = "running"
    message: str = ""
    cost: RunCost = NO_COST


@dataclass(frozen=True, slots=True)
class JobTrace:
    """One job that has ended, with the runs of its tasks, oldest first; a task that had its result has none."""

    job: JobSpec
    submitted_at: float
    ended_at: float
    outcome: Outcome
    message: str
    tasks: tuple[tuple[TaskSpec, tuple[TracedRun, ...]], ...]


@dataclass(slots=True)
class _TaskRuns:
    """The runs of a task, and the number of live jobs that name it."""

    jobs: int = 0
    runs: list[TracedRun] = field(default_factory=list)


class JobTraces:
    """The traces of the live jobs of one controller."""

    def __init__(self, demand: Demand) -> None:
        """`demand` has the live jobs and tasks of the core; they are only read."""
        self._demand = demand
        self._jobs: dict[JobId, tuple[JobSpec, float]] = {}
        self._tasks: dict[TaskId, _TaskRuns] = {}
        self._running: dict[WorkerId, dict[TaskId, None]] = {}
        #: runs that busy workers begin by themselves, unless they are revoked, with the time since when they could run
        self._queued: dict[WorkerId, dict[TaskId, tuple[RunTask, float]]] = {}

    def note(self, event: Event, commands: Sequence[Command]) -> list[JobTrace]:
        """Note an event that the core has handled, and its commands; return the jobs that it ended."""
        match event:
            case Submitted():
                self._submitted(event)
            case RunEnded():
                self._run_ended(event)
            case TaskRevoked():
                self._task_revoked(event)
            case WorkerDown():
                self._worker_lost(event.worker_id, event.at, event.reason)
        ended: list[JobTrace] = []
        for command in commands:
            match command:
                case RunTask():
                    self._run_sent(command, event.at)
                case RunInGang():
                    self._run_sent(command.run, event.at)
                case EndWorker():
                    self._worker_lost(command.worker_id, event.at, "its worker was ended")
                case ResolveJob():
                    trace = self._job_ended(command, event.at)
                    if trace is not None:
                        ended.append(trace)
        return ended

    def _submitted(self, event: Submitted) -> None:
        job = event.job
        if job.job_id not in self._demand.jobs or job.job_id in self._jobs:
            return  # it ended at once, or is known
        self._jobs[job.job_id] = (job, event.at if event.submitted_at is None else event.submitted_at)
        for task in job.tasks:
            self._tasks.setdefault(task.task_id, _TaskRuns()).jobs += 1

    def _run_sent(self, command: RunTask, at: float) -> None:
        if command.queued:
            ready_at = at - self._demand.tasks[command.task_id].queue_seconds
            self._queued.setdefault(command.worker_id, {})[command.task_id] = command, ready_at
            return
        mates = [(mate.task_id, mate.attempt) for mate in command.batch_mates]
        for task_id, attempt in ((command.task_id, command.attempt), *mates):
            self._begin(command, task_id, attempt, at - self._demand.tasks[task_id].queue_seconds, at)

    def _begin(self, command: RunTask, task_id: TaskId, attempt: int, ready_at: float, at: float) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            run = TracedRun(task_id, attempt, command.worker_id, command.incarnation, ready_at, at, command.why)
            task.runs.append(run)
            self._running.setdefault(command.worker_id, {})[task_id] = None

    def _begin_queued(self, worker_id: WorkerId, at: float) -> None:
        """Begin the first queued run of a worker, if there is one."""
        queue = self._queued.get(worker_id)
        if queue:
            command, ready_at = queue.pop(next(iter(queue)))
            if not queue:
                del self._queued[worker_id]
            begun_at = max(at, ready_at)
            if command.follows:  # it needed the result of the run that ended
                ready_at = begun_at
            self._begin(command, command.task_id, command.attempt, ready_at, begun_at)

    def _task_revoked(self, event: TaskRevoked) -> None:
        queue = self._queued.get(event.worker_id, {})
        if event.task_id in queue:
            names = list(queue)
            after = names[names.index(event.task_id) + 1 :]
            revoked, _ = queue.pop(event.task_id)
            if after and not revoked.joins:  # the next one is the first of that call now
                command, ready_at = queue[after[0]]
                queue[after[0]] = replace(command, joins=False), ready_at
            if not queue:
                del self._queued[event.worker_id]
            return
        self._end(event.task_id, event.worker_id, event.at, "revoked", "", NO_COST)  # it seemed to begin
        if event.worker_id not in self._running:
            self._begin_queued(event.worker_id, event.at)

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        error, worker_id = report.error, report.worker_id
        cost = report.cost
        seconds = cost.fetch_seconds + cost.load_seconds + cost.run_seconds
        if report.task_id in self._queued.get(worker_id, ()):
            self._begin_queued(worker_id, event.at - seconds)  # it ended before the core knew of its begin
        ended_at = event.at
        if self._is_followed_in_call(worker_id):  # it was reported with those that followed it
            begun_at = self._begun_at(report.task_id, worker_id)
            ended_at = event.at if begun_at is None else min(event.at, begun_at + seconds)
        if error is None:
            self._end(report.task_id, worker_id, ended_at, "succeeded", "", cost)
        else:
            self._end(report.task_id, worker_id, ended_at, error.kind.value, error.message, cost)
        if worker_id not in self._running:
            self._begin_queued(worker_id, ended_at)

    def _is_followed_in_call(self, worker_id: WorkerId) -> bool:
        """Whether the run of a worker was sent in one call with the one that follows it."""
        following = next(iter(self._queued.get(worker_id, {}).values()), None)
        return following is not None and following[0].joins

    def _begun_at(self, task_id: TaskId, worker_id: WorkerId) -> float | None:
        """When the run of the task on this worker began; None if it has none."""
        task = self._tasks.get(task_id)
        for run in () if task is None else task.runs:
            if run.worker_id == worker_id and run.ended_at is None:
                return run.sent_at
        return None

    def _worker_lost(self, worker_id: WorkerId, at: float, reason: str) -> None:
        self._queued.pop(worker_id, None)
        for task_id in tuple(self._running.get(worker_id, ())):
            self._end(task_id, worker_id, at, RunErrorKind.WORKER_LOST.value, reason, NO_COST)

    def _end(self, task_id: TaskId, worker_id: WorkerId, at: float, end: str, message: str, cost: RunCost) -> None:
        """End the run of the task on this worker, if it has one."""
        running = self._running.get(worker_id, {})
        if task_id not in running:
            return
        del running[task_id]
        if not running:
            del self._running[worker_id]
        task = self._tasks.get(task_id)
        for place, run in enumerate(() if task is None else task.runs):
            if task is not None and run.worker_id == worker_id and run.ended_at is None:
                task.runs[place] = replace(run, ended_at=at, end=end, message=message, cost=cost)

    def _job_ended(self, command: ResolveJob, at: float) -> JobTrace | None:
        known = self._jobs.pop(command.job_id, None)
        if known is None:
            return None
        job, submitted_at = known
        tasks = []
        for spec in job.tasks:
            task = self._tasks[spec.task_id]
            tasks.append((spec, tuple(task.runs)))
            task.jobs -= 1
            if not task.jobs:
                del self._tasks[spec.task_id]
        message = "" if command.error is None else command.error.message
        return JobTrace(job, submitted_at, at, command.outcome, message, tuple(tasks))
