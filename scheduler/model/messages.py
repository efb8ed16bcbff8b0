"""The messages of the scheduler core: everything that enters it (Event) and leaves it (Command), as frozen values.

`at` is seconds on the shell's monotonic clock and the core's only notion of time. Every `RunTask`, and every
`RunInGang`, ends as exactly one `RunEnded` or, when its worker is lost, as `WorkerDown`; every `StartWorker` as exactly
one `WorkerUp` or `StartFailed`.
Every event creates commands, which are immutable without being frozen (`pool.values.specs.resident` says why).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from modelpool.pool.values.core.errors import counted, format_bytes
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    NO_WORKER,
    ComponentKey,
    ComponentSpec,
    JobId,
    JobSpec,
    JudgedFile,
    NodeId,
    OomStep,
    PastRun,
    RunError,
    TaskId,
    TaskReport,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.placement_record import Why
from modelpool.scheduler.model.pool_memory import PoolMemory
from modelpool.scheduler.model.scaling_record import ScalingWhy


class Outcome(Enum):
    """The outcome of a job. Hashed by identity, as `Stage`."""

    __hash__ = object.__hash__

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class LossCause(Enum):
    """Why a worker is gone, or did not start. Only the first two can be the fault of the task that it ran."""

    CRASH = "crash"  #: the process ended by itself, or hung; also if nothing else is known
    OUT_OF_MEMORY = "out of host memory"  #: killed because its machine ran out of memory
    KILLED = "killed"  #: another process ended it
    NODE_LOST = "node lost"  #: its machine is gone without notice
    PREEMPTED = "preempted"  #: its machine was drained or taken back, with notice
    NO_NODE = "no node"  #: no machine for it came up in time; only starts fail for this

    @property
    def is_external(self) -> bool:
        """Whether the task that it ran cannot be the cause."""
        return self in (LossCause.KILLED, LossCause.NODE_LOST, LossCause.PREEMPTED)


@dataclass(frozen=True, slots=True)
class WorkersWanted(WireValue):
    """Set the workers of the pool. New ones are started; workers that are no longer named end when idle."""

    at: float
    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ComponentsKnown(WireValue):
    """Sizes of components that jobs may name from now on. Repeating one with equal sizes has no effect."""

    at: float
    components: tuple[ComponentSpec, ...]


@dataclass(frozen=True, slots=True)
class PruneComponents(WireValue):
    """Forget the sizes of components that no live task uses and no worker holds. The shell sends it when many are
    known, and sends the sizes again with the next job that uses them."""

    at: float


@dataclass(frozen=True, slots=True)
class Submitted(WireValue):
    """A driver submitted `job`: at `submitted_at`, if it has waited outside of the core since, or else now. With
    `others_follow`, the next event is the next job of the same submission, or a state that was found for one of them:
    tasks start when the last one is there, so that those that share a pass are all there, and resume."""

    at: float
    job: JobSpec
    submitted_at: float | None = None
    others_follow: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequested(WireValue):
    """A driver cancelled the job. Unknown and ended jobs are ignored: cancelling is idempotent."""

    at: float
    job_id: JobId


@dataclass(frozen=True, slots=True)
class WorkerUp(WireValue):
    """A worker started, or was taken over from an earlier controller.

    residency  the weights on the GPU of a worker that was taken over; None: it started, and has none
    past_runs  runs that it has done for earlier controllers
    """

    at: float
    worker: WorkerSpec
    residency: Residency | None = None
    past_runs: tuple[PastRun, ...] = ()


@dataclass(frozen=True, slots=True)
class StartFailed(WireValue):
    """A `StartWorker` failed."""

    at: float
    worker_id: WorkerId
    incarnation: int
    reason: str
    cause: LossCause = LossCause.CRASH


@dataclass(frozen=True, slots=True)
class WorkerDown(WireValue):
    """A worker that was up is lost, with everything on its GPU."""

    at: float
    worker_id: WorkerId
    incarnation: int
    reason: str
    cause: LossCause = LossCause.CRASH


@dataclass(frozen=True, slots=True)
class NodeDraining(WireValue):
    """The machine will end at `deadline`, on the core's clock: a drain request or a preemption notice. A later deadline
    replaces the earlier one; infinity withdraws the notice."""

    at: float
    node: NodeId
    deadline: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cordoned(WireValue):
    """An operator cordoned a machine, or a worker: nothing is placed there any more. With a `deadline`, the machine is
    drained: runs there end or move by then, and its workers end. Replaces an earlier one of the same place."""

    at: float
    node: NodeId = NO_NODE
    worker_id: WorkerId = NO_WORKER
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Uncordoned(WireValue):
    """An operator withdrew the cordon or the drain of a machine, or the cordon of a worker; or the machine is gone."""

    at: float
    node: NodeId = NO_NODE
    worker_id: WorkerId = NO_WORKER


@dataclass(frozen=True, slots=True)
class RestartRequested(WireValue):
    """An operator wants a worker to be replaced by a new process: once its run has ended or was moved, at `deadline` at
    the latest. Ignored for a worker that is not up."""

    at: float
    worker_id: WorkerId
    deadline: float


@dataclass(frozen=True, slots=True)
class DisruptionsAllowed(WireValue):
    """Whether nodes may be given up from now on, though they work: `obstacle` says why not; "" allows it. Maintenance
    windows begin and end."""

    at: float
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded(WireValue):
    """A `RunTask` ended, successfully or not."""

    at: float
    report: TaskReport


@dataclass(frozen=True, slots=True)
class TaskRevoked(WireValue):
    """A queued task was taken back before it started: it will not run there. It may come after the end of the run
    before it."""

    at: float
    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class StateKept(WireValue):
    """The shell holds the state of a run that continues, after `step` of `steps`: a checkpoint, from which the task
    resumes if the run is lost. Its id is `scheduler.model.kept_states.state_id`. `attempt` is 0 for one that an
    earlier controller's run left, which was found when the task was submitted; with `others_follow`, the next event is
    another one of the same submission, and tasks start with the last."""

    at: float
    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    attempt: int
    step: int
    steps: int
    state_bytes: int = 0
    others_follow: bool = False


@dataclass(frozen=True, slots=True)
class FilesJudged(WireValue):
    """A worker has found out whether files of its machine are those that were expected."""

    at: float
    worker_id: WorkerId
    incarnation: int
    files: tuple[JudgedFile, ...]


@dataclass(frozen=True, slots=True)
class ResultLost(WireValue):
    """The result of an ended task can no longer be read (the machine that held it is gone)."""

    at: float
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class Remembered(WireValue):
    """Take over what an earlier core of the pool, which ended `gap_seconds` ago, has learned, counted and spent."""

    at: float
    memory: PoolMemory
    gap_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PinComponents(WireValue):
    """Keep this set of components resident on at least `replicas` workers: idle workers load them, resident ones are
    evicted last, nodes that hold them are not given up, and nodes are requested for workers that are missing. 0
    replicas withdraw it. `file_names` as in `TaskSpec`."""

    at: float
    components: tuple[ComponentKey, ...]
    replicas: int
    file_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolEnding(WireValue):
    """The pool will end at `deadline`: nothing starts any more. Runs that would not end by then stop at a step with
    their state. Irrevocable."""

    at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class WeightsLoaded(WireValue):
    """A `LoadWeights` ended: all is loaded, memory was full, a run or the shell ended it, or it failed with `error`. Or
    an idle worker without one has taken memory that other processes have given back.

    residency  the weights on the GPU now, and its capacity
    """

    at: float
    worker_id: WorkerId
    incarnation: int
    residency: Residency
    error: RunError | None = None


@dataclass(frozen=True, slots=True)
class Tick(WireValue):
    """Time has passed; nothing else has happened. Answers a `ScheduleTick`."""

    at: float


Event: TypeAlias = (
    WorkersWanted
    | ComponentsKnown
    | PruneComponents
    | Submitted
    | CancelRequested
    | WorkerUp
    | StartFailed
    | WorkerDown
    | NodeDraining
    | Cordoned
    | Uncordoned
    | RestartRequested
    | DisruptionsAllowed
    | RunEnded
    | TaskRevoked
    | StateKept
    | FilesJudged
    | ResultLost
    | PinComponents
    | PoolEnding
    | WeightsLoaded
    | Remembered
    | Tick
)


@dataclass(slots=True, unsafe_hash=True)
class StartWorker(WireValue):
    """Start this worker after `delay_seconds` (a crash loop is slowed down).

    group  the group of nodes that it belongs to; it waits for a node of the group if there is none. "" is any GPU
    why    why the node was requested; with the first worker of each node only
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    delay_seconds: Final[float] = 0.0
    group: Final[str] = ""
    why: Final[ScalingWhy | None] = None


