"""The hint of what is needed next: the core assumes what the workers do with it."""

from __future__ import annotations

from random import Random

from scheduler.state import SchedulerState
from scheduler.workloads.arrivals import bursts
from tests.simulation.hints import tight


def test_what_the_core_assumes_with_a_hint_is_what_the_workers_do() -> None:
    """After every event, of every worker: order, bytes and patches."""
    cluster, mix = tight(SchedulerState(), workers=2)
    for submission in mix.submissions(bursts(120, 12, 20.0), Random(3)):
        cluster.post(submission)

    def agree(state: SchedulerState) -> None:
        for worker_id, residency in cluster.residencies.items():
            assert state.fleet.workers[worker_id].residency == residency, worker_id

    cluster.run(agree)
    assert len(cluster.outcomes) == 120
