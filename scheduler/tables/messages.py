"""Everything that enters (Event) and leaves (Command) the scheduler core. Frozen values without behaviour.

`at` is seconds on the shell's monotonic clock and the core's only notion of time. Every `RunTask` ends as exactly one
`RunEnded` or, when its worker is lost, as `WorkerDown`; every `StartWorker` as exactly one `WorkerUp` or `StartFailed`.
Commands are made with every event: their `__init__` is written out (`pool.specs.resident` says why).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from modelpool.pool.specs.sent import Sent
from modelpool.pool.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    JobSpec,
    RunError,
    Rung,
    TaskId,
    TaskReport,
    WorkerId,
    WorkerSpec,
)
from modelpool.scheduler.tables.placement_record import Why


class Outcome(Enum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WorkersWanted(Sent):
    """The pool should have exactly these workers. New ones are started; ones no longer named end when idle."""

    at: float
    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ComponentsKnown(Sent):
    """Sizes of components that jobs may name from now on. Naming one again with equal sizes is harmless."""

    at: float
    components: tuple[ComponentSpec, ...]


@dataclass(frozen=True, slots=True)
class Submitted(Sent):
    """A driver wants `job`."""

    at: float
    job: JobSpec


@dataclass(frozen=True, slots=True)
class CancelAsked(Sent):
    """A driver no longer wants the job. Unknown and ended jobs are ignored: cancelling is idempotent."""

    at: float
    job_id: JobId


@dataclass(frozen=True, slots=True)
class WorkerUp(Sent):
    """A worker answers, with nothing resident."""

    at: float
    worker: WorkerSpec


@dataclass(frozen=True, slots=True)
class StartFailed(Sent):
    """A `StartWorker` came to nothing."""

    at: float
    worker_id: WorkerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDown(Sent):
    """A worker that was up is gone, and all that was on its GPU."""

    at: float
    worker_id: WorkerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded(Sent):
    """A `RunTask` came to its end, well or badly."""

    at: float
    report: TaskReport


@dataclass(frozen=True, slots=True)
class ResultLost(Sent):
    """The result of an ended task can no longer be read (the machine that held it is gone)."""

    at: float
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class Tick(Sent):
    """Time has passed; nothing else has happened. Answers a `LookAgain`."""

    at: float


Event: TypeAlias = (
    WorkersWanted
    | ComponentsKnown
    | Submitted
    | CancelAsked
    | WorkerUp
    | StartFailed
    | WorkerDown
    | RunEnded
    | ResultLost
    | Tick
)


@dataclass(slots=True, init=False, unsafe_hash=True)
class StartWorker(Sent):
    """Start this worker after `delay_seconds` (a crash loop is slowed down)."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    delay_seconds: Final[float]

    def __init__(self, worker_id: WorkerId, incarnation: int, delay_seconds: float = 0.0) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.delay_seconds = delay_seconds


@dataclass(slots=True, init=False, unsafe_hash=True)
class EndWorker(Sent):
    """End this worker, and the run that hangs in it if there is one. No event answers."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]

    def __init__(self, worker_id: WorkerId, incarnation: int) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation


@dataclass(slots=True, init=False, unsafe_hash=True)
class Mate(Sent):
    """A task that runs in one batch with another, on the same worker and weights."""

    task_id: Final[TaskId]
    attempt: Final[int]

    def __init__(self, task_id: TaskId, attempt: int) -> None:
        self.task_id = task_id
        self.attempt = attempt


@dataclass(slots=True, init=False, unsafe_hash=True)
class RunTask(Sent):
    """Run this task there. `why` says what the choice was made of.

    needed_next  components that are expected to be needed on that GPU afterwards, soonest first; empty where nothing
                 has to make room
    fresh        take all weights off the GPU first: the task ran out of memory before
    rungs        what was done about that so far, in order
    mates        tasks that run in the same batch; each ends as a RunEnded of its own, and the worker is free after the
                 last of them
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_id: Final[TaskId]
    attempt: Final[int]
    why: Final[Why | None]
    needed_next: Final[tuple[ComponentKey, ...]]
    fresh: Final[bool]
    rungs: Final[tuple[Rung, ...]]
    mates: Final[tuple[Mate, ...]]

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        task_id: TaskId,
        attempt: int,
        why: Why | None = None,
        needed_next: tuple[ComponentKey, ...] = (),
        fresh: bool = False,
        rungs: tuple[Rung, ...] = (),
        mates: tuple[Mate, ...] = (),
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.task_id = task_id
        self.attempt = attempt
        self.why = why
        self.needed_next = needed_next
        self.fresh = fresh
        self.rungs = rungs
        self.mates = mates


