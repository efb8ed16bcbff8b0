"""Cordons, drains and restarts by operators: what runs goes on, nothing new comes, no job is lost, and it is told."""

from __future__ import annotations

import json

from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, WorkerId
from modelpool.scheduler.core.history import history_of
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.remembering import memory_of
from modelpool.scheduler.core.snapshot import take_snapshot
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    DisruptionsAllowed,
    EndWorker,
    LossCause,
    Outcome,
    Remembered,
    RevokeTask,
    StartWorker,
    StopTask,
    WorkersWanted,
)
from modelpool.scheduler.model.pool_memory import PoolMemory, learned_only
from modelpool.scheduler.model.workers import WorkerState
from modelpool.scheduler.simulator.record.plain_values import plain, read
from tests.scheduler.core.test_leaving import GIVEN, pool
from tests.scheduler.world import Shell, alone, image, sample


def orders(shell: Shell) -> dict[str, str]:
    return {worker.worker_id: worker.order for worker in take_snapshot(shell.state).workers}


def test_what_runs_on_a_cordoned_worker_ends_there_and_nothing_follows() -> None:
    shell = pool(a="n1", b="n2")
    for number in range(6):
        shell.submit(alone(f"j{number}", sample(GIVEN, seed=number), given=(GIVEN,)))
    weights = shell.state.worker_table.workers[WorkerId("a")].entries
    shell.cordon("a")
    assert orders(shell) == {"a": "cordoned", "b": ""}
    shell.finish("a")
    assert shell.state.worker_table.workers[WorkerId("a")].entries == weights, "weights stay"
    while shell.running:
        assert set(shell.running) == {"b"}
        shell.finish("b")
    assert len(shell.resolved) == 7
    shell.submit(alone("late", sample(GIVEN, seed=50), given=(GIVEN,)))
    shell.finish("b")
    shell.uncordon("a")
    shell.submit(alone("last", sample(GIVEN, seed=51), given=(GIVEN,)))
    shell.submit(alone("very last", sample(GIVEN, seed=52), given=(GIVEN,)))
    assert set(shell.running) == {"a", "b"}


def test_what_waits_for_cordoned_workers_says_so() -> None:
    shell = pool(a="n1", b="n2")
    shell.cordon("n1")
    shell.cordon("b", 0.0)
    shell.submit(image("j"))
    wait = history_of(shell.state, "j", shell.at).tasks[0].wait
    assert wait is not None
    assert "every worker is out of use: a is cordoned by the operator, since 2 s ago" in wait.reason
    assert "b is drained by the operator" in wait.reason
    assert shell.state.worker_table.hopeless() is None
    assert not shell.resolved.keys() & {"j"}
    shell.uncordon("n1")
    assert set(shell.running) == {"a"}


def test_a_drained_machine_is_left_at_once_and_comes_back() -> None:
    shell = pool(a="n1", b="n2")
    shell.cordon("n1", 60.0)
    assert orders(shell) == {"a": "drained", "b": ""}
    assert WorkerId("a") not in shell.up
    assert not any(name == "a" for name, _ in shell.starting), "its process does not start again"
    commands = shell.uncordon("n1")
    assert [command.incarnation for command in commands if isinstance(command, StartWorker)] == [2]
    shell.come_up("a", node="n1")
    assert orders(shell) == {"a": "", "b": ""}


def test_a_drain_waits_for_runs_that_end_in_time_and_moves_the_others() -> None:
    """Runs of 40 s. One that ends by the deadline is not stopped."""
    for seconds, is_stopped in ((100.0, False), (20.0, True)):
        shell = pool(a="n1", b="n2")
        shell.submit(alone("j", sample(GIVEN, seed=1), given=(GIVEN,)))
        (name,) = shell.running
        node, other = {"a": ("n1", "b"), "b": ("n2", "a")}[name]
        shell.cordon(node, seconds)
        began, stopped = shell.at, []
        while not stopped and shell.tick_due is not None and shell.tick_due < began + min(seconds, 39.0):
            stopped = [command for command in shell.tick_comes() if isinstance(command, StopTask)]
        assert [stop.keep_state for stop in stopped] == [True] * is_stopped
        if is_stopped:
            shell.stop_at(name, 2)
            assert shell.running[WorkerId(other)].command.resume
            shell.finish(other)
        else:
            shell.finish(name, cost=RunCost(run_seconds=40.0))
        assert orders(shell)[name] == "drained"
        assert not shell.running
        assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_run_that_has_not_ended_by_the_deadline_runs_again_elsewhere() -> None:
    """A decode cannot stop with a state. Its end with the worker is no failure of it."""
    shell = pool(a="n1", b="n2")
    for number in range(2):
        shell.submit(alone(f"j{number}", sample(GIVEN, seed=number), given=(GIVEN,)))
    task = shell.running[WorkerId("a")].command.task_id
    shell.cordon("n1", 5.0)
    shell.at += 6.0
    (end,) = [command for command in shell.feed_nothing() if isinstance(command, EndWorker)]
    assert end.worker_id == "a"
    assert shell.state.worker_table.workers[WorkerId("a")].status is WorkerState.DRAINED
    assert shell.state.demand.tasks[task].failures == 0
    while shell.running:
        shell.finish("b")
    assert {ended.outcome for ended in shell.resolved.values()} == {Outcome.SUCCEEDED}


