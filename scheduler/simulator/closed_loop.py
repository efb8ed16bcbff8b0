"""A closed loop of clients in virtual time: each submits its next job when the last one is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelpool.pool.values.specs.spec import JobSpec
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.metrics import percentile

CoreT = TypeVar("CoreT", bound=Core)


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """One pass over the jobs.

    moved_bytes      bytes that crossed the links: loaded, streamed and preloaded
    preloaded_bytes  of these, the preloaded ones
    """

    jobs: int
    seconds: float
    moved_bytes: int
    preloaded_bytes: int
    p50_seconds: float
    p99_seconds: float

    @property
    def jobs_per_second(self) -> float:
        """Jobs over the time from the first submission to the end of the last one."""
        return self.jobs / self.seconds if self.seconds > 0.0 else 0.0


def run_closed_loop(
    cluster: VirtualCluster[CoreT], jobs: Sequence[JobSpec], clients: int, begin_at: float
) -> LoopFigures:
    """Run a started cluster until these jobs are resolved, submitted in order by so many clients from `begin_at` on,
    which is not before the cluster's time. Clients think for no time."""
    assert begin_at >= cluster.now, f"it is {cluster.now} s already"
    totals, resolved = cluster.totals, len(cluster.outcomes)
    moved_bytes, preloaded_bytes = _moved_bytes(cluster), totals.preloaded_bytes
    waiting = iter(jobs)
    for _, job in zip(range(clients), waiting, strict=False):
        cluster.post(Submitted(begin_at, job))

    def submit_next(core: CoreT) -> None:
        nonlocal resolved
        while resolved < len(cluster.outcomes):
            resolved += 1
            job = next(waiting, None)
            if job is not None:
                cluster.post(Submitted(cluster.now, job))

    cluster.run(submit_next)
    latencies = sorted(cluster.latency_seconds[job.job_id] for job in jobs)
    end = max(
        (cluster.submitted[job.job_id].at + cluster.latency_seconds[job.job_id] for job in jobs), default=begin_at
    )
    return LoopFigures(
        len(jobs),
        end - begin_at,
        _moved_bytes(cluster) - moved_bytes,
        totals.preloaded_bytes - preloaded_bytes,
        percentile(latencies, 0.5),
        percentile(latencies, 0.99),
    )


def _moved_bytes(cluster: VirtualCluster[CoreT]) -> int:
    totals = cluster.totals
    return totals.uploaded_bytes + totals.streamed_bytes + totals.preloaded_bytes
