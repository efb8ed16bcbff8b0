"""Sizes of components that nobody uses are forgotten on request, and only those."""

from __future__ import annotations

from modelpool.scheduler.model.messages import ComponentsKnown, Outcome, PruneComponents
from tests.scheduler.world import COMPONENTS, Shell, image


def known(shell: Shell) -> set[str]:
    return set(shell.state.costs.components)


def test_components_of_live_tasks_and_of_workers_stay(shell: Shell) -> None:
    """1. A job waits. 2. Only what it uses stays known. 3. The job ends; what its worker holds stays, and a new job
    runs after its components were named again."""
    every = {spec.key for spec in COMPONENTS}
    assert known(shell) == every
    waiting = image("j")
    shell.submit(waiting)
    shell.feed(PruneComponents(shell.tick()))
    used = {use.component for task in waiting.tasks for use in task.uses}
    assert known(shell) == used < every
    shell.workers(a=64)
    for _ in range(3):
        shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED
    shell.feed(PruneComponents(shell.tick()))
    assert known(shell) == set(shell.state.worker_table.workers["a"].entries)
    shell.feed(ComponentsKnown(shell.tick(), COMPONENTS))
    shell.submit(image("k", seed=2))
    for _ in range(3):
        if shell.running:
            shell.finish("a")
    assert shell.outcome("k") is Outcome.SUCCEEDED
