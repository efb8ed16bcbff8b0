"""The history of one job for users: each start of its tasks, the reason, the expected and the measured cost.

Computed from the story on request; stores and decides nothing, and does not touch the core: a request changes no later
decision. Entries that the story has dropped are missing; `complete` is then False.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import UnknownName, unknown_name
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    ComponentKey,
    JobId,
    JobSpec,
    NodeId,
    RunCost,
    RunError,
    Stage,
    TaskId,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.core.waiting_task import TaskWait, wait_of
from modelpool.scheduler.model.jobs import WAITS_FOR_VERDICT, TaskStatus
from modelpool.scheduler.model.messages import RunEnded, Submitted, TaskRevoked
from modelpool.scheduler.model.placement_record import TaskStart, Why
from modelpool.scheduler.model.story import Story, StoryBySubject, StoryEntry
from modelpool.scheduler.model.story_lines import StoryLine

if TYPE_CHECKING:
    from modelpool.scheduler.core.state import SchedulerState

#: known jobs that the error for an unknown one names
MOST_NAMED = 8
_ON_WORKER = (TaskStatus.RUNNING, TaskStatus.STOPPING)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a task.

    why       the placement record: expected seconds and bytes
    ended_at  None while it runs
    cost      the cost measured by the worker; None while it runs, and if the worker was lost
    end       "running", "stopping", "done", the kind of its error, "worker_lost" or "revoked"
    node      the machine of the worker: its id, or its display name after `with_node_names`; "" if unknown
    """

    attempt: int
    worker_id: WorkerId
    incarnation: int
    at: float
    why: Why
    ended_at: float | None = None
    cost: RunCost | None = None
    error: RunError | None = None
    end: str = TaskStatus.RUNNING.value
    node: NodeId = NO_NODE


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """One task of the job.

    status     "blocked", "ready", "queued", "running", "stopping"; "ended" if no live job needs it to run any more
    attempts   oldest first, including attempts for an earlier job that wanted the same task
    passed     how often later tasks went first while it waited, divided by the workers that are up
    held_back  it is ready and waits because its user is at the limit of running tasks
    wait       what it waits for; None if it has started, or ended
    """

    task_id: TaskId
    stage: Stage
    components: tuple[ComponentKey, ...]
    status: str
    attempts: tuple[Attempt, ...] = ()
    passed: float = 0.0
    held_back: bool = False
    wait: TaskWait | None = None


@dataclass(frozen=True, slots=True)
class JobHistory:
    """One job.

    status        "active", "stopping", or how it ended: "succeeded", "failed", "cancelled"
    at            time of this request
    submitted_at  None if no longer known; the request of an ended job is then missing too
    tasks         in the order of the job
    lines         story lines of the job and its tasks up to its end, oldest first
    complete      False if parts are no longer known
    batch_size    images of the forward passes of its tasks; 1: of one image, and 0 if its request is no longer known
    batch_reason  why it is that; "" if the request said so
    """

    job_id: JobId
    status: str
    at: float
    submitted_at: float | None = None
    ended_at: float | None = None
    note: str = ""
    priority: int = 0
    user: str = ""
    deadline: float | None = None
    tasks: tuple[TaskHistory, ...] = ()
    lines: tuple[StoryLine, ...] = ()
    complete: bool = True
    batch_size: int = 0
    batch_reason: str = ""


def find_job(state: SchedulerState, text: str, others: Iterable[JobId] = ()) -> JobId:
    """Return the job with id `text`, or the only id that contains `text`, among jobs of the core and `others`.
    Raises UnknownName with the known jobs.
    """
    known = dict.fromkeys((*state.demand.ended, *state.demand.jobs, *others))
    exact = JobId(text)
    if exact in known:
        return exact
    found = [job_id for job_id in known if text and text in job_id]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownName(f"job {text!r} could be any of {len(found)}: {_some(found)}")
    if not known:
        raise UnknownName(f"unknown job {text!r}: this pool has had no jobs yet")
    if len(known) <= MOST_NAMED:
        raise unknown_name("job", text, known)
    raise UnknownName(f"unknown job {text!r}; {len(known)} are known, the latest are {_some(known)}")


