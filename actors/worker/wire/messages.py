"""Messages between the driver, the controller and the workers. Frozen values; no behaviour, no ray.

A `ResultRef` refers to a result in the object store. It is opaque here and in the controller: bytes go from worker to
worker and from worker to driver. Only small results of jobs travel through the controller, packed, with their ends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, TypeAlias

from modelpool.actors.graph.common.stage_request import StageLike
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, SubmittedBatches
from modelpool.actors.outputs.results.outcomes import TaskSummary
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import Preview, PreviewWish
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.stage_params import ModelRef, Result, StageParams
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    ComponentKey,
    JobId,
    NodeId,
    OomStep,
    PastRun,
    Role,
    RunError,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.messages import Outcome

ClientId = NewType("ClientId", str)  #: the connection of one driver
_SENT_ID = re.compile(r"(.+)\.(\d+)\.(\d+)-(\d+)")

SubmissionId = NewType("SubmissionId", str)  #: one `submit` call
ResultRef: TypeAlias = object


@dataclass(frozen=True, slots=True)
class ExpectedFile(WireValue):
    """A file as the controller's machine has it; `fingerprint` as in `pool.models.loading.file_fingerprint`."""

    component: ComponentKey
    part: FilePart
    fingerprint: str


@dataclass(frozen=True, slots=True)
class FetchOrder(WireValue):
    """Files of sources that a run reads; the worker brings them to its node first.

    sets         the files of each model, LoRA, ControlNet and embedding
    peers        addresses of the file servers of other nodes
    needed_next  hashes of files that are expected to be needed on that node afterwards, soonest first
    """

    sets: tuple[tuple[RemoteFile, ...], ...]
    peers: tuple[str, ...] = ()
    needed_next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest(WireValue):
    """One run of a task, for a worker. Its inputs travel with it, in the order of `task.needs` and
    `task.input_names`; with `resume`, the `RunState` that it resumes from follows them.

    run    counts all runs that a controller sent, and identifies this one: attempts of a task start at 1 again when
           the same task is requested again later
    fresh  evict all weights first: an earlier attempt ran out of memory
    needed_next  components that are expected to be needed on that GPU afterwards, soonest first
    oom_steps  steps taken after running out of memory before this attempt; its report begins with them
    files  files of the task that this worker has not checked yet
    fetch  files to fetch first; None if all are local
    epoch  of the controller that sends it
    preview  the previews that somebody wants from the start; `want_previews` of the worker changes that
    own    for each of `task.needs`, the run of this worker that makes it, after which this one starts, or 0: that one
           is sent. Empty if all are sent. Without the result of such a run, this one does not start
    provisional  it reads what was made with files of unknown hashes: no state of it is saved
    gang   the workers that share the run. Each gets a request for it, with the same inputs; None: it runs alone
    """

    task: TaskSpec
    work: StageParams
    attempt: int
    run: int
    fresh: bool = False
    needed_next: tuple[ComponentKey, ...] = ()
    oom_steps: tuple[OomStep, ...] = ()
    files: tuple[ExpectedFile, ...] = ()
    resume: bool = False
    fetch: FetchOrder | None = None
    epoch: int = 0
    preview: PreviewWish | None = None
    own: tuple[int, ...] = ()
    provisional: bool = False
    gang: Gang | None = None


class RunMode(enum.Enum):
    """How a worker runs the requests of a call: one after the other, as one batch, or as a pass, which later runs join
    at a step."""

    IN_ORDER = "in order"
    BATCH = "batch"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class CallId(WireValue):
    """Identifies runs that were sent to a worker together.

    number  no other call of the controller in that mode has it; a later pass has a higher one
    epoch   of the controller that sends it
    """

    number: int
    mode: RunMode = RunMode.IN_ORDER
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class EndsWanted(WireValue):
    """A question for runs of a call that have ended.

    told   how many ends the asker has: the answer begins with the next one
    most   ends in the answer
    waits  for the end of a run if there is none to tell; otherwise the answer has what has ended by now
    """

    call: CallId
    told: int = 0
    most: int = 1
    waits: bool = False