@dataclass(slots=True, unsafe_hash=True)
class EndWorker(WireValue):
    """End this worker, and its hanging run if there is one; a start that is pending is withdrawn. No event answers.

    why  why its node is given up, if that is the reason
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    why: Final[ScalingWhy | None] = None


@dataclass(slots=True, unsafe_hash=True)
class BatchMate(WireValue):
    """A task that runs in one batch with another, on the same worker and weights."""

    task_id: Final[TaskId]
    attempt: Final[int]


class RunLink(Enum):
    """How a task that is sent to a worker goes with others."""

    NONE = "by itself, or with its batch mates"
    #: send it in one call with the task before it, which is queued too; their ends may be reported together
    CALL = "in one call with the task before it"
    #: tasks with its `TaskSpec.pass_key` may join its run at a step; each ends with its own RunEnded as soon as it is
    #: done, and the worker is free after the last of them
    OPEN = "others may join it"
    #: it joins the open run of the worker. If that is over by then, it runs next, as an open run
    ENTERS = "it joins the run of the worker"


@dataclass(slots=True, unsafe_hash=True)
class RunTask(WireValue):
    """Run this task on this worker. `why` records the reasons of the decision.

    needed_next  components that the GPU is expected to need afterwards, soonest first; empty if nothing has to be
                 evicted
    fresh        take all weights off the GPU first: the task ran out of memory before
    oom_steps    measures taken against that so far, in order
    batch_mates  tasks that run in the same batch; each ends with its own RunEnded, and the worker is free after the
                 last of them
    resume       send the state along that the shell holds of the task, and of each batch mate: the run resumes from it
    queued       the worker runs another task: it starts this one itself when that run, and those queued before, have
                 ended
    link         how it goes with other tasks
    follows      inputs that tasks in front of it on this worker compute: they need not be sent. Without one of them,
                 the task does not start: answer with TaskRevoked
    provisional  it reads results that were made with files of unknown hashes: save no state of the run
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_id: Final[TaskId]
    attempt: Final[int]
    why: Final[Why | None] = None
    needed_next: Final[tuple[ComponentKey, ...]] = ()
    fresh: Final[bool] = False
    oom_steps: Final[tuple[OomStep, ...]] = ()
    batch_mates: Final[tuple[BatchMate, ...]] = ()
    resume: Final[bool] = False
    queued: Final[bool] = False
    link: Final[RunLink] = RunLink.NONE
    follows: Final[tuple[TaskId, ...]] = ()
    provisional: Final[bool] = False

    @property
    def joins(self) -> bool:
        """Whether it is sent in one call with the task before it."""
        return self.link is RunLink.CALL

    @property
    def is_open(self) -> bool:
        """Whether others may join its run at a step."""
        return self.link is RunLink.OPEN or self.link is RunLink.ENTERS

    @property
    def enters(self) -> bool:
        """Whether it joins the run of the worker."""
        return self.link is RunLink.ENTERS


