"""The hint of the next needs: the core assumes what the workers do with it."""

from __future__ import annotations

from random import Random

from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.simulator.workloads.generators import bursts
from tests.simulation.hints import tight

#: of a GiB that crosses the link in a twentieth of a second or more
PART = 0.05


def test_what_the_core_assumes_with_a_hint_is_what_the_workers_do() -> None:
    """After every event, of every worker: order, bytes and patches."""
    cluster, mix = tight(SchedulerState(), workers=2)
    for submission in mix.submissions(bursts(120, 12, 20.0), Random(3)):
        cluster.post(submission)

    def agree(state: SchedulerState) -> None:
        for worker_id, residency in cluster.residencies.items():
            believed = state.worker_table.workers[worker_id].residency
            assert believed is not None
            if not any(state.worker_table.workers[worker_id].preloaded):
                assert believed == residency, worker_id
                continue
            # what comes beside a run is a matter of seconds, which are estimated
            assert [(e.component, e.patch_digest) for e in believed.entries] == [
                (e.component, e.patch_digest) for e in residency.entries
            ]
            for ours, theirs in zip(believed.entries, residency.entries, strict=True):
                assert abs(ours.resident_bytes - theirs.resident_bytes) < PART * GIB, worker_id

    cluster.run(agree)
    assert len(cluster.outcomes) == 120
