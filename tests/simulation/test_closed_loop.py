"""Closed loops of clients in virtual time: who submits when, and the loads of the pool in those of the benchmark.

The limits are about halfway between what the pool loads now and what it loaded when it preloaded whatever fits.
"""

from __future__ import annotations

from random import Random

from benchmarks.closed_loop import LOOPS, run_loop
from benchmarks.ray_trace import MODEL_BYTES
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.simulator.closed_loop import run_closed_loop
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel


def test_each_client_has_one_job_at_a_time() -> None:
    mix = Mix([InventedModel(f"m{n}") for n in range(3)], steps=(10,))
    cluster = VirtualCluster(SchedulerState(), [SimulatedGpu(WorkerId("gpu-0"), 24 * GIB, 10.0 * GIB)])
    cluster.start(mix.components)
    jobs = [submitted.job for submitted in mix.submissions(all_at_once(20), Random(1))]
    found = run_closed_loop(cluster, jobs, 3, 2.0)
    ends = {job_id: cluster.submitted[job_id].at + seconds for job_id, seconds in cluster.latency_seconds.items()}
    begins = [cluster.submitted[job.job_id].at for job in jobs]
    assert begins[:3] == [2.0] * 3
    assert begins == sorted(begins)
    for at in begins[3:]:
        assert at in ends.values(), "a client submits when a job of its own has ended"
        assert sum(begin <= at < ends[job.job_id] for job, begin in zip(jobs, begins, strict=True)) <= 3
    assert (found.jobs, found.seconds) == (20, max(ends.values()) - 2.0)
    assert found.moved_bytes == (
        cluster.totals.uploaded_bytes + cluster.totals.streamed_bytes + cluster.totals.preloaded_bytes
    )
    assert 0.0 < found.p50_seconds <= found.p99_seconds


def test_preloads_cause_few_loads_where_loads_are_long_compared_with_runs() -> None:
    """104 loads before; 52 without any preload."""
    cold, warm = run_loop(LOOPS[0], 2, 7, SchedulerConfig())
    assert cold.moved_bytes < 80 * MODEL_BYTES
    assert warm.moved_bytes < 70 * MODEL_BYTES
    assert cold.jobs_per_second > 130.0


def test_workers_do_not_preload_the_same_model_for_the_same_tasks() -> None:
    """24.7 loads before, of which 15 were preloads; there are twelve models, and room for twelve."""
    cold, warm = run_loop(LOOPS[1], 4, 7, SchedulerConfig())
    assert cold.moved_bytes < 20 * MODEL_BYTES
    assert warm.moved_bytes < 15 * MODEL_BYTES
    assert cold.jobs_per_second > 30.0
