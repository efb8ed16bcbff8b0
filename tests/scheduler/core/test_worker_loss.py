"""Workers that come, go, come again, never come, or say strange things. One race a test; the docstring numbers it."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import EndWorker, Outcome, RunTask, StartFailed, StartWorker, WorkerDown
from modelpool.scheduler.model.workers import restart_delay_seconds
from tests.scheduler.world import Shell, alone, encode, image, sample

A = WorkerId("a")


def starts(commands) -> list[tuple[str, int, float]]:
    return [(c.worker_id, c.incarnation, c.delay_seconds) for c in commands if isinstance(c, StartWorker)]


def test_the_task_of_a_lost_worker_runs_again_elsewhere(shell: Shell) -> None:
    """1. An encode runs on a. 2. a is lost. 3. The encode goes to b as attempt 2, and a is started anew."""
    shell.workers(a=64, b=64)
    shell.submit(alone("j", encode("cat")))
    commands = shell.lose("a")
    assert starts(commands) == [("a", 2, 0.0)]
    assert (shell.on("b"), shell.running[WorkerId("b")].command.attempt) == (encode("cat").task_id, 2)


def test_a_task_that_loses_every_worker_fails_and_names_the_last() -> None:
    """The poisoned task is sent three times; then its job fails, and the next job runs."""
    shell = Shell(SchedulerConfig(max_attempts=3, crash_limit=3, start_retry_limit=10))
    shell.workers(a=64)
    shell.submit(alone("poison", encode("cat")))
    for _ in range(3):
        assert shell.outcome("poison") is None
        shell.lose("a")
        shell.come_up("a")
    error = shell.error("poison")
    assert error.kind is RunErrorKind.WORKER_LOST
    for part in ("on a", "attempt 3", "3 of at most 3", "power cut", encode("cat").task_id):
        assert part in error.message
    shell.submit(alone("fine", encode("dog")))
    shell.finish("a")
    assert shell.outcome("fine") is Outcome.SUCCEEDED


def test_restarts_slow_down_and_end() -> None:
    """0, 1, 2, 4 seconds; after the fifth failure in a row nobody starts it again, and all jobs fail."""
    shell = Shell(SchedulerConfig(start_retry_limit=5, start_backoff_limit_seconds=4.0))
    shell.want("a")
    shell.submit(image("j"))
    delays = [delay for _ in range(4) for _, _, delay in starts(shell.fail_start("a"))]
    assert delays == [0.0, 1.0, 2.0, 4.0]
    assert starts(shell.fail_start("a")) == []
    assert "no worker is left" in shell.error("j").message
    assert "a failed 5 times" in shell.error("j").message
    shell.submit(image("later"))
    assert "no worker is left" in shell.error("later").message


def test_delays_have_an_upper_limit() -> None:
    config = SchedulerConfig(start_backoff_seconds=1.0, start_backoff_limit_seconds=60.0)
    assert [restart_delay_seconds(config, n) for n in (1, 2, 3, 8, 9, 5000)] == [0.0, 1.0, 2.0, 60.0, 60.0, 60.0]


def test_a_completed_run_forgives_earlier_failures() -> None:
    """1. Two failed starts. 2. A run ends well. 3. The next loss is the first again: no delay, not given up."""
    shell = Shell(SchedulerConfig(start_retry_limit=3))
    shell.want("a")
    shell.fail_start("a")
    shell.fail_start("a")
    shell.come_up("a")
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    assert starts(shell.lose("a")) == [("a", 4, 0.0)]


def test_a_worker_that_only_crashes_is_given_up_though_it_came_up() -> None:
    shell = Shell(SchedulerConfig(start_retry_limit=3))
    shell.want("a", "b")
    for _ in range(3):
        shell.come_up("a")
        shell.lose("a")
    assert not any(name == "a" for name, _ in shell.starting)
    shell.submit(image("j"))
    assert shell.outcome("j") is None, "there is hope while b may come"


def test_a_given_up_worker_gets_a_new_chance_when_it_is_named_again() -> None:
    shell = Shell(SchedulerConfig(start_retry_limit=1))
    shell.want("a")
    shell.fail_start("a")
    assert starts(shell.want("a")) == []
    shell.want()
    assert starts(shell.want("a")) == [("a", 2, 0.0)]


def test_jobs_wait_while_no_worker_is_wanted(shell: Shell) -> None:
    shell.submit(alone("j", encode("cat")))
    assert shell.outcome("j") is None
    shell.workers(a=64)
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_an_unwanted_idle_worker_ends_at_once_and_a_busy_one_after_its_run(shell: Shell) -> None:
    """1. a runs a task, b is idle. 2. Neither is wanted. 3. b ends; a ends after its run, and takes no more."""
    shell.workers(a=64, b=64)
    shell.submit(image("j"))
    assert shell.want() == [EndWorker(WorkerId("b"), 1)]
    commands = shell.finish("a")
    assert EndWorker(A, 1) in commands
    assert not any(isinstance(c, RunTask) for c in commands)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_task_waits_for_a_warm_worker_unless_that_is_to_end(shell: Shell, wanted: bool) -> None:
    """1. Samples are known to take 10 s; a has their weights and is free in 1 s; b needs 6 s for the upload.
    2. A sample waits for a. 3. When a is no longer wanted, it starts on b."""
    given = TaskId("given")
    shell.workers(a=64)
    shell.submit(alone("first", sample(given, seed=1), given=(given,)))
    shell.finish("a", cost=RunCost(run_seconds=10.0))
    shell.submit(alone("second", sample(given, seed=2), given=(given,)))
    shell.want("a", "b")
    shell.come_up("b", link=1.0)
    shell.want(*(["a", "b"] if wanted else ["b"]))
    shell.tick(5.0)
    shell.submit(alone("third", sample(given, seed=3), given=(given,)))
    assert (shell.on("b") is None) == wanted


def test_a_busy_worker_that_is_wanted_again_stays(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.want()
    shell.want("a")
    commands = shell.finish("a")
    assert [type(c) for c in commands] == [RunTask]


def test_an_unwanted_worker_that_is_lost_is_not_replaced(shell: Shell) -> None:
    """1. a runs. 2. It is no longer wanted. 3. It is lost: no StartWorker; its task waits for a worker to come."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.want()
    assert shell.lose("a") == []
    shell.workers(b=64)
    assert shell.on("b") == encode("cat").task_id