@dataclass(frozen=True, slots=True)
class GangMember(WireValue):
    """A worker that shares a run with others."""

    worker_id: WorkerId
    incarnation: int


@dataclass(slots=True, unsafe_hash=True)
class RunInGang(WireValue):
    """Run this task together with the other `members`, each of which gets the same command with its own rank. The first
    member leads: its result is the run's. Answer with one RunEnded of this member, or its WorkerDown.

    run      as for a run on this worker alone
    gang_id  unique among all of this core
    members  in the order of their ranks
    """

    run: Final[RunTask]
    gang_id: Final[str]
    members: Final[tuple[GangMember, ...]]
    rank: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class RevokeTask(WireValue):
    """Take back a queued task. Answer with one TaskRevoked, unless it has started: then its RunEnded follows, as for
    any run."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_id: Final[TaskId]
    attempt: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class StopTask(WireValue):
    """Ask a running task to stop at its next step. Its `RunEnded` still follows. With `keep_state`, a sampling run ends
    with its state (`TaskReport.has_state`); it may also end before it stops."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_id: Final[TaskId]
    attempt: Final[int]
    keep_state: Final[bool] = False


@dataclass(slots=True, unsafe_hash=True)
class Prefetch(WireValue):
    """Read the files of these components into the host memory of that worker's machine during its run: a task that
    needs them is expected there next. Nothing waits for it; no event answers."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    components: Final[tuple[ComponentKey, ...]]


@dataclass(slots=True, unsafe_hash=True)
class Preload(WireValue):
    """Preload the weights of these tasks, one after the other, to that GPU during its run, as far as memory allows next
    to the run (`pool.weights.plan.preload_plan`). Replaces the previous request and ends with the run. Nothing waits
    for it; no event answers.

    needed_next  components that are expected to be needed there after the run, soonest first
    kept         components that must not be evicted for it: they are needed sooner
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_ids: Final[tuple[TaskId, ...]]
    needed_next: Final[tuple[ComponentKey, ...]] = ()
    kept: Final[tuple[ComponentKey, ...]] = ()


