"""A machine that will end: runs stop in time and no sooner, and what only it holds is copied off."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import NodeId, RunCost, TaskId, WorkerId
from modelpool.scheduler.core.leaving import LEAVE_SECONDS, STEP_MARGIN, latest_stop
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.kept_states import state_id
from modelpool.scheduler.model.messages import PoolEnding, StopTask
from tests.scheduler.world import STEPS, Shell, alone, decode, encode, image, sample

GIVEN = TaskId("given:1")
SECONDS = st.floats(0.0, 1000.0)


@given(at=SECONDS, notice=SECONDS, length=st.none() | SECONDS, step=SECONDS, leave=st.floats(0.0, 10.0))
def test_the_latest_stop_leaves_time_for_a_step(
    at: float, notice: float, length: float | None, step: float, leave: float
) -> None:
    deadline = at + notice
    stop_at = latest_stop(at, deadline, None if length is None else at + length, step, leave)
    if stop_at == inf:
        assert length is not None
        assert at + length + leave <= deadline
    else:
        assert length is None or at + length + leave > deadline
        assert stop_at >= at
        assert stop_at == at or stop_at + STEP_MARGIN * step + leave <= deadline + 1e-6
        later = deadline - leave - STEP_MARGIN * step
        assert stop_at == max(at, later), "as late as possible"


def draining(shell: Shell, node: str, deadline: float) -> tuple[list[StopTask], float]:
    """What the core does when that machine ends then, and when it looks again."""
    due = shell.state.leaving.prepare({NodeId(node): deadline}, shell.at)
    commands = shell.feed_nothing()
    return [command for command in commands if isinstance(command, StopTask)], due


def pool(**nodes: str) -> Shell:
    """Workers on these machines, which have measured runs of 40 s."""
    shell = Shell(SchedulerConfig(story_length=None))
    shell.want(*nodes)
    for name, node in nodes.items():
        shell.come_up(name, node=node)
    shell.submit(alone("warm", sample(GIVEN, seed=99), given=(GIVEN,)))
    (name,) = shell.running
    shell.finish(name, cost=RunCost(run_seconds=40.0))
    return shell


def test_a_run_stops_as_late_as_it_can_and_its_state_is_copied() -> None:
    shell = pool(a="one", b="two")
    shell.submit(alone("j", sample(GIVEN, seed=1), given=(GIVEN,)))
    (name,) = shell.running
    node, other = {"a": ("one", "b"), "b": ("two", "a")}[name]
    run, began = shell.running[name].command, shell.at
    deadline = began + 30.0
    stops, due = draining(shell, node, deadline)
    assert not stops
    worker = shell.state.worker_table.workers[name]
    assert worker.expected_end is not None
    assert due == deadline - LEAVE_SECONDS - STEP_MARGIN * (worker.expected_end - (worker.loaded_at or began)) / STEPS
    assert draining(shell, "elsewhere", deadline) == ([], inf)
    shell.at = due
    (stop,), _ = draining(shell, node, deadline)
    assert (stop.task_id, stop.keep_state) == (run.task_id, True)
    assert draining(shell, node, deadline) == ([], inf), "asked twice"
    shell.want(other)
    shell.stop_at(name, 2)
    assert shell.running[WorkerId(other)].command.resume
    draining(shell, node, deadline)
    assert shell.copied == [state_id(run.task_id)]


def test_a_run_that_ends_in_time_and_one_without_steps_are_not_stopped() -> None:
    shell = pool(a="one")
    shell.submit(alone("j", sample(GIVEN, seed=1), given=(GIVEN,)))
    assert draining(shell, "one", shell.at + 100.0) == ([], inf)
    shell = pool(a="one")
    shell.submit(alone("j", encode("x", run_seconds=500.0)))
    assert draining(shell, "one", shell.at + 1.0) == ([], inf)


def test_a_pool_that_ends_starts_nothing_and_stops_what_would_not_end_in_time() -> None:
    """Of two sampling runs of 40 s one is nearly done. The long one stops at once; the waiting tasks stay."""
    shell = pool(a="one", b="two")
    shell.submit(alone("early", sample(GIVEN, seed=1), given=(GIVEN,)))
    (first,) = shell.running
    shell.at += 25.0
    for seed in (2, 3, 4):
        shell.submit(alone(f"late-{seed}", sample(GIVEN, seed=seed), given=(GIVEN,)))
    (second,) = set(shell.running) - {first}
    stops = [c for c in shell.feed(PoolEnding(shell.tick(), shell.at + 30.0)) if isinstance(c, StopTask)]
    assert [(stop.worker_id, stop.keep_state) for stop in stops] == [(second, True)]
    shell.stop_at(second, 2)
    shell.finish(first)
    shell.lose(first)
    shell.come_up(first)
    assert not shell.running
    assert len(shell.state.demand.jobs) == 3


def test_results_of_no_known_machine_are_not_copied() -> None:
    """A notice for machines without a name copied provided results with every event."""
    shell = Shell(SchedulerConfig(story_length=None))
    shell.workers(a=64)
    shell.submit(alone("j", sample(GIVEN), given=(GIVEN,)))
    draining(shell, "", shell.at + 1000.0)
    assert shell.copied == []


def test_a_run_of_unknown_length_stops() -> None:
    shell = Shell(SchedulerConfig(story_length=None))
    shell.want("a")
    shell.come_up("a", node="one")
    shell.submit(alone("j", sample(GIVEN), given=(GIVEN,)))
    stops, due = draining(shell, "one", shell.at + 100.0)
    assert (stops, shell.at < due < shell.at + 100.0) == ([], True)
    stops, _ = draining(shell, "one", shell.at + 1.0)
    assert len(stops) == 1


def test_what_only_that_machine_holds_is_copied_once_what_is_needed_first() -> None:
    shell = pool(a="one", b="two")
    shell.submit(alone("kept", encode("old")))
    while shell.outcome("kept") is None:
        shell.finish(next(iter(shell.running)))
    job = image("i", "cat")
    shell.submit(job)
    shell.want("a")
    made: dict[TaskId, str] = {}
    while (task_id := next(iter(run.command.task_id for run in shell.running.values()), None)) != job.tasks[1].task_id:
        (name,) = shell.running
        made[task_id] = name
        shell.finish(name)
    (old,) = [task_id for task_id in shell.held if "old" in task_id]
    (new,) = [task_id for task_id in shell.held if "cat" in task_id]
    nodes = {task_id: shell.state.demand.results.held[task_id].node for task_id in (old, new)}
    for node in ("one", "two", "one"):
        draining(shell, node, shell.at + 1000.0)
    assert set(shell.copied) == {old, new}
    assert len(shell.copied) == 2
    if nodes[old] == nodes[new]:
        assert shell.copied == [new, old]
    assert decode(job.tasks[1].task_id).task_id not in shell.copied