@dataclass(slots=True, init=False, unsafe_hash=True)
class StopTask(Sent):
    """Ask a running task to stop at its next step. Its `RunEnded` still comes."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_id: Final[TaskId]
    attempt: Final[int]

    def __init__(self, worker_id: WorkerId, incarnation: int, task_id: TaskId, attempt: int) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.task_id = task_id
        self.attempt = attempt


@dataclass(slots=True, init=False, unsafe_hash=True)
class Prefetch(Sent):
    """Bring the files of these components into the memory of that worker's machine while its run goes on: a task that
    needs them is expected there next. Never waited for; no event answers."""

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    components: Final[tuple[ComponentKey, ...]]

    def __init__(self, worker_id: WorkerId, incarnation: int, components: tuple[ComponentKey, ...]) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.components = components


@dataclass(slots=True, init=False, unsafe_hash=True)
class UploadAhead(Sent):
    """Bring the weights of these tasks, one after the other, to that GPU while the run there goes on, as far as there
    is room beside it (`pool.plan.preload_plan`), in place of what was asked for before. It ends with the run. Never
    waited for; no
    event answers.

    needed_next  components that are expected to be needed there after the run, soonest first
    kept         those that do not leave for it: they are needed sooner
    """

    worker_id: Final[WorkerId]
    incarnation: Final[int]
    task_ids: Final[tuple[TaskId, ...]]
    needed_next: Final[tuple[ComponentKey, ...]]
    kept: Final[tuple[ComponentKey, ...]]

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        task_ids: tuple[TaskId, ...],
        needed_next: tuple[ComponentKey, ...] = (),
        kept: tuple[ComponentKey, ...] = (),
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.task_ids = task_ids
        self.needed_next = needed_next
        self.kept = kept


@dataclass(slots=True, init=False, unsafe_hash=True)
class ReleaseResult(Sent):
    """Nothing that is known will read this result again."""

    task_id: Final[TaskId]

    def __init__(self, task_id: TaskId) -> None:
        self.task_id = task_id


@dataclass(slots=True, init=False, unsafe_hash=True)
class ResolveJob(Sent):
    """The job has ended; exactly once a job. `result` is set when it succeeded."""

    job_id: Final[JobId]
    outcome: Final[Outcome]
    result: Final[TaskId | None]
    error: Final[RunError | None]

    def __init__(
        self, job_id: JobId, outcome: Outcome, result: TaskId | None = None, error: RunError | None = None
    ) -> None:
        self.job_id = job_id
        self.outcome = outcome
        self.result = result
        self.error = error


@dataclass(slots=True, init=False, unsafe_hash=True)
class LookAgain(Sent):
    """Send a `Tick` after so long: a task waits for a busy worker, and the run there may take longer than expected; or
    a run must be over by then. Several may be on their way at once."""

    after_seconds: Final[float]

    def __init__(self, after_seconds: float) -> None:
        self.after_seconds = after_seconds


Command: TypeAlias = (
    StartWorker | EndWorker | RunTask | StopTask | Prefetch | UploadAhead | ReleaseResult | ResolveJob | LookAgain
)