@dataclass(slots=True, unsafe_hash=True)
class LoadWhy(WireValue):
    """Why a pinned set is loaded on a worker: it must be on `replicas` workers and is on `holders`. The load should
    move `upload_bytes` in `seconds`."""

    replicas: Final[int]
    holders: Final[int]
    upload_bytes: Final[int]
    seconds: Final[float]

    @property
    def words(self) -> str:
        """The record in a sentence."""
        workers = counted(self.replicas, "worker")
        return (
            f"loads weights that are pinned to {workers} and on {self.holders}: "
            f"{format_bytes(self.upload_bytes)} in {self.seconds:.2g} s"
        )


@dataclass(slots=True, unsafe_hash=True)
class LoadWeights(WireValue):
    """Load these components to that idle GPU, evicting others but `kept`, as `pool.weights.plan.preload_plan` decides.
    A run that is sent there ends it early. Answer with one WeightsLoaded, unless the worker is lost."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    components: Final[tuple[ComponentKey, ...]]
    kept: Final[tuple[ComponentKey, ...]] = ()
    why: Final[LoadWhy | None] = None


@dataclass(slots=True, unsafe_hash=True)
class DropWeights(WireValue):
    """Take all weights off that GPU after its run, and close their files: some of them are not those that were
    expected. Nothing waits for it; no event answers."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]


@dataclass(slots=True, unsafe_hash=True)
class CopyResult(WireValue):
    """Copy this result, or state, off the machine that computed it, which will end. Nothing waits for it; ResultLost
    follows if it cannot be read any more."""

    task_id: Final[TaskId]


@dataclass(slots=True, unsafe_hash=True)
class ReleaseResult(WireValue):
    """No known task will read this result again."""

    task_id: Final[TaskId]


@dataclass(slots=True, unsafe_hash=True)
class ResolveJob(WireValue):
    """The job has ended; sent exactly once per job. `result` is set if it succeeded."""

    job_id: Final[JobId]
    outcome: Final[Outcome]
    result: Final[TaskId | None] = None
    error: Final[RunError | None] = None


@dataclass(slots=True, unsafe_hash=True)
class ScheduleTick(WireValue):
    """Send a `Tick` after this delay: a task waits for a busy worker that may take longer than expected, or a run
    must have ended by then. Several may be pending at once."""

    after_seconds: Final[float]


Command: TypeAlias = (
    StartWorker
    | EndWorker
    | RunTask
    | RunInGang
    | RevokeTask
    | StopTask
    | Prefetch
    | Preload
    | LoadWeights
    | DropWeights
    | CopyResult
    | ReleaseResult
    | ResolveJob
    | ScheduleTick
)
