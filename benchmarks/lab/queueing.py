"""Policies with one queue in order of arrival, whose head goes to an idle worker.

`FirstIdle` is the usual pool of workers, each with a separate cache. `EncodesShared` additionally keeps results of
equal encodes: on memories that load nothing it is "infinite_cache". That is not a bound: with different GPUs, a job
that comes when only slow ones are idle may be done later than if it had waited.
"""

from __future__ import annotations

from modelpool.benchmarks.lab.base import Pulling
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob


class FirstIdle(Pulling):
    """The first job that an idle worker has memory for, to the fastest idle worker, the first of equals."""

    def choose(self, idle: list[PeerWorker]) -> tuple[PeerWorker, PeerJob] | None:
        """Choose the first job in the queue that one of the idle workers can take."""
        most_bytes = max(worker.gpu.capacity_bytes for worker in idle)
        for job in self.waiting.values():
            if job.needed_bytes <= most_bytes:
                fits = [worker for worker in idle if worker.gpu.capacity_bytes >= job.needed_bytes]
                return min(fits, key=lambda worker: (-worker.gpu.speed, worker.rank)), job
        return None


class EncodesShared(FirstIdle):
    """The same, and no encode runs twice."""

    kept_encodes = 1 << 30