def history_of(
    state: SchedulerState, job_id: JobId, now: float | None = None, log: Story | StoryBySubject | None = None
) -> JobHistory:
    """Return the history of a job that `find_job` found, at `now` or else at the last event. `log` is the story of
    `state`, by subject for the histories of many jobs.
    """
    log = log or state.log
    live = state.demand.jobs.get(job_id)
    mine = list(log.entries({job_id}))
    status = live.status.value if live is not None else state.demand.ended[job_id].value
    submitted = next((e for e in mine if e[3] is None), None)
    submitted_at = None if submitted is None else submitted[0]
    spec = live.spec if live is not None else None
    if submitted is not None and isinstance(submitted[1], Submitted):
        spec = submitted[1].job
        if submitted[1].submitted_at is not None:
            submitted_at = submitted[1].submitted_at
    ended = None if live is not None else next((e for e in reversed(mine) if e[3] is not e[4]), None)
    note = str(ended[5]) if ended is not None and isinstance(ended[5], str) else ""
    if live is not None and live.waits_for_verdict:
        note = WAITS_FOR_VERDICT
    history = JobHistory(
        job_id=job_id,
        status=status,
        at=state.at if now is None else now,
        submitted_at=submitted_at,
        ended_at=None if ended is None else ended[0],
        note=note,
        complete=submitted is not None,
    )
    return history if spec is None else _with_tasks(history, spec, state, log)


def with_node_names(history: JobHistory, names: Mapping[NodeId, str]) -> JobHistory:
    """Return `history` with display names of nodes instead of their ids, as far as they are known: also in its texts,
    such as the reason why a machine has no file, and the event that ended a run."""
    known = {str(node): name for node, name in names.items() if node and name and name != node}
    if not known:
        return history
    ids = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})(?![\w-])")

    def named(text: str) -> str:
        return ids.sub(lambda found: known[found[0]], text)

    def attempt_of(attempt: Attempt) -> Attempt:
        error = None if attempt.error is None else replace(attempt.error, message=named(attempt.error.message))
        return replace(attempt, node=NodeId(known.get(attempt.node, attempt.node)), error=error)

    tasks = tuple(
        replace(
            task,
            attempts=tuple(map(attempt_of, task.attempts)),
            wait=None if task.wait is None else replace(task.wait, reason=named(task.wait.reason)),
        )
        for task in history.tasks
    )
    lines = tuple(replace(line, cause=named(line.cause), note=named(line.note)) for line in history.lines)
    return replace(history, tasks=tasks, lines=lines, note=named(history.note))


def _with_tasks(history: JobHistory, spec: JobSpec, state: SchedulerState, log: Story | StoryBySubject) -> JobHistory:
    by_task: dict[str, list[StoryEntry]] = {task.task_id: [] for task in spec.tasks}
    until = (
        inf if history.ended_at is None else history.ended_at
    )  # what tasks did for other jobs later is not part of it
    for entry in log.entries(by_task):
        if entry[0] <= until:
            by_task[entry[2]].append(entry)
    return replace(
        history,
        priority=spec.priority,
        user=spec.user,
        deadline=spec.deadline,
        tasks=tuple(_task(task, by_task[task.task_id], state, history.at) for task in spec.tasks),
        lines=tuple(line for line in log.lines({history.job_id, *by_task}) if line.at <= until),
        batch_size=max((task.batch_size for task in spec.tasks), default=1),
        batch_reason=spec.batch_reason,
    )


def _task(spec: TaskSpec, entries: Iterable[StoryEntry], state: SchedulerState, now: float) -> TaskHistory:
    task = state.demand.tasks.get(spec.task_id)
    return TaskHistory(
        task_id=spec.task_id,
        stage=spec.stage,
        components=tuple(use.component for use in spec.uses),
        status=TaskStatus.ENDED.value if task is None else task.status.value,
        attempts=_attempts(entries),
        passed=0.0 if task is None else task.passed,
        held_back=task is not None and task.held_back,
        wait=None if task is None else wait_of(state, task, now),
    )


def _attempts(entries: Iterable[StoryEntry]) -> tuple[Attempt, ...]:
    """The starts of one task, each with the transition that ended it."""
    attempts: list[Attempt] = []
    for at, cause, _, before, after, note in entries:
        if isinstance(note, TaskStart):
            attempts.append(Attempt(note.attempt, note.worker_id, note.incarnation, at, note.why, node=note.node))
        elif attempts and attempts[-1].ended_at is None and before is not after:
            if after in _ON_WORKER:
                attempts[-1] = replace(attempts[-1], end=after.value)
            else:
                attempts[-1] = _ended(attempts[-1], at, cause)
    return tuple(attempts)


def _ended(attempt: Attempt, at: float, cause: object) -> Attempt:
    if isinstance(cause, TaskRevoked):  # it was believed to have started
        return replace(attempt, ended_at=at, end="revoked")
    if not isinstance(cause, RunEnded):
        return replace(attempt, ended_at=at, end="worker_lost")
    report = cause.report
    end = "done" if report.error is None else report.error.kind.value
    return replace(attempt, ended_at=at, cost=report.cost, error=report.error, end=end)


def _some(job_ids: Iterable[JobId]) -> str:
    """The latest of them, by name."""
    names = list(job_ids)
    last = ", ".join(names[-MOST_NAMED:])
    return last if len(names) <= MOST_NAMED else f"... {last}"
