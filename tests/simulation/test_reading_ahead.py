"""Machines with slow disks: weights read ahead are there when needed, and what the core believes of files holds.

The simulated disks read ahead only while no run waits for them.
"""

from __future__ import annotations

from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.placement.prefetch import PrefetchPlanner
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, Prefetch, RunTask
from modelpool.scheduler.simulator.cluster import SimulatedGpu, SimulatedNode, VirtualCluster
from modelpool.scheduler.simulator.metrics import Figures, figures
from modelpool.scheduler.simulator.workloads.generators import all_at_once, poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel

MIX = Mix([InventedModel(f"m{n}") for n in range(12)], ("", "l1", "l2"), steps=(20, 30))


def cluster_of(
    jobs: int, seed: int = 1, host_bytes: int = 40 * GIB, storage: float = 1.0 * GIB, per_second: float | None = None
) -> VirtualCluster[SchedulerState]:
    """Two machines with two GPUs each, and jobs that are not yet begun."""
    rng = Random(seed)
    nodes = [SimulatedNode(NodeId(name), host_bytes, storage) for name in ("one", "two")]
    gpus = [
        SimulatedGpu(WorkerId(f"{name}-{number}"), 24 * GIB, 12.0 * GIB, node=NodeId(name))
        for name in ("one", "two")
        for number in (0, 1)
    ]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig()), gpus, nodes)
    cluster.start(MIX.components)
    arrivals = all_at_once(jobs) if per_second is None else poisson(jobs, per_second, rng)
    for submission in MIX.submissions(arrivals, rng):
        cluster.post(submission)
    return cluster


def prefetches(cluster: VirtualCluster[SchedulerState]) -> list[Prefetch]:
    return [command for _, command in cluster.commands if isinstance(command, Prefetch)]


def finished(cluster: VirtualCluster[SchedulerState]) -> Figures:
    cluster.run()
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}
    return figures(cluster)


def test_a_batch_waits_a_tenth_less_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [finished(cluster_of(100, seed)) for seed in (1, 2)]
    monkeypatch.setattr(PrefetchPlanner, "_notify", lambda *nothing: None)
    behind = [finished(cluster_of(100, seed)) for seed in (1, 2)]
    waited = sum(one.loading_seconds for one in ahead) / sum(one.loading_seconds for one in behind)
    assert waited < 0.9
    assert sum(one.makespan_seconds for one in ahead) < sum(one.makespan_seconds for one in behind)


@pytest.mark.parametrize("per_second", [None, 0.5])
@pytest.mark.parametrize("host_bytes", [12 * GIB, 400 * GIB])
def test_every_event_leaves_the_core_consistent(per_second: float | None, host_bytes: int) -> None:
    """Predictions that were remembered are what would be reckoned now, whatever came to machines or left them."""
    cluster = cluster_of(25, host_bytes=host_bytes, per_second=per_second)
    cluster.run(validate)
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}


def test_a_worker_is_told_of_one_thing_between_two_runs() -> None:
    cluster = cluster_of(60, per_second=0.5)
    cluster.run()
    assert prefetches(cluster)
    told: set[WorkerId] = set()
    for _, command in cluster.commands:
        if isinstance(command, Prefetch):
            assert command.worker_id not in told
            assert command.components
            told.add(command.worker_id)
        elif isinstance(command, RunTask):
            told.discard(command.worker_id)


def test_where_disks_are_as_fast_as_links_nobody_is_told() -> None:
    cluster = cluster_of(30, storage=12.0 * GIB)
    cluster.run()
    assert not prefetches(cluster)
