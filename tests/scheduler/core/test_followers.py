"""A task is queued behind the task of a worker that computes its input, and does not start without it."""

from __future__ import annotations

import pytest

from modelpool.pool.specs.spec import RunCost, RunErrorKind, TaskId
from modelpool.scheduler.queue.shares import EVERYBODY, UserShare
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.jobs import TaskStatus
from modelpool.scheduler.tables.messages import Command, Outcome, RevokeTask, RunTask
from tests.scheduler.world import DRAW, PAINT, ROOMY, Shell, image

ONE = tuple(task.task_id for task in image("one", "new").tasks)


def pool(workers: int = 1, send_ahead_seconds: float = 60.0, capacity: int = ROOMY, **config) -> Shell:
    """Workers that know how long the runs of an image take; the first has its weights."""
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=send_ahead_seconds, **config))
    shell.workers(a=capacity)
    shell.submit(image("first", "first"))
    while shell.running:
        expected = shell.tasks[shell.running["a"].command.task_id].run_seconds
        shell.finish("a", cost=RunCost(run_seconds=expected))
    shell.workers(**dict.fromkeys("abc"[:workers], capacity))
    return shell


def sent(commands: list[Command]) -> list[TaskId]:
    return [command.task_id for command in commands if isinstance(command, RunTask)]


def test_an_image_is_sent_to_one_worker_at_once() -> None:
    shell = pool(2)
    commands = shell.submit(image("one", "new"))
    assert sent(commands) == list(ONE)
    assert len({command.worker_id for command in commands if isinstance(command, RunTask)}) == 1
    assert [c.follows for c in commands if isinstance(c, RunTask)] == [(), ONE[:1], ONE[1:2]]
    (name,) = shell.running
    for task_id in ONE:
        assert shell.on(name) == task_id
        assert shell.state.demand.tasks[task_id].status is TaskStatus.RUNNING
        assert sent(shell.finish(name)) == []
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_it_is_sent_shortly_before_the_end_of_a_long_run() -> None:
    shell = pool(send_ahead_seconds=0.05)
    assert sent(shell.submit(image("one", "new"))) == list(ONE[:1])
    before = shell.at
    commands: list[Command] = []
    while not sent(commands):
        commands = shell.tick_comes()
    assert sent(commands) == list(ONE[1:2])
    assert shell.at == pytest.approx(before + 0.95), "an encoding takes a second"


def test_when_nothing_is_queued_behind_its_input() -> None:
    """Send-ahead is off, a limit is reached, weights are not there, and tasks that may share runs."""
    limited = {"shares": (UserShare(user=EVERYBODY, running_limit=1),)}
    cases = {
        "off": (pool(send_ahead_seconds=0.0), PAINT),
        "limit": (pool(**limited), PAINT),
        "other weights": (pool(capacity=24), DRAW),
        "batches": (pool(batch_limit=2), PAINT),
    }
    for name, (shell, model) in cases.items():
        assert sent(shell.submit(image("one", "new", model))) == list(ONE[:1]), name


def test_what_several_read_is_awaited_by_all_of_them() -> None:
    """They may share a run, or start on several workers."""
    shell = pool(send_ahead_seconds=5.0)
    shell.submit(image("busy", "first", seed=9))
    for seed in (1, 2):
        shell.submit(image(f"j{seed}", "new", seed=seed))
    commands: list[Command] = []
    while not sent(commands):
        commands = shell.tick_comes()
    assert sent(commands) == list(ONE[:1])


@pytest.mark.parametrize("kind", [RunErrorKind.OUT_OF_VRAM, RunErrorKind.FILE_UNAVAILABLE])
def test_without_its_input_it_does_not_start_and_has_not_failed(kind: RunErrorKind) -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a", kind)
    assert [command.task_id for command in shell.revoked] == list(ONE[1:])
    while shell.revoked:
        shell.tell_revoked()
    tasks = shell.state.demand.tasks
    assert [tasks[task_id].failures for task_id in ONE[1:]] == [0, 0]
    while shell.running or shell.starting:
        for name, _ in list(shell.starting):
            shell.come_up(name)
        for name in list(shell.running):
            shell.finish(name)
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_what_a_worker_has_lost_is_sent_to_it_later() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.revoked += shell.queued.pop("a")
    shell.finish("a")
    assert shell.state.worker_table.workers["a"].task_id == ONE[1], "the core believes that it runs"
    while shell.revoked:
        shell.tell_revoked()
    assert shell.on("a") == ONE[1]
    shell.finish("a")
    shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_an_input_whose_report_failed_is_not_made_again_for_what_has_run() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.made["a"] = {ONE[0]}
    shell.finish("a", RunErrorKind.FILE_UNAVAILABLE)
    assert shell.on("a") == ONE[1]
    assert ONE[0] in shell.state.demand.tasks
    shell.finish("a")
    assert ONE[0] not in shell.state.demand.tasks, "nobody needs it any more"
    shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_a_cancelled_image_is_asked_back() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    asked = [command.task_id for command in shell.cancel("one") if isinstance(command, RevokeTask)]
    assert asked == list(ONE[1:])
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("one") is Outcome.CANCELLED
    assert not shell.state.demand.tasks


def test_the_others_of_a_shared_encoding_go_on_when_one_image_is_cancelled() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.submit(image("two", "new", seed=2))
    shell.cancel("one")
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    while shell.running:
        shell.finish("a")
    assert (shell.outcome("one"), shell.outcome("two")) == (Outcome.CANCELLED, Outcome.SUCCEEDED)


def test_a_job_of_higher_priority_goes_before_what_waits_for_its_input() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    asked = [c.task_id for c in shell.submit(image("urgent", "now", priority=1)) if isinstance(c, RevokeTask)]
    assert asked == list(ONE[1:])


def test_a_lost_worker_loses_one_run() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.lose("a")
    tasks = shell.state.demand.tasks
    assert [tasks[task_id].failures for task_id in ONE] == [1, 0, 0]
    assert [tasks[task_id].follows for task_id in ONE] == [(), (), ()]
    shell.come_up("a")
    while shell.running:
        shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_of_a_job_that_failed_nothing_is_left() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a", RunErrorKind.INTERNAL)
    while shell.revoked:
        shell.tell_revoked()
    assert shell.outcome("one") is Outcome.FAILED
    assert not shell.state.demand.tasks
