"""Figures of simulated clusters, with everything that goes wrong there.

Proves: time adds up when workers are lost and runs are cut short, under every policy; figures are those that the
simulated workers counted themselves; timelines cover the same time.
"""

from __future__ import annotations

from random import Random

import pytest

from modelpool.benchmarks.lab.policies import POLICIES
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.gpu_spec import NodeShape, parse_gpus, simulated_gpus
from modelpool.scheduler.simulator.metrics import figures
from modelpool.scheduler.simulator.timeline import timeline
from modelpool.scheduler.simulator.workloads.built_in import BUILT_IN
from tests.simulation.worlds import gpus, troubled


def require_sums(cluster: VirtualCluster[Core]) -> None:
    found, drawn = figures(cluster), timeline(cluster)
    whole = found.makespan_seconds * len(cluster.gpus)
    assert found.running_seconds + found.loading_seconds + found.idle_seconds == pytest.approx(whole)
    assert drawn.seconds == pytest.approx(found.makespan_seconds)
    width = drawn.seconds / len(drawn.steps) * len(cluster.gpus)
    busy = sum(step.running + step.loading for step in drawn.steps) * width
    assert busy == pytest.approx(found.running_seconds + found.loading_seconds)


@pytest.mark.parametrize("seed", range(4))
def test_time_adds_up_where_workers_are_lost(seed: int) -> None:
    cluster = troubled(seed, 60, gpus(3, 24, 12))
    cluster.run()
    found = figures(cluster)
    assert found.runs_failed > 0
    outcomes = list(cluster.outcomes.values())
    assert (found.succeeded, found.failed, found.cancelled) == tuple(outcomes.count(outcome) for outcome in Outcome)
    assert found.runs == cluster.totals.runs
    require_sums(cluster)


@pytest.mark.parametrize("policy", POLICIES)
def test_time_adds_up_under_every_policy(policy: str) -> None:
    entry = BUILT_IN["zipf"]
    workload = entry.make(Random(1), **entry.parse("jobs=40,models=4,loras=3,rate=2"))
    machines, nodes = simulated_gpus(parse_gpus("2x24GiB,1xL4"), NodeShape(2, 16 << 30, 2e9))
    core, memory = POLICIES[policy].make(machines, workload.components)
    cluster = VirtualCluster(core, machines, nodes=nodes, memory=memory)
    cluster.start(workload.components)
    for submitted in workload.jobs:
        cluster.post(submitted)
    cluster.run()
    found, totals = figures(cluster), cluster.totals
    assert (found.jobs, found.succeeded, found.runs_failed) == (40, 40, 0)
    assert found.runs == totals.runs
    uploaded_bytes = totals.uploaded_bytes + totals.preloaded_bytes
    assert (found.uploaded_bytes, found.streamed_bytes) == (uploaded_bytes, totals.streamed_bytes)
    assert found.preloaded_bytes == totals.preloaded_bytes
    assert found.storage_bytes - found.ahead_bytes == totals.storage_bytes
    assert found.running_seconds == pytest.approx(totals.run_seconds)
    assert found.loading_seconds == pytest.approx(totals.load_seconds)
    require_sums(cluster)