class RunEnds(NamedTuple):
    """Ends of runs, in their order: the report and the result of each. Both are None for a run that was not started."""

    reports: tuple[TaskReport | None, ...] = ()
    results: tuple[Result | None, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadRequest(WireValue):
    """A load of weights on an idle worker, outside of runs.

    run    identifies it among the runs that a controller sent
    roles  what to load of `model`; `components` has the component of each: equal weights of two roles are one
    kept   components that must not be evicted for it
    files, fetch, epoch  as in `RunRequest`
    """

    run: int
    model: ModelRef
    roles: tuple[Role, ...]
    components: tuple[ComponentKey, ...]
    kept: tuple[ComponentKey, ...] = ()
    files: tuple[ExpectedFile, ...] = ()
    fetch: FetchOrder | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport(WireValue):
    """The end of a load, complete or not, and the weights on the GPU after it."""

    residency: Residency
    error: RunError | None = None


@dataclass(frozen=True, slots=True)
class StartedWorker(WireValue):
    """A worker that is up.

    residency  the weights on its GPU if it was taken over from an earlier controller; None if it has started
    past_runs  what it has measured for earlier controllers
    """

    spec: WorkerSpec
    residency: Residency | None = None
    past_runs: tuple[PastRun, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSaved(WireValue):
    """A worker saved the state of a sampling run after `step` of `steps`, and continues it. The state is part of the
    message: an object that the worker stored would be lost with the worker.

    epoch  of the controller that sent the run: the names of workers and the numbers of runs belong to one controller
    """

    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    attempt: int
    run: int
    step: int
    steps: int
    state_bytes: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StepDone(WireValue):
    """A worker has done `step` of `steps` of a run."""

    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    run: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class PreviewMade(WireValue):
    """A worker has made a preview of a run. It is part of the message, some KiB."""

    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    run: int
    preview: Preview


@dataclass(frozen=True, slots=True)
class Submission(WireValue):
    """Requests of a driver; one chunk of a submission, as long ones are split.

    first_index  index of the first request in the whole submission
    hold         check and keep, but queue nothing before a chunk of the same submission comes without it
    user         for requests that set none
    given        the input images of the requests, by their task ids
    previews     as `Controller.want_previews`, from the start
    batches      what it knows about the batch sizes of its requests
    """

    client_id: ClientId
    submission_id: SubmissionId
    first_index: int
    requests: tuple[GenerateRequest, ...]
    hold: bool = False
    user: str = ""
    given: Mapping[TaskId, ResultRef] = field(default_factory=dict)
    previews: PreviewWish | None = None
    batches: SubmittedBatches = NO_BATCHES


@dataclass(frozen=True, slots=True)
class StageSubmission(WireValue):
    """One stage for a driver, with the existing results that it reads; nothing is run for those."""

    client_id: ClientId
    submission_id: SubmissionId
    stage: StageLike
    given: Mapping[TaskId, ResultRef]
    user: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class JobEnded(WireValue):
    """The end of a job, for its driver. `result` is set if it succeeded, `error` if it failed; a driver may receive a
    small result itself, packed, in the place of its reference.

    wanted        the task that makes the result of the job
    tasks         its successful tasks, in the order of the task graph
    node          of the worker that made the result; NO_NODE if that is not known
    result_bytes  arrays of the result; 0 if that is not known
    """

    submission_id: SubmissionId
    index: int
    job_id: JobId
    wanted: TaskId
    outcome: Outcome
    recipe: Recipe | None
    result: ResultRef | None
    error: RunError | None
    tasks: tuple[TaskSummary, ...]
    node: NodeId = NO_NODE
    result_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TaskProgress(WireValue):
    """A task on a worker, named by one of the jobs that need it. Steps are 0 before the first one is done. `nodes` are
    the nodes of the job that it serves, see `JobGraph.nodes_of`."""

    submission_id: SubmissionId
    index: int
    job_id: JobId
    stage: Stage
    worker: WorkerId
    step: int
    steps: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodesEnded(WireValue):
    """A task of a job has ended, and with it the work that it does for nodes; the job may go on.

    nodes     see `JobGraph.nodes_of`
    ended     the nodes among them that have no later task
    worker    that ran it; "" if its result was found
    seconds   loading weights and running
    is_found  whether its result existed before the job, or is not needed because a later one did
    message   why it failed; "" if it did not. A later end of the same nodes replaces it: tasks are repeated
    """

    submission_id: SubmissionId
    index: int
    job_id: JobId
    nodes: tuple[str, ...]
    stage: Stage
    worker: str
    seconds: float
    ended: tuple[str, ...] = ()
    is_found: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class JobPreview(WireValue):
    """A preview of a running task, named by one of the jobs that need it."""

    submission_id: SubmissionId
    index: int
    job_id: JobId
    preview: Preview


@dataclass(frozen=True, slots=True)
class DriverEvents(WireValue):
    """The pending events of a driver. Calling again with `cursor` acknowledges all of them.

    running   all running tasks of the driver: a level, not a change
    previews  the newest of each of them that was not in an earlier answer
    nodes     ends of tasks of its workflows, and failures of tasks, that were not in an earlier answer: the latest ones
    """

    cursor: int
    ended: tuple[JobEnded, ...]
    running: tuple[TaskProgress, ...]
    previews: tuple[JobPreview, ...] = ()
    nodes: tuple[NodesEnded, ...] = ()


def job_id_for(submission_id: SubmissionId, index: int) -> JobId:
    """Return the id of the job at `index`."""
    return JobId(f"{submission_id}-{index}")


def journaled_id(job_id: str) -> str:
    """Return the id under which a journal has a job, NAME-PLACE, from its id in the pool, NAME.EPOCH.NUMBER-PLACE. The
    pool has one for each time that the job is sent. Other ids are returned as they are.
    """
    found = _SENT_ID.fullmatch(job_id)
    return job_id if found is None else f"{found[1]}-{found[4]}"


def sent_order(job_id: str) -> tuple[int, int]:
    """Return the epoch and the number of a job of a journal in the pool: larger for one that was sent later."""
    found = _SENT_ID.fullmatch(job_id)
    return (0, 0) if found is None else (int(found[2]), int(found[3]))
