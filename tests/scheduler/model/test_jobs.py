"""The tables of legal moves, the shape of a job, and which of its tasks have to run."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, TaskId
from modelpool.scheduler.model.jobs import (
    JOB_MOVES,
    TASK_MOVES,
    Job,
    JobStatus,
    TaskStatus,
    needed_tasks,
    problem_with,
)
from modelpool.scheduler.model.messages import WorkersWanted
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import WORKER_MOVES, WorkerState
from tests.scheduler.world import SPECS, decode, encode, image, sample

ENCODE = encode("cat")
SAMPLE = sample(ENCODE.task_id)
DECODE = decode(SAMPLE.task_id)


def job_of(*tasks, wanted=DECODE.task_id, given=()) -> Job:
    return Job(JobSpec(JobId("j"), tasks, wanted, given), 1, {task.task_id: task for task in tasks})


@pytest.mark.parametrize("moves", [JOB_MOVES, TASK_MOVES, WORKER_MOVES])
def test_everything_can_end_and_what_ended_stays(moves) -> None:
    """From every status some chain of legal moves leads to ENDED, and none leads away from it."""
    ended = next(status for status in moves if status.value == "ended")
    assert moves[ended] == frozenset()
    can_end = {ended}
    for _ in moves:
        can_end |= {status for status, after in moves.items() if after & can_end}
    assert can_end == set(moves)


@pytest.mark.parametrize(
    ("statuses", "moves"), [(JobStatus, JOB_MOVES), (TaskStatus, TASK_MOVES), (WorkerState, WORKER_MOVES)]
)
def test_the_tables_know_every_status(statuses, moves) -> None:
    assert set(moves) == set(statuses)
    assert {after for row in moves.values() for after in row} <= set(statuses)


def test_an_illegal_move_changes_nothing_and_tells_the_story() -> None:
    story = Story(None)
    job = job_of(ENCODE, SAMPLE, DECODE)
    story.begin(WorkersWanted(1.0, ()), 1.0)
    story.born(job)
    story.move(job, JobStatus.ENDED)
    with pytest.raises(AssertionError, match="ended -> active is no legal transition") as caught:
        story.move(job, JobStatus.ACTIVE)
    assert '"after": "ended"' in str(caught.value)
    assert job.status is JobStatus.ENDED


@pytest.mark.parametrize(
    ("held", "on_worker", "needed"),
    [
        (set(), set(), [ENCODE, SAMPLE, DECODE]),
        ({ENCODE.task_id}, set(), [SAMPLE, DECODE]),
        ({SAMPLE.task_id}, set(), [DECODE]),
        ({DECODE.task_id}, set(), []),
        ({ENCODE.task_id, SAMPLE.task_id, DECODE.task_id}, set(), []),
        (set(), {SAMPLE.task_id}, [SAMPLE, DECODE]),  # it has read its prompt already
        (set(), {DECODE.task_id}, [DECODE]),
    ],
)
def test_needed_tasks_lie_between_what_is_there_and_what_is_wanted(held, on_worker, needed) -> None:
    tasks, missing = needed_tasks(job_of(ENCODE, SAMPLE, DECODE), held, on_worker.__contains__)
    assert list(tasks.values()) == needed
    assert missing is None


def test_a_given_result_that_is_gone_is_missing_while_it_is_needed() -> None:
    job = job_of(SAMPLE, DECODE, given=(ENCODE.task_id,))
    assert needed_tasks(job, {ENCODE.task_id}, set().__contains__)[1] is None
    assert needed_tasks(job, set(), set().__contains__)[1] == ENCODE.task_id
    assert needed_tasks(job, {SAMPLE.task_id}, set().__contains__)[1] is None, "nobody reads it any more"


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (JobSpec(JobId("j"), (ENCODE,), TaskId("other")), "wanted: found other"),
        (JobSpec(JobId("j"), (SAMPLE, ENCODE), SAMPLE.task_id), f"needs {ENCODE.task_id}"),
        (JobSpec(JobId("j"), (ENCODE, ENCODE), ENCODE.task_id), "named twice"),
        (JobSpec(JobId("j"), (ENCODE,), ENCODE.task_id, (ENCODE.task_id,)), "also given"),
    ],
)
def test_a_malformed_job_is_told_what_is_wrong(spec, names) -> None:
    problem = problem_with(spec, SPECS)
    assert problem is not None
    assert names in problem


def test_an_unknown_component_is_named() -> None:
    problem = problem_with(JobSpec(JobId("j"), (ENCODE,), ENCODE.task_id), {})
    assert problem is not None
    assert "uses text" in problem


def test_a_whole_image_has_no_problem() -> None:
    assert problem_with(image("j"), SPECS) is None
