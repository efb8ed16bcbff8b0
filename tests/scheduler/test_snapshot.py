"""What `modelpool status` shows is what is so."""

from __future__ import annotations

from dataclasses import replace

from pool.spec import RunCost, UserId, WorkerId
from tests.scheduler.world import DRAW, SPECS, Shell, encode, picture


def test_a_snapshot_counts_what_is_there(shell: Shell) -> None:
    """Two jobs, one of them half done; a third cancelled; one worker up, one starting."""
    shell.want("a", "b")
    shell.come_up("a")
    shell.submit(picture("one", seed=1))
    shell.submit(picture("two", prompt="dog", model=DRAW, seed=2))
    shell.submit(picture("three", seed=3))
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
    assert a.residency == shell.state.fleet.workers[WorkerId("a")].residency
    assert seen.results_held == 1


def test_a_snapshot_does_not_change_afterwards(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(picture("one"))
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
        shell.submit(replace(picture(f"j{number}", seed=number), user=UserId(user)))
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
