"""The memory of a job: each start with why, what was expected and what came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.specs.spec import JobId, NodeId, RunCost, RunError, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.core.history import JobHistory, find_job, history_of, with_node_names
from modelpool.scheduler.core.waiting_task import TaskWait
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.story_lines import StoryLine
from tests.scheduler.world import Shell, image


def history(shell: Shell, job: str) -> JobHistory:
    return history_of(shell.state, find_job(shell.state, job))


def test_each_start_is_told_with_what_was_expected_and_measured(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    why = shell.running[WorkerId("a")].command.why
    cost = RunCost(load_seconds=1.5, run_seconds=0.5, uploaded_bytes=4)
    shell.finish("a", cost=cost)
    seen = history(shell, "j")
    encoded, sampled, decoded = seen.tasks
    assert [task.stage for task in seen.tasks] == [Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]
    assert [task.status for task in seen.tasks] == ["ended", "running", "blocked"]
    (attempt,) = encoded.attempts
    assert (attempt.worker_id, attempt.attempt, attempt.incarnation, attempt.end) == ("a", 1, 1, "done")
    assert attempt.why == why
    assert attempt.why.upload_bytes == 4
    assert attempt.cost == cost
    assert attempt.ended_at is not None
    assert attempt.ended_at > attempt.at
    (running,) = sampled.attempts
    assert (running.end, running.ended_at, running.cost) == ("running", None, None)
    assert decoded.attempts == ()
    assert (seen.status, seen.ended_at, seen.complete) == ("active", None, True)


def test_an_ended_job_says_how_and_when(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("good", seed=1))
    shell.submit(image("unwanted", seed=2))
    shell.cancel("unwanted")
    for _ in range(3):
        shell.finish("a")
    good = history(shell, "good")
    assert (good.status, good.ended_at) == ("succeeded", shell.at)
    assert good.lines == shell.state.story(JobId("good"))
    assert history(shell, "unwanted").status == "cancelled"


def test_nodes_have_their_names_in_every_text(shell: Shell) -> None:
    """Reasons and events had the ids of nodes, 56 digits, where the table had their names."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a", RunErrorKind.INPUT_LOST)
    seen = history(shell, "j")
    task, *others = seen.tasks
    attempt = replace(task.attempts[0], node=NodeId("aa11"), error=RunError(RunErrorKind.INPUT_LOST, "aa11: gone"))
    wait = TaskWait("waits for files: aa11: absent; bb22: absent; aa112 and caa11 are others")
    lines = (StoryLine(1.0, "aa11 ends at 5.0 s", "j", "", "active", "lost on aa11"),)
    told = with_node_names(
        replace(seen, tasks=(replace(task, attempts=(attempt,), wait=wait), *others), lines=lines, note="on aa11"),
        {NodeId("aa11"): "big-box", NodeId("bb22"): "bb22", NodeId(""): "none"},
    )
    (named,) = told.tasks[0].attempts
    assert (named.node, named.error and named.error.message) == ("big-box", "big-box: gone")
    assert told.tasks[0].wait is not None
    assert told.tasks[0].wait.reason == ("waits for files: big-box: absent; bb22: absent; aa112 and caa11 are others")
    assert (told.lines[0].cause, told.lines[0].note) == ("big-box ends at 5.0 s", "lost on big-box")
    assert told.note == "on big-box"


def test_a_lost_worker_and_an_error_end_an_attempt(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.lose("a")
    shell.come_up("a")
    shell.finish("a", RunErrorKind.INPUT_LOST)
    shell.finish("a")
    ends = [(a.attempt, a.incarnation, a.end) for a in history(shell, "j").tasks[0].attempts]
    assert ends == [(1, 1, "worker_lost"), (2, 2, "input_lost"), (3, 2, "done")]
    failed = history(shell, "j").tasks[0].attempts[1]
    assert failed.error is not None
    assert failed.error.kind is RunErrorKind.INPUT_LOST


def test_a_task_that_an_earlier_job_had_made_shows_when_that_was(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    shell.finish("a")
    shell.submit(image("second", seed=2))
    shared = history(shell, "second").tasks[0]
    assert shared.attempts[0].end == "done"
    submitted_at = history(shell, "second").submitted_at
    assert submitted_at is not None
    assert shared.attempts[0].at < submitted_at


def test_a_run_that_is_stopped_says_so(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.cancel("j")
    seen = history(shell, "j")
    assert (seen.status, seen.tasks[0].attempts[0].end) == ("stopping", "stopping")
    shell.finish("a", RunErrorKind.CANCELLED)
    assert history(shell, "j").tasks[0].attempts[0].end == "cancelled"


def test_a_job_is_found_by_a_part_of_its_id(shell: Shell) -> None:
    shell.workers(a=64)
    with pytest.raises(UnknownName, match="unknown job 'x': this pool has had no jobs yet"):
        find_job(shell.state, "x")
    for name in ("3f2a-1", "3f2a-10", "77aa-1"):
        shell.submit(image(name, seed=len(shell.jobs)))
    assert find_job(shell.state, "77") == "77aa-1"
    assert find_job(shell.state, "3f2a-1") == "3f2a-1"  # whole ids come first
    with pytest.raises(UnknownName, match="'3f2a' could be any of 2: 3f2a-1, 3f2a-10"):
        find_job(shell.state, "3f2a")
    with pytest.raises(UnknownName, match=r"unknown job '77aa-2'; did you mean '77aa-1'\?"):
        find_job(shell.state, "77aa-2")
    with pytest.raises(UnknownName, match="unknown job ''"):
        find_job(shell.state, "")


def test_of_many_jobs_the_last_are_named(shell: Shell) -> None:
    shell.workers(a=64)
    for number in range(20):
        shell.submit(image(f"j{number:02}", seed=number))
    with pytest.raises(UnknownName, match=r"'k'; 20 are known, the latest are \.\.\. j12, .*, j19"):
        find_job(shell.state, "k")


def test_what_the_story_dropped_is_said_to_be_missing() -> None:
    shell = Shell(SchedulerConfig(story_length=6))
    shell.workers(a=64)
    shell.submit(image("old", seed=1))
    for _ in range(3):
        shell.finish("a")
    for number in range(5):
        shell.submit(image(f"new{number}", seed=number + 2))
        shell.cancel(f"new{number}")
    seen = history(shell, "old")
    assert (seen.status, seen.complete, seen.tasks, seen.submitted_at) == ("succeeded", False, (), None)


def test_asking_changes_nothing(shell: Shell) -> None:
    """Two cores with the same events, one of which is asked all the time, say the same."""
    other = Shell()
    for each in (shell, other):
        each.workers(a=64, b=20)
        for seed in range(4):
            each.submit(image(f"j{seed}", prompt=str(seed % 2), seed=seed))
            if each is shell:
                for job in each.jobs:
                    history(each, job)
                each.state.snapshot()
        while each.running:
            for name in list(each.running):
                each.finish(name)
            if each is shell:
                history(each, "j1")
    assert shell.state.log.lines() == other.state.log.lines()