def test_a_worker_is_restarted_when_its_run_has_ended() -> None:
    shell = pool(a="n1", b="n2")
    shell.submit(alone("j0", sample(GIVEN, seed=1), given=(GIVEN,)))
    (name,) = shell.running
    other = "b" if name == "a" else "a"
    commands = shell.restart(name, 500.0)
    assert not [command for command in commands if isinstance(command, EndWorker)]
    assert orders(shell)[name] == "restarting"
    shell.submit(alone("j1", sample(GIVEN, seed=2), given=(GIVEN,)))
    assert set(shell.running) == {name, other}
    commands = shell.finish(name)
    assert [(c.worker_id, c.incarnation) for c in commands if isinstance(c, StartWorker)] == [(name, 2)]
    shell.come_up(name, node="n1")
    assert orders(shell)[name] == ""
    assert shell.state.worker_table.workers[WorkerId(name)].failures == 0
    commands = shell.restart(name, 500.0)
    assert [c.incarnation for c in commands if isinstance(c, StartWorker)] == [3], "an idle one at once"
    assert shell.restart("nobody") == []


def test_a_restart_that_a_crash_has_done_is_not_done_again() -> None:
    shell = pool(a="n1")
    shell.submit(alone("j0", sample(GIVEN, seed=1), given=(GIVEN,)))
    shell.restart("a", 500.0)
    shell.lose("a", LossCause.KILLED)
    shell.come_up("a", node="n1")
    assert orders(shell) == {"a": ""}
    assert set(shell.running) == {"a"}


def test_a_restart_of_a_worker_that_leaves_is_forgotten_with_it() -> None:
    shell = pool(a="n1", b="n2")
    for number in range(2):
        shell.submit(alone(f"j{number}", sample(GIVEN, seed=number), given=(GIVEN,)))
    shell.restart("a", 500.0)
    shell.want("b")
    shell.finish("a")
    assert "a" not in shell.state.worker_table.workers
    assert not shell.state.worker_table.cordons


def test_queued_tasks_are_asked_back() -> None:
    config = SchedulerConfig(story_length=None, send_ahead_seconds=60.0)
    shell = Shell(config)
    shell.want("a")
    shell.come_up("a", node="n1")
    shell.submit(alone("warm", sample(GIVEN, seed=99), given=(GIVEN,)))
    shell.finish("a", cost=RunCost(run_seconds=10.0))
    for number in range(3):
        shell.submit(alone(f"j{number}", sample(GIVEN, seed=number), given=(GIVEN,)))
    assert shell.queued
    commands = shell.cordon("a")
    assert [command for command in commands if isinstance(command, RevokeTask)]


def test_a_crash_and_late_news_leave_a_drained_worker_down() -> None:
    """Found by the state machine: the loss of a worker that was ended moved it again."""
    shell = pool(a="n1", b="n2")
    shell.submit(alone("j0", sample(GIVEN, seed=1), given=(GIVEN,)))
    (name,) = shell.running
    node = "n1" if name == "a" else "n2"
    shell.cordon(node, 300.0)
    shell.lose(name, LossCause.CRASH)
    assert shell.state.worker_table.workers[WorkerId(name)].status is WorkerState.DRAINED
    incarnation = shell.state.worker_table.workers[WorkerId(name)].incarnation
    shell.introduce(name, incarnation)
    assert shell.state.worker_table.workers[WorkerId(name)].status is WorkerState.DRAINED


def test_a_new_worker_of_a_cordoned_name_is_cordoned() -> None:
    """Found by the state machine."""
    shell = pool(a="n1")
    shell.cordon("b")
    shell.want("a", "b")
    shell.come_up("b", node="n2")
    assert orders(shell) == {"a": "", "b": "cordoned"}


def test_cordons_and_restarts_outlive_the_core_in_their_recorded_form() -> None:
    shell = pool(a="n1", b="n2", c="n3")
    shell.submit(alone("j0", sample(GIVEN, seed=1), given=(GIVEN,)))
    (busy,) = shell.running
    idle = next(name for name in ("a", "b", "c") if name != busy)
    shell.cordon(idle)
    shell.cordon("n3", 100.0)
    shell.restart(busy, 50.0)
    memory = memory_of(shell.state, shell.at + 10.0)
    memory = read(PoolMemory, json.loads(json.dumps(plain(memory))), "memory")
    assert {(each.node, each.worker_id, each.restarts) for each in memory.cordons} == {
        ("", idle, False), ("n3", "", False), *({("", busy, True)} if busy != "c" else set()),
    } | ({("", busy, True)} if busy == "c" and orders(shell)[busy] != "drained" else set())  # fmt: skip
    assert learned_only(memory).cordons == (), "a pool that has ended leaves none"
    after = Shell(SchedulerConfig(story_length=None))
    after.want("a", "b", "c")
    after.come_up("a", node="n1", entries=())
    after.at = 1000.0
    after.feed(Remembered(after.tick(), memory, 5.0))
    after.come_up("b", node="n2", entries=())
    after.come_up("c", node="n3", entries=())
    told = orders(after)
    assert told[idle] == "cordoned"
    assert told["c"] == "drained"
    cordon = after.state.worker_table.cordons.workers[WorkerId(idle)]
    assert after.at - cordon.since >= 15.0


def test_obstacles_to_disruptions_do_not_concern_static_pools() -> None:
    state = SchedulerState()
    state.handle(WorkersWanted(0.0, (WorkerId("a"),)))
    assert state.handle(DisruptionsAllowed(1.0, "it is Monday")) == []
    validate(state)


def test_a_failed_run_on_a_draining_machine_is_retried_elsewhere() -> None:
    shell = pool(a="n1", b="n2")
    for number in range(2):
        shell.submit(alone(f"j{number}", sample(GIVEN, seed=number), given=(GIVEN,)))
    shell.cordon("n1", 500.0)
    shell.finish("a", RunErrorKind.OUT_OF_VRAM)
    assert orders(shell)["a"] == "drained"
    while shell.running:
        shell.finish("b")
    assert {ended.outcome for ended in shell.resolved.values()} == {Outcome.SUCCEEDED}
