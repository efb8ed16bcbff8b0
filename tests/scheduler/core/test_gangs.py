"""Runs that several workers share: each member ends by itself, and whatever happens to one, the task resumes."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, RunErrorKind, TaskId, UserId, WorkerId
from modelpool.scheduler.decisions.placement.gang_load import EXPECTED_SECONDS
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.kept_states import KeptState
from modelpool.scheduler.model.messages import (
    Command,
    EndWorker,
    LossCause,
    Outcome,
    RunInGang,
    RunTask,
    StopTask,
)
from tests.scheduler.world import STEPS, Shell, alone, sample

GIVEN = TaskId("given:1")
#: long steps: sharing pays
SECONDS = 400.0


def pool(workers: str = "abcd", **config: float | bool | None) -> Shell:
    """Workers on one machine, which have the weights."""
    shell = Shell(SchedulerConfig(story_length=None, **config))  # type: ignore[arg-type]
    shell.want(*workers)
    for name in workers:
        shell.come_up(name, node="n1")
    return shell


def video(name: str, degrees: tuple[int, ...] = (1, 2, 4), seed: int = 0, **fields: object) -> JobSpec:
    task = sample(GIVEN, seed=seed, run_seconds=SECONDS, degrees=degrees)
    return JobSpec(JobId(name), (task,), task.task_id, (GIVEN,), **fields)  # type: ignore[arg-type]


def parts(commands: list[Command]) -> list[RunInGang]:
    return [command for command in commands if isinstance(command, RunInGang)]


def names(commands: list[Command]) -> list[str]:
    return [command.run.worker_id for command in parts(commands)]


def stops(commands: list[Command]) -> dict[str, bool]:
    found: dict[str, bool] = {c.worker_id: c.keep_state for c in commands if isinstance(c, StopTask)}
    assert len(found) == sum(isinstance(c, StopTask) for c in commands), "asked twice"
    return found


def test_idle_workers_share_a_run_and_each_is_free_when_it_has_ended() -> None:
    shell = pool()
    commands = parts(shell.submit(video("j")))
    assert [(c.run.worker_id, c.rank, len(c.members)) for c in commands] == [
        ("a", 0, 4), ("b", 1, 4), ("c", 2, 4), ("d", 3, 4),
    ]  # fmt: skip
    shell.finish("b")
    assert shell.outcome("j") is None
    assert shell.state.worker_table.workers[WorkerId("b")].is_idle
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED
    assert not shell.state.worker_table.workers[WorkerId("c")].is_idle
    shell.finish("c")
    shell.finish("d", RunErrorKind.GANG_BROKEN)  # what it says then is of no interest
    assert not shell.state.gangs.runs
    assert all(worker.is_idle for worker in shell.state.worker_table.workers.values())


def test_under_load_a_run_has_one_worker_and_a_deadline_gets_more() -> None:
    shell = pool(send_ahead_seconds=0.0)
    shell.submit(video("known"))
    for name in "abcd":
        shell.finish(name, cost=RunCost(run_seconds=SECONDS / 4))
    shell.cordon("a")
    shell.cordon("b")
    for seed in range(1, 4):
        assert not parts(shell.submit(video(f"j{seed}", seed=seed, batch="all"))) or seed == 1
    for name in list(shell.running):
        shell.cancel("j1")
        shell.finish(name, RunErrorKind.CANCELLED)
    running = sorted(run.rank is None for run in shell.running.values())
    assert running == [True, True], "two tasks wait for two workers: each has one"


@pytest.mark.parametrize("lost", ["a", "c"])
def test_after_a_loss_the_others_resume_from_their_states_on_as_many_as_are_left(lost: str) -> None:
    shell = pool()
    shell.submit(video("j"))
    commands = shell.lose(lost, LossCause.KILLED)
    left = [name for name in "abcd" if name != lost]
    assert stops(commands) == dict.fromkeys(left, True)
    for place, name in enumerate(left):
        commands = shell.finish(name, RunErrorKind.GANG_BROKEN, step=2 if place else 3)
    assert len(names(commands)) == 2
    assert set(names(commands)) <= set(left)
    assert all(command.run.resume for command in parts(commands))
    task = next(iter(shell.state.demand.tasks.values()))
    assert task.kept is not None
    assert task.kept == KeptState(3, STEPS, 1, task.kept.node)
    assert task.failures == 0
    for name in names(commands):
        shell.finish(name)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_member_without_memory_ends_the_run_and_the_task_goes_on_alone() -> None:
    shell = pool("ab")
    shell.submit(video("j", (1, 2)))
    assert stops(shell.finish("b", RunErrorKind.OUT_OF_VRAM)) == {"a": True}
    shell.stop_at("a", 2)
    (run,) = shell.running.values()
    assert run.rank is None
    assert run.command.resume
    assert next(iter(shell.state.demand.tasks.values())).memory_failures
    shell.finish(run.command.worker_id)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_task_that_never_runs_alone_tries_more_workers_after_running_out_of_memory() -> None:
    shell = pool("abcd")
    commands = shell.submit(video("j", (2, 4)))
    shell.finish(names(commands)[0])
    for name in names(commands)[1:]:
        shell.finish(name)
    shell.cordon("c")
    shell.cordon("d")
    commands = shell.submit(video("k", (2, 4), seed=1))
    assert len(names(commands)) == 2
    shell.uncordon("c")
    shell.uncordon("d")
    first, second = names(commands)
    shell.finish(first, RunErrorKind.OUT_OF_VRAM)
    commands = shell.finish(second, RunErrorKind.GANG_BROKEN, step=1)
    assert len(names(commands)) == 4


def test_a_cancelled_run_stops_on_every_worker() -> None:
    shell = pool("ab")
    shell.submit(video("j", (1, 2)))
    assert stops(shell.cancel("j")) == {"a": False, "b": False}
    shell.finish("b", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is None
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_machine_that_ends_stops_a_shared_run_with_its_state() -> None:
    for case in ("notice", "operator"):
        shell = pool("ab")
        shell.submit(video("j", (1, 2)))
        commands = shell.drain("n1", 4.0) if case == "notice" else shell.cordon("n1", 4.0)
        assert stops(commands) == {"a": True, "b": True}, case
        shell.stop_at("b", 2)
        shell.stop_at("a", 2)
        task = next(iter(shell.state.demand.tasks.values()))
        assert task.kept is not None, case
        assert task.failures == 0, case


def test_a_restart_of_any_member_stops_the_shared_run() -> None:
    shell = pool("ab")
    shell.submit(video("j", (1, 2)))
    assert stops(shell.restart("b", 1.0)) == {"a": True, "b": True}


def test_a_run_is_stopped_for_a_task_of_higher_priority_on_all_workers() -> None:
    shell = pool("ab", preemption_wait_seconds=5.0)
    shell.submit(video("known", (1, 2)))
    for name in "ab":
        shell.finish(name, cost=RunCost(run_seconds=SECONDS / 2))
    shell.submit(video("j", (1, 2), seed=1))
    commands = shell.submit(alone("urgent", sample(GIVEN, seed=9), priority=1, given=(GIVEN,)))
    assert stops(commands) == {"a": True, "b": True}


def test_a_member_that_does_not_end_is_ended() -> None:
    shell = pool("ab", stop_grace_seconds=5.0)
    shell.submit(video("j", (1, 2)))
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED
    shell.tick(30.0)
    ended = [c for c in shell.tick_comes() if isinstance(c, EndWorker)]
    assert [command.worker_id for command in ended] == ["b"]
    assert not shell.state.gangs.runs


def test_all_members_are_charged_to_the_user() -> None:
    shell = pool("ab")
    shell.submit(video("j", (1, 2), user=UserId("ann")))
    for name in "ab":
        shell.finish(name, cost=RunCost(run_seconds=7.0, load_seconds=1.0))
    assert shell.state.demand.fair_queue.shares.accounts[UserId("ann")].seconds == 16.0


def test_a_run_that_breaks_twice_without_a_cause_goes_on_alone() -> None:
    shell = pool("ab")
    commands = shell.submit(video("j", (1, 2)))
    for step in (1, 2):
        assert len(names(commands)) == 2, step
        shell.finish("a", RunErrorKind.GANG_BROKEN, step=step)
        commands = shell.finish("b", RunErrorKind.GANG_BROKEN, step=step)
    (run,) = [command for command in commands if isinstance(command, RunTask)]
    assert run.resume


def test_a_run_that_broke_after_a_step_has_not_failed() -> None:
    """Each break was a failure: after three members that were stopped for a while, a job was lost."""
    shell = pool("ab")
    commands = shell.submit(video("j", (2,)))
    for step in range(1, STEPS):
        assert len(names(commands)) == 2, step
        shell.finish("a", RunErrorKind.GANG_BROKEN, step=step)
        commands = shell.finish("b", RunErrorKind.GANG_BROKEN, step=step)
    assert next(iter(shell.state.demand.tasks.values())).failures == 0
    for _ in range(shell.config.max_attempts):
        assert shell.outcome("j") is None
        shell.finish("a", RunErrorKind.GANG_BROKEN, step=STEPS - 1)
        shell.finish("b", RunErrorKind.GANG_BROKEN)
    assert shell.outcome("j") is Outcome.FAILED, "it does not go on"


def test_workers_are_held_for_a_run_that_needs_several_and_short_runs_fill_the_gap() -> None:
    shell = pool("ab", send_ahead_seconds=0.0)
    for seed in (1, 2):
        shell.submit(alone(f"known{seed}", sample(GIVEN, seed=seed), given=(GIVEN,)))
    shell.finish("a", cost=RunCost(run_seconds=10.0))
    shell.finish("b", cost=RunCost(run_seconds=10.0))
    shell.submit(alone("long", sample(GIVEN, seed=3, run_seconds=80.0), given=(GIVEN,)))
    shell.submit(video("j", (2,)))
    assert shell.state.gang_starts.held_for is not None
    idle = "b" if shell.on("a") else "a"
    busy = "a" if shell.on("a") else "b"
    shell.submit(alone("too long", sample(GIVEN, seed=4, run_seconds=90.0), given=(GIVEN,)))
    assert shell.on(idle) is None, "it would keep the shared run waiting"
    shell.submit(alone("short", sample(GIVEN, seed=5, run_seconds=11.0), given=(GIVEN,)))
    assert shell.on(idle) is not None
    shell.finish(idle, cost=RunCost(run_seconds=11.0))
    commands = shell.finish(busy, cost=RunCost(run_seconds=80.0))
    assert len(names(commands)) == 2
    for name in "ab":
        shell.finish(name)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_workers_are_held_no_longer_than_the_task_waits_that_they_are_held_for() -> None:
    shell = pool("ab", send_ahead_seconds=0.0)
    for seed in (1, 2):
        shell.submit(alone(f"known{seed}", sample(GIVEN, seed=seed), given=(GIVEN,)))
    for name in "ab":
        shell.finish(name, cost=RunCost(run_seconds=10.0))
    shell.submit(alone("long", sample(GIVEN, seed=3, run_seconds=80.0), given=(GIVEN,)))
    shell.submit(video("j", (2,)))
    shell.submit(alone("waits", sample(GIVEN, seed=4, run_seconds=90.0), given=(GIVEN,)))
    idle = "b" if shell.on("a") else "a"
    assert shell.on(idle) is None
    shell.cancel("j")
    assert shell.state.gang_starts.held_for is None
    assert shell.on(idle) is not None


def test_a_run_that_needs_more_gpus_than_a_machine_has_fails_at_once() -> None:
    shell = pool("ab")
    shell.submit(video("j", (4,)))
    assert "4 GPUs of one machine" in shell.error("j").message


def test_a_run_stops_at_once_for_a_task_that_would_miss_its_deadline_otherwise() -> None:
    """Also if the time until the others have found each other would be too long for that task, which does not wait for
    it."""
    for spare_seconds, stopped in ((24.0, {}), (28, dict.fromkeys("abcd", True)), (4000.0, {})):
        shell = pool(send_ahead_seconds=0.0)
        shell.submit(video("known"))
        for name in "abcd":
            shell.finish(name, cost=RunCost(run_seconds=SECONDS / 4))
        assert len(names(shell.submit(video("long", seed=1)))) == 4
        task = sample(GIVEN, seed=2, run_seconds=SECONDS, degrees=(1, 2, 4))
        found = stops(
            shell.submit(
                JobSpec(JobId("due"), (task,), task.task_id, (GIVEN,), deadline=shell.at + SECONDS / 2 + spare_seconds)
            )
        )
        assert found == stopped, spare_seconds


def test_the_core_looks_again_when_gpus_are_kept_free_for_deadlines_no_longer() -> None:
    """Nothing looked at them before the next event, which may be hours later."""
    shell = pool(send_ahead_seconds=0.0)
    shell.submit(video("known"))
    for name in "abcd":
        shell.finish(name, cost=RunCost(run_seconds=SECONDS / 4))
    for number in range(4):
        task = sample(GIVEN, seed=number + 2)
        shell.submit(JobSpec(JobId(f"due{number}"), (task,), task.task_id, (GIVEN,), deadline=shell.at + 9000.0))
        (name,) = shell.running
        shell.finish(name)
    assert len(names(shell.submit(video("long", seed=1)))) == 2, "two stay free"
    *_, before_last, _ = shell.state.demand.fair_queue.deadlines.arrivals
    looked_at = []
    while shell.tick_due is not None:
        shell.tick_comes()
        looked_at.append(shell.at)
    assert any(0.0 < at - before_last - EXPECTED_SECONDS < 1.0 for at in looked_at), looked_at
