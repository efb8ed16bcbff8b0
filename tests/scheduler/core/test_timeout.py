"""Runs that hang: asked to stop, then ended with their worker; and the Ticks that this takes."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import EndWorker, Outcome, RunTask, ScheduleTick, StartWorker, StopTask
from tests.scheduler.world import Shell, alone, encode, sample

A = WorkerId("a")


def hanging(**limits) -> Shell:
    """An encode that runs on the only worker, and may take 60 s."""
    shell = Shell(SchedulerConfig(run_timeout_seconds=60.0, stop_grace_seconds=5.0, **limits))
    shell.workers(a=64)
    commands = shell.submit(alone("j", encode("cat")))
    assert [type(c) for c in commands] == [RunTask, ScheduleTick]
    assert commands[1] == ScheduleTick(60.0)
    return shell


def test_a_run_that_takes_too_long_is_asked_to_stop_and_runs_again() -> None:
    """It answers: its worker stays. That it took too long counts."""
    shell = hanging()
    assert [type(c) for c in shell.tick_comes()] == [StopTask, ScheduleTick]
    (again,) = shell.finish("a", RunErrorKind.CANCELLED)
    assert isinstance(again, RunTask)
    assert (again.attempt, again.incarnation) == (2, 1)
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_result_that_comes_in_the_grace_is_taken() -> None:
    shell = hanging()
    shell.tick_comes()
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_run_that_does_not_stop_is_ended_with_its_worker() -> None:
    shell = hanging()
    shell.tick_comes()
    assert shell.tick_comes() == [EndWorker(A, 1), StartWorker(A, 2, 0.0)]
    shell.come_up("a")
    assert shell.on("a") == encode("cat").task_id
    assert shell.state.demand.tasks[encode("cat").task_id].crashed == (A,)


def test_a_run_that_hangs_each_time_is_quarantined_and_the_pool_goes_on() -> None:
    shell = hanging(crash_limit=2)
    for _ in range(2):
        shell.tick_comes()
        shell.tick_comes()
        shell.come_up("a")
    assert shell.error("j").kind is RunErrorKind.WORKER_LOST
    assert "did not stop" in shell.error("j").message
    assert "quarantined" in shell.error("j").message
    shell.submit(alone("fine", encode("dog")))
    assert shell.on("a") == encode("dog").task_id


def test_a_cancelled_run_that_hangs_is_ended_too_and_asked_to_stop_once() -> None:
    shell = hanging()
    assert [type(c) for c in shell.cancel("j")] == [StopTask, ScheduleTick]
    commands = shell.tick_comes()
    assert not any(isinstance(c, StopTask) for c in commands)
    assert EndWorker(A, 1) in commands
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_cancelled_run_that_hangs_is_ended_without_a_time_out_too(shell: Shell) -> None:
    """Found in a review: the job was never resolved, and the worker never replaced."""
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    shell.cancel("j")
    shell.tick_comes()
    assert shell.outcome("j") is Outcome.CANCELLED
    assert (A, 2) in shell.starting


def test_a_cancel_in_the_grace_does_not_ask_again() -> None:
    shell = hanging()
    shell.tick_comes()
    assert shell.cancel("j") == []
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is Outcome.CANCELLED


def test_without_a_time_out_nothing_is_watched(shell: Shell) -> None:
    shell.workers(a=64)
    assert [type(c) for c in shell.submit(alone("j", encode("cat")))] == [RunTask]


def test_an_earlier_tick_is_asked_for_beside_a_later_one() -> None:
    """A run on b that began first is due first, although the Tick of a later due was asked for before."""
    shell = hanging()
    shell.tick(30.0)
    shell.want("a", "b")
    shell.come_up("b")
    shell.submit(alone("k", encode("dog")))
    state = shell.state
    assert state.ticks.due is not None
    before = state.ticks.due
    state.ticks.request(1.0, state.at)
    (command,) = state._out
    state._out.clear()
    assert isinstance(command, ScheduleTick)
    assert state.ticks.due == state.at + 1.0 < before


def test_a_row_that_hangs_keeps_its_pass_neither_open_nor_for_ever() -> None:
    """The second row joined later, and has more time. Nobody joins a row that was asked to stop and did not leave, and
    no Tick comes before something is due. Found: others joined until the pass was full, each of which put off the end
    of the worker; and Ticks that were due in the past came at once, without end."""
    shell = Shell(SchedulerConfig(run_timeout_seconds=60.0, stop_grace_seconds=5.0))
    shell.workers(a=64)
    shell.submit(alone("first", sample(seed=1, batch_size=4)))
    began = shell.at
    shell.at += 29.0
    (joined, *_) = shell.submit(alone("second", sample(seed=2, batch_size=4)))
    assert isinstance(joined, RunTask)
    assert joined.enters
    assert [type(c) for c in shell.tick_comes()] == [StopTask, ScheduleTick]
    assert shell.at - began == 240.0, "60 s for each row"
    late = shell.submit(alone("third", sample(seed=3, batch_size=4)))
    assert not any(isinstance(c, RunTask) for c in late), "it joins what hangs"
    asked = shell.tick_comes()
    assert (shell.at - began, any(isinstance(c, EndWorker) for c in asked)) == (270.0, False)
    ended = shell.tick_comes()
    assert (shell.at - began, any(isinstance(c, EndWorker) for c in ended)) == (275.0, True)
