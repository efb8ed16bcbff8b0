"""Whole workloads through the production core: every job ends once, nobody starves, one seed gives one log."""

from __future__ import annotations

from random import Random

import pytest

from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.model.story_lines import dump
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from tests.simulation.worlds import gpus, mix, troubled


@pytest.mark.parametrize("arrivals", ["poisson", "bursts", "at once"])
@pytest.mark.parametrize("sizes", [(24,), (24, 8), (5, 40, 12)])
def test_every_job_ends_once_and_every_invariant_holds(arrivals: str, sizes: tuple[int, ...]) -> None:
    """With losses, failing starts and runs, cancels, and workers of different size."""
    cluster = troubled(len(arrivals) + sum(sizes), 60, gpus(3, *sizes), arrivals=arrivals)
    cluster.run(after_each=validate)
    assert len(cluster.outcomes) == 60
    assert set(cluster.outcomes.values()) >= {Outcome.SUCCEEDED}
    assert not cluster.core.demand.tasks
    assert cluster.held == set(cluster.core.demand.results.kept)


@pytest.mark.parametrize("placement", ["soonest", "arrival_order", "least_loaded"])
def test_one_seed_gives_one_log(placement: str) -> None:
    """Two runs: the same commands at the same times, the same story, byte for byte."""
    config = SchedulerConfig(placement=placement, story_length=None)
    first, second = (troubled(7, 200, gpus(4, 24, 12), config) for _ in range(2))
    first.run()
    second.run()
    assert first.commands == second.commands
    assert dump(first.core.log.lines()) == dump(second.core.log.lines())
    assert first.core.snapshot() == second.core.snapshot()
    assert len(first.outcomes) == 200


def test_the_core_counts_what_the_workers_did() -> None:
    """Totals in the snapshot are the simulated workers' own, as long as every report arrives."""
    cluster = VirtualCluster(SchedulerState(), gpus(3))
    what = mix()
    cluster.start(what.components)
    for submission in what.submissions(iter([0.0] * 50), Random(3)):
        cluster.post(submission)
    cluster.run()
    seen, done = cluster.core.snapshot(), cluster.totals
    assert (seen.runs, seen.runs_resident) == (done.runs, done.runs_resident)
    assert done.preloaded_bytes > 0
    assert (seen.uploaded_bytes, seen.streamed_bytes) == (
        done.uploaded_bytes + done.preloaded_bytes,
        done.streamed_bytes,
    )
    assert seen.patch_switches == done.patch_switches
    assert seen.resolved == {"succeeded": 50, "failed": 0, "cancelled": 0}


def test_a_pool_without_workers_fails_every_job_with_a_reason() -> None:
    hopeless = Disturbances(start_fails=lambda command: True)
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(start_retry_limit=2)), gpus(2), disturbances=hopeless)
    what = mix()
    cluster.start(what.components)
    for submission in what.submissions(iter([0.0] * 5 + [500.0] * 5), Random(3)):
        cluster.post(submission)
    cluster.run(after_each=validate)
    assert list(cluster.outcomes.values()) == [Outcome.FAILED] * 10
    assert all("no worker is left" in error.message for error in cluster.errors.values())
