"""What the core says and believes of files that are read ahead, over a whole simulated run."""

from __future__ import annotations

from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.placement.prefetch import PrefetchPlanner
from modelpool.scheduler.model.messages import Prefetch, RunTask
from modelpool.scheduler.simulator.cluster import SimulatedGpu, SimulatedNode, VirtualCluster
from modelpool.scheduler.simulator.workloads.generators import poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel


def cluster_of(jobs: int) -> VirtualCluster[SchedulerState]:
    """One machine with two GPUs and a slow disk, and jobs that come in while others run."""
    rng = Random(1)
    mix = Mix([InventedModel(f"m{n}") for n in range(8)], ("", "l1"), steps=(20, 30))
    gpus = [SimulatedGpu(WorkerId(name), 24 * GIB, 12.0 * GIB, node=NodeId("one")) for name in ("a", "b")]
    cluster = VirtualCluster(SchedulerState(), gpus, [SimulatedNode(NodeId("one"), 400 * GIB, 1.0 * GIB)])
    cluster.start(mix.components)
    for submission in mix.submissions(poisson(jobs, 0.3, rng), rng):
        cluster.post(submission)
    return cluster


def told(cluster: VirtualCluster[SchedulerState]) -> list[Prefetch]:
    return [command for _, command in cluster.commands if isinstance(command, Prefetch)]


def test_a_worker_that_was_told_is_told_again_when_a_job_comes_during_a_later_run() -> None:
    cluster = cluster_of(80)
    cluster.run()
    before, earlier, again = None, set(), 0
    for _, command in cluster.commands:
        if isinstance(command, Prefetch):
            with_a_run = isinstance(before, RunTask) and before.worker_id == command.worker_id
            again += not with_a_run and command.worker_id in earlier
            earlier.add(command.worker_id)
        before = command
    assert again


def test_a_worker_that_runs_is_told_when_a_job_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefetchPlanner, "run_started", lambda *nothing: None)
    cluster = cluster_of(20)
    cluster.run()
    assert told(cluster)


def test_what_is_read_ahead_is_taken_to_be_in_memory_from_then_on() -> None:
    """The memory has room for everything, so nothing of it has left when the run is over."""
    cluster = cluster_of(20)
    seen: set[Prefetch] = set()

    def look(core: SchedulerState) -> None:
        for command in told(cluster):
            if command not in seen:
                seen.add(command)
                node = core.costs.nodes.nodes[NodeId("one")]
                assert set(command.components) <= set(node.files)

    cluster.run(look)
    assert seen
