"""Jobs and tasks as the core keeps them, and the moves that they may make.

Plain records without behaviour; `scheduler.core.state` changes them, statuses only through
`scheduler.tables.story.Story.move`. Knows nothing of workers but their names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, TypeAlias

from modelpool.pool.specs.spec import ComponentKey, JobId, JobSpec, Rung, TaskId, TaskSpec, UserId, WorkerId
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.oom_escalation import MemoryFailure
from modelpool.scheduler.tables.story import Status
from modelpool.scheduler.tables.user_account import NO_TAG, NOBODY, Flow

#: minus priority, the tag of its user's share (`scheduler.queue.shares`), then the place in the order of submission: an
#: int, a float and two ints. Not said in the type: the compiler would keep these apart, and make a tuple of them for
#: every comparison
Order: TypeAlias = tuple[Any, ...]


class JobStatus(Status):
    """Where a job stands."""

    ACTIVE = "active"  #: at least one task has to run for it
    STOPPING = "stopping"  #: cancelled; a GPU still runs a task that nobody else wants
    ENDED = "ended"  #: resolved and forgotten


#: Every legal move of a job, with its reason.
JOB_MOVES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.ACTIVE: frozenset(
        {
            JobStatus.ENDED,  # the wanted result is there; a task failed for good; cancelled while nothing ran for it
            JobStatus.STOPPING,  # cancelled while a task ran that no other job wants
        }
    ),
    JobStatus.STOPPING: frozenset(
        {
            JobStatus.ENDED,  # the run ended, whatever it says, or its worker was lost
        }
    ),
    JobStatus.ENDED: frozenset(),
}


class TaskStatus(Status):
    """Where a task stands. A task exists while it has to run or is running; its result outlives it."""

    BLOCKED = "blocked"  #: a result that it reads is not there
    READY = "ready"  #: in the backlog, or waiting for the worker that it is pinned to
    RUNNING = "running"  #: on a worker
    STOPPING = "stopping"  #: on a worker that was asked to stop
    ENDED = "ended"  #: forgotten


#: Every legal move of a task, with its reason.
TASK_MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.BLOCKED: frozenset(
        {
            TaskStatus.READY,  # the last of its inputs is there
            TaskStatus.ENDED,  # no live job needs it any more, or it fits on no worker
        }
    ),
    TaskStatus.READY: frozenset(
        {
            TaskStatus.RUNNING,  # placed on a worker
            TaskStatus.BLOCKED,  # an input was lost and is made again
            TaskStatus.ENDED,  # no live job needs it any more, or it fits on no worker
        }
    ),
    TaskStatus.RUNNING: frozenset(
        {
            TaskStatus.ENDED,  # its result is there, or it failed for good
            TaskStatus.BLOCKED,  # its worker was lost, or the failure may be tried again: once its inputs are there
            TaskStatus.STOPPING,  # no live job needs it any more; the GPU has not let go yet
        }
    ),
    TaskStatus.STOPPING: frozenset(
        {
            TaskStatus.ENDED,  # the run ended and nobody came to want it, or it succeeded before it could stop
            TaskStatus.BLOCKED,  # the run was stopped, and meanwhile a new job needs it: once its inputs are there
        }
    ),
    TaskStatus.ENDED: frozenset(),
}


@dataclass(slots=True, init=False, eq=False)
class Job:
    """A job that is not resolved. As with tasks, `__init__` is written out: one is made with every event, and the one
    that a dataclass gets is never compiled."""

    MOVES: ClassVar[Mapping[JobStatus, frozenset[JobStatus]]] = JOB_MOVES

    spec: JobSpec
    #: order of submission
    number: int
    #: its tasks by id, each after the ones it needs
    tasks: dict[TaskId, TaskSpec]
    status: JobStatus
    #: what the spec says, raised by ageing
    priority: int
    #: when its user's turn comes for it, in virtual seconds; NO_TAG where nobody else waits
    tag: float
    #: it has a place among the turns (`scheduler.queue.fair_queue`)
    joined: bool
    #: a task of it was placed that no earlier job wanted
    begun: bool
    #: its deadline came so near that it goes first until then
    urgent: bool
    #: what its runs should take, where its deadline was sooner than that when it was submitted
    hopeless_seconds: float | None
    #: tasks that have to run, or run, for it; each names this job in its own `demand`. Empty once STOPPING
    demands: dict[TaskId, None]
    #: runs whose end it waits for; not empty exactly while STOPPING
    awaits: dict[TaskId, None]
    #: how often a result that it still needed was lost
    losses: dict[TaskId, int]

    def __init__(self, spec: JobSpec, number: int, tasks: dict[TaskId, TaskSpec], priority: int = 0) -> None:
        self.spec = spec
        self.number = number
        self.tasks = tasks
        self.status = JobStatus.ACTIVE
        self.priority = priority
        self.tag = NO_TAG
        self.joined = False
        self.begun = False
        self.urgent = False
        self.hopeless_seconds = None
        self.demands = {}
        self.awaits = {}
        self.losses = {}

    @property
    def name(self) -> JobId:
        """The id, as the story prints it."""
        return self.spec.job_id


@dataclass(slots=True, init=False, eq=False)
class Task:
    """A task that has to run or is running. Shared by every job that names its id."""

    MOVES: ClassVar[Mapping[TaskStatus, frozenset[TaskStatus]]] = TASK_MOVES

    spec: TaskSpec
    signature: Signature
    #: place in the order of submission: number of the first job that needed it, position within that job
    number: tuple[int, int]
    status: TaskStatus
    #: active jobs that need its result. Empty only while STOPPING
    demand: dict[JobId, None]
    #: cancelled jobs that wait for its run to end. Empty unless STOPPING
    awaited_by: dict[JobId, None]
    #: priority and tag of the first of `demand` by them: higher priority first, then the lower tag
    priority: int
    tag: float
    #: sorts the backlog: higher priority first, then by tag and as submitted. Unique
    order: Order
    #: whose account it is on: the user of the first of `demand`; who that was last when nobody demands it any more
    payer: UserId
    #: what its run should take, where that is set aside already, and in which flow
    reserved_seconds: float
    reserved_in: Flow | None = field(repr=False)
    #: READY, and kept out of the backlog by its payer's limit
    held_back: bool
    #: the soonest deadline among urgent jobs of `demand`
    hurried_by: float
    #: name of what it was asked for with; "" when it was asked for alone
    batch: str
    #: since when it could start, as often as it was filed anew; None before, and once it has started
    ready_at: float | None
    #: times that it was sent to a worker
    attempt: int
    #: runs that ended badly and count against the limit
    failures: int
    #: of these, the ones that ran out of memory, and what was done about it so far
    memory_failures: tuple[MemoryFailure, ...]
    rungs: tuple[Rung, ...]
    #: workers that were lost while it ran on them, each time anew
    crashed: tuple[WorkerId, ...]
    #: the one worker that it waits for while READY; None for any
    pinned_to: WorkerId | None
    #: until when; then any worker will do
    pinned_until: float
    #: that worker's process is to be started anew first
    recycle_first: bool
    #: what waiting for that worker is for; climbed when it is carried out
    next_rung: Rung | None
    #: its run took too long, and was asked to stop at this time
    timed_out_at: float | None
    #: nobody needs its run any more, which was asked to stop at this time
    stop_asked_at: float | None
    #: how often later tasks of others started while it was the oldest that fitted there, over the workers that are up
    passed: float
    #: before all others of its priority, as often as it is filed anew: it was passed over as often as the limit allows
    overdue: bool
    #: before all others of its priority: its last run was lost with its worker
    goes_first: bool
    #: a run that it shared with others failed: it runs by itself from now on
    alone: bool
    #: set exactly while RUNNING or STOPPING
    worker_id: WorkerId | None
    #: of that worker
    incarnation: int
    started_at: float

    def __init__(self, spec: TaskSpec, signature: Signature, number: tuple[int, int], batch: str = "") -> None:
        self.spec = spec
        self.signature = signature
        self.number = number
        self.status = TaskStatus.BLOCKED
        self.demand = {}
        self.awaited_by = {}
        self.priority = 0
        self.tag = NO_TAG
        self.order = (0, NO_TAG, (0, 0))
        self.payer = NOBODY
        self.reserved_seconds = 0.0
        self.reserved_in = None
        self.held_back = False
        self.hurried_by = inf
        self.batch = batch
        self.ready_at = None
        self.attempt = 0
        self.failures = 0
        self.memory_failures = ()
        self.rungs = ()
        self.crashed = ()
        self.pinned_to = None
        self.pinned_until = inf
        self.recycle_first = False
        self.next_rung = None
        self.timed_out_at = None
        self.stop_asked_at = None
        self.passed = 0.0
        self.overdue = False
        self.goes_first = False
        self.alone = False
        self.worker_id = None
        self.incarnation = 0
        self.started_at = 0.0

    @property
    def name(self) -> TaskId:
        """The id, as the story prints it."""
        return self.spec.task_id

    def set_priority(self, priority: int, tag: float = NO_TAG) -> None:
        """Change what orders the backlog; not while it is filed there."""
        self.priority, self.tag = priority, tag
        self.order = (-priority, tag, self.number)

    @property
    def asked_to_stop_at(self) -> float:
        """When its run was asked to stop, first; never is infinity."""
        late = inf if self.timed_out_at is None else self.timed_out_at
        return late if self.stop_asked_at is None else min(late, self.stop_asked_at)

    def waited_seconds(self, at: float) -> float:
        """For how long it could have started."""
        return 0.0 if self.ready_at is None else at - self.ready_at

    @property
    def on_worker(self) -> bool:
        """A worker has it."""
        return self.worker_id is not None


def needed_tasks(
    job: Job, held: Container[TaskId], on_worker: Callable[[TaskId], bool]
) -> tuple[dict[TaskId, TaskSpec], TaskId | None]:
    """The tasks that have to run (or are running) before the wanted result is there, in the job's order.

    `held` are the results that are there; what a task `on_worker` reads, it has already. The second value is the id
    of a result that is needed and that no task of the job makes: a given one that was lost.
    """
    wanted = job.spec.wanted
    if wanted in held:
        return {}, None
    needed = {wanted}
    for task_id in reversed(job.tasks):
        if task_id in needed and not on_worker(task_id):
            needed.update([n for n in job.tasks[task_id].needs if n not in held])
    tasks = {task_id: task for task_id, task in job.tasks.items() if task_id in needed}
    return tasks, None if len(tasks) == len(needed) else min(needed.difference(tasks))


def problem_with(job: JobSpec, known: Container[ComponentKey]) -> str | None:
    """What is wrong with the shape of `job`, naming the field; None when nothing is."""
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
