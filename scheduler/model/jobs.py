"""Jobs and tasks of the core, and their legal state transitions.

Plain records without behaviour; `scheduler.core.state` changes them, statuses only through
`scheduler.model.story.Story.move`. Workers are known by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, TypeAlias

from modelpool.pool.values.specs.spec import ComponentKey, JobId, JobSpec, OomStep, TaskId, TaskSpec, UserId, WorkerId
from modelpool.scheduler.model.cost_classes import CostClass
from modelpool.scheduler.model.file_verdicts import NO_ORIGINS, Origins
from modelpool.scheduler.model.kept_states import KeptState
from modelpool.scheduler.model.oom_escalation import MemoryFailure
from modelpool.scheduler.model.placement_record import WaitEvaluation
from modelpool.scheduler.model.story import Status
from modelpool.scheduler.model.user_account import ANONYMOUS, NO_VIRTUAL_START, UserFlow

#: the story's note of a job that has its result
WAITS_FOR_VERDICT = "waits until the hashes of the files are known that its result was made with"

#: negative priority, virtual start time of the user's share (`scheduler.decisions.queue.shares`), place in the order of
#: submission: an int, a float and two ints. The type leaves that open: the compiler would store them separately and
#: build a tuple for every comparison
Order: TypeAlias = tuple[Any, ...]

#: `Task.degrees` of a task with runs that are never shared
ALONE = (1,)


class JobStatus(Status):
    """Status of a job."""

    ACTIVE = "active"  #: at least one task has to run for it
    STOPPING = "stopping"  #: cancelled; a GPU still runs a task that no other job wants
    ENDED = "ended"  #: resolved and forgotten


#: Every legal transition of a job, with its reason.
JOB_MOVES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.ACTIVE: frozenset(
        {
            JobStatus.ENDED,  # the wanted result exists; a task failed for good; cancelled while nothing ran for it
            JobStatus.STOPPING,  # cancelled while a task ran that no other job wants
        }
    ),
    JobStatus.STOPPING: frozenset(
        {
            JobStatus.ENDED,  # the run ended, with any outcome, or its worker was lost
        }
    ),
    JobStatus.ENDED: frozenset(),
}


class TaskStatus(Status):
    """Status of a task. A task exists while it has to run or is running; its result outlives it."""

    BLOCKED = "blocked"  #: a result that it reads does not exist
    READY = "ready"  #: in the backlog, or waiting for the worker that it is pinned to
    QUEUED = "queued"  #: on a worker that runs another task, and will start it then
    RUNNING = "running"  #: on a worker
    STOPPING = "stopping"  #: on a worker that was asked to stop
    ENDED = "ended"  #: forgotten


#: Every legal transition of a task, with its reason.
TASK_MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.BLOCKED: frozenset(
        {
            TaskStatus.READY,  # the last of its inputs exists
            TaskStatus.QUEUED,  # behind the tasks of a worker that compute its inputs
            TaskStatus.ENDED,  # no live job needs it any more, or it fits on no worker
        }
    ),
    TaskStatus.READY: frozenset(
        {
            TaskStatus.RUNNING,  # placed on a worker
            TaskStatus.QUEUED,  # placed on a busy worker, as its next task
            TaskStatus.BLOCKED,  # an input was lost and is computed again
            TaskStatus.ENDED,  # no live job needs it any more, or it fits on no worker
        }
    ),
    TaskStatus.QUEUED: frozenset(
        {
            TaskStatus.RUNNING,  # the run before it ended
            TaskStatus.BLOCKED,  # it was revoked, or its worker was lost before it started
            TaskStatus.STOPPING,  # no live job needs it any more; it is not revoked yet
            TaskStatus.ENDED,  # its worker was lost before it started, and no other can run it
        }
    ),
    TaskStatus.RUNNING: frozenset(
        {
            TaskStatus.ENDED,  # its result exists, or it failed for good
            TaskStatus.BLOCKED,  # its worker was lost, the failure may be retried, or it stopped with its state
            TaskStatus.STOPPING,  # no live job needs it any more; its GPU has not stopped yet
        }
    ),
    TaskStatus.STOPPING: frozenset(
        {
            TaskStatus.ENDED,  # the run ended and no job wanted it again, or it succeeded before it could stop
            TaskStatus.BLOCKED,  # the run was stopped, and a new job needs it: once its inputs exist
        }
    ),
    TaskStatus.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Job:
    """A job that is not resolved."""

    MOVES: ClassVar[Mapping[JobStatus, frozenset[JobStatus]]] = JOB_MOVES

    spec: JobSpec
    #: order of submission
    number: int
    #: its tasks by id, each after the ones it needs
    tasks: dict[TaskId, TaskSpec]
    status: JobStatus = field(init=False, default=JobStatus.ACTIVE)
    #: priority of the spec, raised by ageing
    priority: int = 0
    #: virtual start time in its user's share, in virtual seconds; NO_VIRTUAL_START if no other user waits
    virtual_start: float = field(init=False, default=NO_VIRTUAL_START)
    #: it is in the fair queue (`scheduler.decisions.queue.fair_queue`)
    joined: bool = field(init=False, default=False)
    #: a task of it was placed that no earlier job wanted
    begun: bool = field(init=False, default=False)
    #: its deadline is so near that it goes first until then
    urgent: bool = field(init=False, default=False)
    #: expected seconds of its runs, if its deadline was sooner than that at submission
    hopeless_seconds: float | None = field(init=False, default=None)
    #: tasks that have to run, or run, for it; each names this job in its own `demand`. Empty once STOPPING
    demands: dict[TaskId, None] = field(init=False, default_factory=dict)
    #: runs that must end before it does; non-empty exactly while STOPPING
    awaits: dict[TaskId, None] = field(init=False, default_factory=dict)
    #: how often a result that it still needed was lost
    losses: dict[TaskId, int] = field(init=False, default_factory=dict)
    #: its result exists, and files that it was made with have to be known before it ends
    waits_for_verdict: bool = field(init=False, default=False)

    @property
    def name(self) -> JobId:
        """The id, for the story."""
        return self.spec.job_id


@dataclass(slots=True, eq=False)
class Task:
    """A task that has to run or is running. Shared by every job that names its id."""

    MOVES: ClassVar[Mapping[TaskStatus, frozenset[TaskStatus]]] = TASK_MOVES

    spec: TaskSpec
    cost_class: CostClass
    #: place in the order of submission: number of the first job that needed it, position within that job
    number: tuple[int, int]
    status: TaskStatus = field(init=False, default=TaskStatus.BLOCKED)
    #: active jobs that need its result. Empty only while STOPPING
    demand: dict[JobId, None] = field(init=False, default_factory=dict)
    #: cancelled jobs that wait for its run to end. Empty unless STOPPING
    awaited_by: dict[JobId, None] = field(init=False, default_factory=dict)
    #: priority and virtual start time of the first of `demand`: higher priority first, then the earlier start time
    priority: int = field(init=False, default=0)
    virtual_start: float = field(init=False, default=NO_VIRTUAL_START)
    #: sort key of the backlog: higher priority first, then by virtual start time and order of submission. Unique
    order: Order = field(init=False, default=(0, NO_VIRTUAL_START, (0, 0)))
    #: the user who is charged: user of the first of `demand`; the last such user when no job demands it any more
    payer: UserId = field(init=False, default=ANONYMOUS)
    #: expected seconds of its run, if reserved already, and the flow in which they are reserved
    reserved_seconds: float = field(init=False, default=0.0)
    reserved_in: UserFlow | None = field(repr=False, init=False, default=None)
    #: READY, and kept out of the backlog by its payer's limit
    held_back: bool = field(init=False, default=False)
    #: the earliest deadline among urgent jobs of `demand`
    urgent_by: float = field(init=False, default=inf)
    #: name of the batch of jobs it was submitted with; "" if submitted alone
    batch: str = ""
    #: time since when it could start, kept when it waits again; None before, and once it is on a worker
    ready_at: float | None = field(init=False, default=None)
    #: seconds for which it could have started, before it was sent to its latest worker
    queue_seconds: float = field(init=False, default=0.0)
    #: the latest evaluation with which a placement let it wait for a busy worker; None if none did
    evaluation: WaitEvaluation | None = field(init=False, default=None)
    #: times that it was sent to a worker
    attempt: int = field(init=False, default=0)
    #: failed runs that count against the limit
    failures: int = field(init=False, default=0)
    #: failed runs that ran out of memory, and the measures taken so far
    memory_failures: tuple[MemoryFailure, ...] = field(init=False, default=())
    oom_steps: tuple[OomStep, ...] = field(init=False, default=())
    #: workers that were lost while it ran on them, one entry per loss
    crashed: tuple[WorkerId, ...] = field(init=False, default=())
    #: runs that found a file of it unavailable
    unavailable: int = field(init=False, default=0)
    #: the one worker that it waits for while READY; None for any
    pinned_to: WorkerId | None = field(init=False, default=None)
    #: until this time; then any worker will do
    pinned_until: float = field(init=False, default=inf)
    #: restart that worker's process first
    recycle_first: bool = field(init=False, default=False)
    #: the measure that waiting for that worker serves; recorded when the task starts there
    next_oom_step: OomStep | None = field(init=False, default=None)
    #: time at which its run, which took too long, was asked to stop
    timed_out_at: float | None = field(init=False, default=None)
    #: time at which its run, which no job needs any more, was asked to stop
    cancel_requested_at: float | None = field(init=False, default=None)
    #: the state that its next run resumes from; None starts it from the beginning
    kept: KeptState | None = field(init=False, default=None)
    #: expected seconds of a run from the beginning; `spec.run_seconds` are of the steps that are left
    full_run_seconds: float = field(init=False)
    #: time at which its run was asked to stop with its state; None: it was not
    pause_requested_at: float | None = field(init=False, default=None)
    #: times that it was stopped for a task of higher priority
    preemptions: int = field(init=False, default=0)
    #: how often later tasks of other batches started while it was the oldest that fitted there, divided by the workers
    #: up
    passed: float = field(init=False, default=0.0)
    #: goes before all others of its priority, also when queued again: it was passed over as often as the limit allows
    overdue: bool = field(init=False, default=False)
    #: goes before all others of its priority: its last run was lost with its worker, it continues on other GPUs, or a
    #: pass was stopped for it
    goes_first: bool = field(init=False, default=False)
    #: times that it waited on an idle worker for texts that fill its pass
    texts_before: int = field(init=False, default=0)
    #: a run that it shared with others failed: it runs alone from now on
    alone: bool = field(init=False, default=False)
    #: the numbers of GPUs that its next run may have: the ones in `spec` that have not failed it
    degrees: tuple[int, ...] = field(init=False)
    #: the number of GPUs of its current or last run
    degree: int = field(init=False, default=1)
    #: the number of GPUs that its next run should have; 0: as decided then
    resume_degree: int = field(init=False, default=0)
    #: times that its run was stopped to continue on more or fewer GPUs
    resizes: int = field(init=False, default=0)
    #: runs of it on several GPUs that broke without a loss or an error of its own
    gang_breaks: int = field(init=False, default=0)
    #: set exactly while QUEUED, RUNNING or STOPPING
    worker_id: WorkerId | None = field(init=False, default=None)
    #: of that worker
    incarnation: int = field(init=False, default=0)
    started_at: float = field(init=False, default=0.0)
    #: inputs that did not exist when it was queued: tasks in front of it on its worker compute them. Without one that
    #: has succeeded, and is left out here, it does not start
    follows: tuple[TaskId, ...] = field(init=False, default=())
    #: its run reads a file, or a result, that is not the expected one: whatever comes of it does not count
    is_refuted: bool = field(init=False, default=False)
    #: origins of the results that its run reads
    origins: Origins = field(init=False, default=NO_ORIGINS)

    def __post_init__(self) -> None:
        self.full_run_seconds = self.spec.run_seconds
        self.degrees = self.spec.degrees

    @property
    def name(self) -> TaskId:
        """The id, for the story."""
        return self.spec.task_id

    @property
    def remaining(self) -> float:
        """Fraction of its steps that its current or next run computes."""
        return self.spec.run_seconds / self.full_run_seconds if self.full_run_seconds else 1.0

    def set_priority(self, priority: int, virtual_start: float = NO_VIRTUAL_START) -> None:
        """Change the sort key of the backlog. Call only while the task is not in it."""
        self.priority, self.virtual_start = priority, virtual_start
        self.order = (-priority, virtual_start, self.number)

    @property
    def stop_requested_at(self) -> float:
        """Time at which its run was first asked to stop; infinity if never."""
        late = inf if self.timed_out_at is None else self.timed_out_at
        return late if self.cancel_requested_at is None else min(late, self.cancel_requested_at)

    @property
    def is_for_pass(self) -> bool:
        """Whether it goes first because a pass waits for it, or was stopped for it: it was on no worker yet."""
        return self.goes_first and not self.attempt

    @property
    def is_stopping(self) -> bool:
        """Whether its run was asked to stop: with its state, because of its timeout, because its result would not
        count, or because no job needs it."""
        is_asked = self.pause_requested_at is not None or self.timed_out_at is not None or self.is_refuted
        return is_asked or self.status is TaskStatus.STOPPING

    def waited_seconds(self, at: float) -> float:
        """Seconds for which it could have started."""
        return 0.0 if self.ready_at is None else at - self.ready_at

    @property
    def on_worker(self) -> bool:
        """Whether a worker has it."""
        return self.worker_id is not None


def needed_tasks(
    job: Job,
    held: Container[TaskId],
    on_worker: Callable[[TaskId], bool],
    follows: Callable[[TaskId], tuple[TaskId, ...]] = lambda task_id: (),
) -> tuple[dict[TaskId, TaskSpec], TaskId | None]:
    """Return the tasks that have to run (or are running) before the wanted result exists, in the job's order.

    `held` are the existing results; a task for which `on_worker` holds has read its inputs already, except those that
    it `follows`. The second value is the id of a needed result that no task of the job computes: a lost result that a
    driver provided.
    """
    wanted = job.spec.wanted
    if wanted in held:
        return {}, None
    needed = {wanted}
    for task_id in reversed(job.tasks):
        if task_id in needed:
            reads = follows(task_id) if on_worker(task_id) else job.tasks[task_id].needs
            needed.update([n for n in reads if n not in held])
    tasks = {task_id: task for task_id, task in job.tasks.items() if task_id in needed}
    return tasks, None if len(tasks) == len(needed) else min(needed.difference(tasks))


def problem_with(job: JobSpec, known: Container[ComponentKey]) -> str | None:
    """Return the error in the structure of `job`, naming the field; None if it is valid."""
    makeable: set[TaskId] = set(job.given)
    for task in job.tasks:
        if task.task_id in makeable:
            return f"tasks: {task.task_id} is named twice or is also given, expected each id once"
        for need in task.needs:
            if need not in makeable:
                return f"tasks: {task.task_id} needs {need}, expected an earlier task or a given result"
        for use in task.uses:
            if use.component not in known:
                return f"tasks: {task.task_id} uses {use.component}, expected a component that was announced"
        if len(task.uses) > 1 and len({use.component for use in task.uses}) < len(task.uses):
            return f"tasks: {task.task_id} uses a component twice, expected each once"
        makeable.add(task.task_id)
    if job.wanted not in makeable:
        return f"wanted: found {job.wanted}, expected one of the job's tasks"
    return None
