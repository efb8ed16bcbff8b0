"""What travels between the driver, the controller and the workers. Frozen values; no behaviour, no ray.

A `ResultRef` stands for a result in the object store. It is opaque here and in the controller: bytes go from worker to
worker and from worker to driver, and nothing in between looks into a reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from modelpool.actors.graph.orders import Order
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.results.outcomes import TaskSummary
from modelpool.pool.core.stage_params import Work
from modelpool.pool.specs.spec import ComponentKey, JobId, RunError, Rung, Stage, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.tables.messages import Outcome

ClientId = NewType("ClientId", str)  #: one driver's connection
SubmissionId = NewType("SubmissionId", str)  #: what one `submit` call brought
ResultRef: TypeAlias = object


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One attempt at one task, for a worker. Its inputs travel beside it, in the order of `task.needs`.

    run    counts all runs that a controller sent. Names this one: attempts of a task start at 1 again when the same
           work is asked for again later
    fresh  take all weights off the GPU first: an attempt before ran out of memory
    needed_next  components that are expected to be needed on that GPU afterwards, soonest first
    rungs  what was done about running out of memory before this attempt; its report begins with them
    """

    task: TaskSpec
    work: Work
    attempt: int
    run: int
    fresh: bool = False
    needed_next: tuple[ComponentKey, ...] = ()
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has done `step` of `steps` of the run it is at."""

    worker_id: WorkerId
    incarnation: int
    task_id: TaskId
    run: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Submission:
    """Images that a driver wants; a part of a submission, since long ones come in chunks.

    first_index  place of the first request in the whole submission
    hold         check and keep, but queue nothing before a part of the same submission comes without it
    user         who asks, for requests that do not say
    given        the images that the requests name, by the ids of `actors.graph.orders.given_id`
    """

    client_id: ClientId
    submission_id: SubmissionId
    first_index: int
    requests: tuple[GenerateRequest, ...]
    hold: bool = False
    user: str = ""
    given: Mapping[TaskId, ResultRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageSubmission:
    """One stage that a driver wants, with the results that it holds itself; nothing is run for those."""

    client_id: ClientId
    submission_id: SubmissionId
    order: Order
    given: Mapping[TaskId, ResultRef]
    user: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job's end, on the way to its driver. `result` is set when it succeeded, `error` when it failed.

    wanted  the task whose result it was for
    tasks   those of its tasks that ended well, in the order they were cut
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


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task on a worker, named by one of the jobs that want it. Steps are 0 before the first one is done."""

    submission_id: SubmissionId
    index: int
    job_id: JobId
    stage: Stage
    worker: WorkerId
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class News:
    """What a driver has not heard yet. Asking again with `cursor` says that all of it arrived.

    running  all tasks of the driver that run now: a level, not a change
    """

    cursor: int
    ended: tuple[JobEnded, ...]
    running: tuple[RunningTask, ...]


def job_id_for(submission_id: SubmissionId, index: int) -> JobId:
    """The id of the job at `index`."""
    return JobId(f"{submission_id}-{index}")
