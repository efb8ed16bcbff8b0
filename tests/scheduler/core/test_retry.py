"""Who may try again, how often, and what it takes for a lost result to fail a job."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import RunErrorKind, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.recovery import RULES, RetryRule, Verdict, verdict
from modelpool.scheduler.decisions.queue.demand import MOST_LOSSES
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, ReleaseResult, RunTask
from tests.scheduler.world import PAINT, Shell, alone, encode, image, sample


def test_the_table_knows_every_kind() -> None:
    assert set(RULES) == set(RunErrorKind)


@pytest.mark.parametrize("kind", [kind for kind in RunErrorKind if RULES[kind] is not RetryRule.ESCALATE])
def test_no_kind_is_tried_again_beyond_the_limit(kind: RunErrorKind) -> None:
    assert verdict(kind, False, 3, 3, 0, 2) is Verdict.FAIL


@pytest.mark.parametrize("kind", [RunErrorKind.BAD_INPUT, RunErrorKind.INTERNAL])
def test_some_errors_are_final(shell: Shell, kind: RunErrorKind) -> None:
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.finish("a", kind)
    assert shell.error("j").kind is kind
    assert "attempt 1" in shell.error("j").message


def test_some_errors_are_tried_again_up_to_the_limit() -> None:
    shell = Shell(SchedulerConfig(max_attempts=3))
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    for attempt in (1, 2, 3):
        assert shell.running[WorkerId("a")].command.attempt == attempt
        shell.finish("a", RunErrorKind.INPUT_LOST)
    assert shell.error("j").kind is RunErrorKind.INPUT_LOST
    assert "attempt 3" in shell.error("j").message


def test_a_report_of_an_earlier_attempt_is_dropped(shell: Shell) -> None:
    """1. An encode lost its inputs on a. 2. It is sent to a again. 3. The first report comes again: a runs on."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.finish("a", RunErrorKind.INPUT_LOST)
    assert shell.report(shell.old[-1]) == []
    assert shell.state.worker_table.workers[WorkerId("a")].task_id == encode("cat").task_id
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_after_running_out_of_memory_a_worker_evicts_everything_first(shell: Shell) -> None:
    """1. b has the text encoder, a runs a sample. 2. That is out of memory. 3. It is sent to b; the weights that the
    core then assumes there are its own alone."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a")
    shell.want("a", "b")
    shell.come_up("b", 64)
    shell.submit(alone("k", encode("dog")))
    shell.finish("b")
    shell.finish("a", RunErrorKind.OUT_OF_VRAM)
    assert shell.running[WorkerId("b")].command.fresh
    residency = shell.state.worker_table.workers[WorkerId("b")].residency
    assert residency is not None
    assert [entry.component for entry in residency.entries] == [PAINT]


def test_the_truth_of_a_report_replaces_what_was_assumed(shell: Shell) -> None:
    """A worker that ran out of memory tells of a smaller capacity; what does not fit in it any more fails."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat", activation_bytes=30)))
    shell.finish("a", RunErrorKind.OUT_OF_VRAM, residency=Residency(20))
    assert shell.state.worker_table.workers[WorkerId("a")].residency == Residency(20)
    assert "31 B" in shell.error("j").message
    assert "20 B" in shell.error("j").message


def test_a_lost_result_is_made_again_for_the_job_that_needs_it(shell: Shell) -> None:
    """1. The encode of j ends. 2. Its result is lost while the sample waits for a worker. 3. It is made again."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a")
    shell.lose("a")
    shell.lose_result(encode("cat").task_id)
    shell.come_up("a")
    assert shell.on("a") == encode("cat").task_id
    for _ in range(3):
        shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_result_that_is_lost_while_it_is_read_is_not_made_again(shell: Shell) -> None:
    """1. The sample runs, it has its prompt. 2. The encode result is lost. 3. Nothing happens; the job succeeds."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a")
    assert shell.lose_result(encode("cat").task_id) == []
    shell.finish("a")
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_result_that_was_lost_meanwhile_is_made_again_when_its_reader_is_tried_again(shell: Shell) -> None:
    """1. The sample runs. 2. The encode result is lost. 3. The worker is lost. 4. Encode first, then sample."""
    shell.workers(a=64, b=64)
    shell.submit(image("j"))
    shell.finish("a")
    shell.lose_result(encode("cat").task_id)
    shell.lose(next(iter(shell.running)))
    assert [run.command.task_id for run in shell.running.values()] == [encode("cat").task_id]


def test_input_lost_makes_every_input_again(shell: Shell) -> None:
    """1. A sample reports that an input is gone. 2. Its inputs are released and made again. 3. It runs again."""
    shell.workers(a=64)
    job = image("j")
    shell.submit(job)
    shell.finish("a")
    commands = shell.finish("a", RunErrorKind.INPUT_LOST)
    assert ReleaseResult(encode("cat").task_id) in commands
    assert shell.on("a") == encode("cat").task_id
    shell.finish("a")
    assert shell.on("a") == job.tasks[1].task_id


def test_a_result_that_is_lost_again_and_again_fails_the_job() -> None:
    """The sample waits for a large worker that does not come; its prompt is encoded and lost, far more often than tasks
    may fail: a machine that is lost says nothing about a task."""
    shell = Shell(SchedulerConfig(max_attempts=3))
    shell.want("small", "large")
    shell.come_up("small", 20)
    shell.submit(image("j", activation_bytes=30))
    for _ in range(MOST_LOSSES):
        assert shell.outcome("j") is None
        shell.finish("small")
        shell.lose_result(encode("cat").task_id)
    assert shell.error("j").kind is RunErrorKind.INPUT_LOST
    assert f"lost {MOST_LOSSES} times" in shell.error("j").message


def test_a_lost_given_result_fails_the_jobs_that_need_it(shell: Shell) -> None:
    """1. Two jobs wait for one given result, one of them gave it. 2. It is lost. 3. The giver fails and names it."""
    given = TaskId("from the driver")
    shell.submit(alone("j", sample(given), given=(given,)))
    shell.lose_result(given)
    assert shell.error("j").kind is RunErrorKind.INPUT_LOST
    assert "from the driver" in shell.error("j").message


def test_input_lost_of_a_given_result_fails_the_job(shell: Shell) -> None:
    shell.workers(a=64)
    given = TaskId("from the driver")
    shell.submit(alone("j", sample(given), given=(given,)))
    commands = shell.finish("a", RunErrorKind.INPUT_LOST)
    assert shell.error("j").kind is RunErrorKind.INPUT_LOST
    assert not any(isinstance(c, RunTask) for c in commands)


def test_losing_what_nobody_needs_does_nothing(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    assert shell.lose_result(encode("cat").task_id) == []
    assert shell.lose_result(TaskId("unheard of")) == []