def test_an_unwanted_worker_that_is_still_starting_ends_at_once(shell: Shell) -> None:
    """It may wait for a GPU that left the cluster: found when a pool did not shrink with its nodes. A late answer of it
    changes nothing, and wanted again it starts as another incarnation."""
    shell.want("a", "b")
    assert shell.want() == [EndWorker(A, 1), EndWorker(WorkerId("b"), 1)]
    assert not shell.state.worker_table.workers
    assert shell.come_up("a") == [EndWorker(A, 1)]
    assert shell.fail_start("b") == []
    assert starts(shell.want("a")) == [("a", 2, 0.0)]


def test_a_worker_that_appears_anew_was_lost(shell: Shell) -> None:
    """1. An encode runs on a, incarnation 1. 2. Incarnation 2 introduces itself; nobody told of the loss.
    3. The encode is sent again, as attempt 2, to incarnation 2."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    (run,) = shell.introduce("a", 2)
    assert isinstance(run, RunTask)
    assert (run.incarnation, run.attempt) == (2, 2)


def test_a_worker_that_introduces_itself_twice_is_replaced(shell: Shell) -> None:
    """It says that it lost everything, or it is an old message: only a new incarnation is free of doubt."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    commands = shell.introduce("a", 1)
    assert commands == [EndWorker(A, 1), StartWorker(A, 2, 0.0)]
    shell.come_up("a")
    assert shell.on("a") == encode("cat").task_id


def test_stale_news_of_an_old_incarnation_changes_nothing(shell: Shell) -> None:
    """1. a is lost and replaced. 2. WorkerDown and StartFailed of incarnation 1 come again. 3. a runs on."""
    shell.workers(a=64)
    shell.lose("a")
    shell.come_up("a")
    shell.submit(alone("j", encode("cat")))
    assert shell.feed(WorkerDown(shell.tick(), A, 1, "again")) == []
    assert shell.feed(StartFailed(shell.tick(), A, 1, "again")) == []
    assert shell.feed(StartFailed(shell.tick(), A, 2, "it is up")) == []
    assert shell.on("a") == encode("cat").task_id


def test_an_old_incarnation_that_comes_up_is_ended(shell: Shell) -> None:
    """1. A start fails, by a time-out say. 2. The next one is on its way. 3. The first comes up after all."""
    shell.want("a")
    shell.fail_start("a")
    assert shell.introduce("a", 1) == [EndWorker(A, 1)]
    shell.come_up("a")
    assert shell.state.worker_table.workers[A].incarnation == 2


def test_a_worker_that_is_gone_before_it_came_up_failed_to_start(shell: Shell) -> None:
    shell.want("a")
    shell.starting.clear()
    assert starts(shell.feed(WorkerDown(shell.tick(), A, 1, "crashed"))) == [("a", 2, 0.0)]


def test_a_late_report_of_a_lost_worker_is_dropped_and_its_result_released(shell: Shell) -> None:
    """1. An encode runs on a. 2. a is lost, nothing else is up. 3. The report of the run arrives after all.
    4. Its result is released, the encode runs again on the new a."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.lose("a")
    shell.report(shell.old[-1])
    assert shell.held == set()
    assert shell.outcome("j") is None
    shell.come_up("a")
    assert shell.on("a") == encode("cat").task_id


def test_a_duplicate_report_is_dropped(shell: Shell) -> None:
    """1. Encode of j ends on a, its sample starts there. 2. The report of the encode comes again."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a")
    running = shell.on("a")
    assert shell.report(shell.old[-1]) == []
    assert shell.on("a") == running


def test_no_number_is_used_twice_for_a_worker(shell: Shell) -> None:
    """1. a is wanted, up, no longer wanted. 2. It is wanted again: its number goes on from where it was."""
    shell.workers(a=64)
    shell.want()
    assert starts(shell.want("a")) == [("a", 2, 0.0)]
