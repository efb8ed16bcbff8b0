"""`modelpool status` shows the truth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import RunCost, TaskId, UserId, WorkerId
from modelpool.scheduler.core.snapshot import take_snapshot
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import TaskStatus
from tests.scheduler.recorded import busy_afternoon
from tests.scheduler.world import DRAW, SPECS, Shell, alone, encode, image, sample


def test_a_snapshot_counts_what_is_there(shell: Shell) -> None:
    """Two jobs, one of them half done; a third cancelled; one worker up, one starting."""
    shell.want("a", "b")
    shell.come_up("a")
    shell.submit(image("one", seed=1))
    shell.submit(image("two", prompt="dog", model=DRAW, seed=2))
    shell.submit(image("three", seed=3))
    shell.cancel("three")
    shell.finish("a", cost=RunCost(1.0, 2.0, 4, 0, 9, resident=False, patch_switches=1))
    shell.tick(5.0)
    shell.lose_result(encode("nothing").task_id)
    seen = shell.state.snapshot()
    assert (seen.jobs_live, seen.jobs_stopping) == (2, 0)
    assert seen.resolved == {"succeeded": 0, "failed": 0, "cancelled": 1}
    running = {task.task_id: task for task in seen.running}
    assert len(running) == 1
    assert sum(seen.ready.values()) + sum(seen.blocked.values()) + len(running) == len(shell.state.demand.tasks) == 5
    assert next(iter(running.values())).seconds == 6.0
    assert (seen.runs, seen.runs_resident, seen.uploaded_bytes, seen.patch_switches) == (1, 0, 4, 1)
    a, b = seen.workers
    assert (a.worker_id, a.status, a.runs, a.uploaded_bytes) == ("a", "busy", 1, 4)
    assert (b.worker_id, b.status, b.residency) == ("b", "starting", None)
    assert a.residency == shell.state.worker_table.workers[WorkerId("a")].residency
    assert seen.results_held == 1


def test_a_snapshot_does_not_change_afterwards(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("one"))
    seen = shell.state.snapshot()
    before = repr(seen)
    for _ in range(3):
        shell.finish("a")
    assert repr(seen) == before
    assert shell.state.snapshot() != seen


def test_waiting_tasks_are_told_by_user_and_components_by_what_is_there(shell: Shell) -> None:
    """Two users ask for the same text: the encode is on the account of the first of them."""
    shell.workers(a=64)
    for number, user in enumerate(("", "ann", "bob", "bob")):
        shell.submit(replace(image(f"j{number}", seed=number), user=UserId(user)))
    seen = shell.state.snapshot()
    assert seen.waiting_by_user == {
        "": {"sample": 1, "decode": 1},
        "ann": {"sample": 1, "decode": 1},
        "bob": {"sample": 2, "decode": 2},
    }
    (running,) = seen.running
    assert (running.job_id, running.user, running.stage) == ("j0", "", "encode")
    shell.cancel("j0")
    assert shell.state.snapshot().running[0].job_id == "j1"
    shell.finish("a")
    (worker,) = shell.state.snapshot().workers
    assert worker.residency is not None
    assert dict(zip([e.component for e in worker.residency.entries], worker.whole_bytes, strict=True)) == {
        entry.component: SPECS[entry.component].weight_bytes for entry in worker.residency.entries
    }


def test_waiting_tasks_are_counted_as_if_one_by_one() -> None:
    """Found in a review: a hundred thousand of them held the pool up for long. They are counted by what they have in
    common; here against a count of each, after each event of a busy afternoon."""
    state = SchedulerState()
    seen = 0
    for entry in busy_afternoon().entries:
        state.handle(entry.event)
        now = state.snapshot()
        ready, blocked, users = (Counter[object]() for _ in range(3))
        for task in state.demand.tasks.values():
            if task.worker_id is None:
                stage = task.spec.stage.value
                (ready if task.status is TaskStatus.READY else blocked)[stage] += 1
                users[state.demand.jobs[next(iter(task.demand))].spec.user, stage] += 1
        assert {stage: count for stage, count in now.ready.items() if count} == ready
        assert {stage: count for stage, count in now.blocked.items() if count} == blocked
        assert {(user, s): count for user, mine in now.waiting_by_user.items() for s, count in mine.items()} == users
        running = {task.name for task in state.demand.tasks.values() if task.worker_id is not None}
        assert {task.task_id for task in now.running} == running
        seen += sum(users.values())
    assert seen > 50


def test_tasks_of_one_run_are_told_together() -> None:
    shell = Shell(SchedulerConfig(batch_limit=2))
    shell.workers(a=1 << 20)
    for seed in range(3):
        shell.submit(alone(f"j{seed}", sample(TaskId("given:text"), seed=seed), given=(TaskId("given:text"),)))
    shell.finish("a")
    snapshot = shell.state.snapshot()
    (worker,) = snapshot.workers
    assert len(worker.batch_mates) == 1
    assert [task.task_id for task in snapshot.running] == [worker.task_id, *worker.batch_mates]
    assert [task.job_id for task in snapshot.running] == ["j1", "j2"]


def test_the_time_left_is_the_work_of_all_tasks_without_what_has_run_by_the_workers() -> None:
    shell = Shell()
    shell.submit(alone("a", encode("a")))
    assert take_snapshot(shell.state).left_seconds is None  # no worker is up
    shell.workers(a=64, b=64)
    for name in ("b", "c", "d"):
        shell.submit(alone(name, encode(name)))
    run_seconds = encode("a").run_seconds
    assert take_snapshot(shell.state).left_seconds == pytest.approx(4 * run_seconds / 2)
    while shell.running:
        shell.finish(next(iter(shell.running)), cost=RunCost(run_seconds=2 * run_seconds))
    shell.submit(alone("e", encode("e")))  # runs take twice as long as was expected of the first
    assert take_snapshot(shell.state).left_seconds == pytest.approx(2 * run_seconds / 2)
    assert take_snapshot(shell.state, shell.at + run_seconds).left_seconds == pytest.approx(run_seconds / 2)
