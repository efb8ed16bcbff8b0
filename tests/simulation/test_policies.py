"""Ours against the baselines, in the same simulator, with the same jobs."""

from __future__ import annotations

from random import Random

import pytest

from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.workloads.generators import all_at_once, poisson
from tests.simulation.worlds import gpus, mix


def simulate(placement: str, seed: int, rate: float | None) -> VirtualCluster[SchedulerState]:
    rng = Random(seed)
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(placement=placement)), gpus(4))
    what = mix(models=8)
    cluster.start(what.components)
    arrivals = all_at_once(300) if rate is None else poisson(300, rate, rng)
    for submission in what.submissions(arrivals, rng):
        cluster.post(submission)
    cluster.run()
    return cluster


@pytest.mark.parametrize("rate", [None, 2.0])
@pytest.mark.parametrize("baseline", ["arrival_order", "least_loaded"])
def test_ours_loads_less_and_is_done_sooner(baseline: str, rate: float | None) -> None:
    ours, theirs = simulate("soonest", 5, rate), simulate(baseline, 5, rate)
    assert ours.totals.uploaded_bytes < 0.7 * theirs.totals.uploaded_bytes
    assert sum(ours.latency_seconds.values()) < sum(theirs.latency_seconds.values())
    assert len(ours.outcomes) == len(theirs.outcomes) == 300


def test_all_workers_work_when_the_queue_is_long() -> None:
    """No pile-up: each of four workers does between a sixth and a third of the runs."""
    cluster = simulate("soonest", 5, None)
    shares = [worker.totals.runs / cluster.totals.runs for worker in cluster.core.worker_table.workers.values()]
    assert all(1 / 6 < share < 1 / 3 for share in shares), shares
