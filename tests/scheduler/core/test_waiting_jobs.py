"""What the jobs of a submission wait for, in groups: each unresolved job is in one, with a reason that holds for it."""

from __future__ import annotations

from modelpool.scheduler.core.waiting_jobs import MOST_EXAMINED_KINDS, JobGroup, groups_of
from modelpool.scheduler.core.waiting_task import wait_of
from tests.scheduler.world import Shell, alone, encode, image


def groups(shell: Shell) -> tuple[JobGroup, ...]:
    return groups_of(shell.state, tuple(shell.state.demand.jobs), shell.at)


def test_jobs_with_a_common_reason_are_counted_together() -> None:
    shell = Shell()
    shell.workers(a=64)
    for number in range(5):
        shell.submit(image(f"s-{number}", prompt=f"cat {number}", seed=number))
    assert [(group.count, group.reason) for group in groups(shell)] == [
        (1, "encode runs"),
        (4, "encode waits for a worker"),
    ]
    (_, waiting) = groups(shell)
    first = next(
        task for task in shell.state.demand.tasks.values() if waiting.first in task.demand and not task.on_worker
    )
    wait = wait_of(shell.state, first, shell.at)
    assert wait is not None
    assert wait.reason in waiting.detail


def test_each_job_is_in_one_group_whatever_it_waits_for() -> None:
    """One runs, one stops, one shares the run, and more kinds wait than are examined."""
    shell = Shell()
    shell.submit(alone("early", encode("cat")))
    (group,) = groups(shell)
    assert (group.reason, group.is_running) == ("encode no worker that is up can run it", False)
    shell.workers(a=64, b=64)
    shell.submit(alone("stops", encode("dog")))
    shell.cancel("stops")
    shell.submit(image("shares", prompt="cat"))
    for number in range(MOST_EXAMINED_KINDS + 5):
        task = encode("cat", patch=f"lora {number}")
        shell.submit(alone(f"j{number}", task))
    found = groups(shell)
    assert sum(group.count for group in found) == len(shell.state.demand.jobs)
    by_reason = {group.reason: group.count for group in found}
    assert by_reason["encode runs"] == 2
    assert by_reason["is cancelled, and ends when its run has stopped"] == 1
    assert by_reason["encode waits for a worker"] == MOST_EXAMINED_KINDS + 5
    assert found[0].is_running, "what runs comes first"
