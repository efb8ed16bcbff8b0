"""Affinity with look-ahead: the policy of InvokeAI for the GPUs of one host.

After its pull request #9263 (multi-GPU sessions). One queue, higher priority first, then in order of arrival. A free
device takes the head, unless its current model is wanted by one of the next 32 items of the same user and priority as
the head: then it takes the first of these. "Warm" is a diffusion model with bytes on the device; LoRAs do not count. To
its advantage: a free device for which the head is warm comes before a cold one, and all hosts together count as one,
which InvokeAI does not do. Its cache of results (`node_cache_size`, default 512) avoids equal encodes. Memory keeps
complete components, in LRU order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from modelpool.benchmarks.lab.base import Pulling
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.records import model_name

LOOK_AHEAD = 32


class Affinity(Pulling):
    """First come, first served; a warm device may look ahead over up to 32 items."""

    kept_encodes = 512

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        #: (minus priority, number) of waiting jobs, sorted
        self._order: list[tuple[int, int]] = []

    def arrived(self, job: PeerJob) -> None:
        """Queue by priority, then by number."""
        super().arrived(job)
        insort(self._order, (-job.job.priority, job.number))

    def withdrawn(self, job: PeerJob) -> None:
        """Remove from the queue."""
        if self.waiting.pop(job.number, None) is not None:
            del self._order[bisect_left(self._order, (-job.job.priority, job.number))]

    def choose(self, idle: list[PeerWorker]) -> tuple[PeerWorker, PeerJob] | None:
        """Choose the head, or an item that a warm device may take before it."""
        warm = {worker.worker_id: self._warm(worker) for worker in idle}
        for place, (_, number) in enumerate(self._order):
            head = self.waiting[number]
            able = [worker for worker in idle if worker.gpu.capacity_bytes >= head.needed_bytes]
            if not able:
                continue
            for worker in able:
                if head.model in warm[worker.worker_id]:
                    return worker, head
            window = [self.waiting[number] for _, number in self._order[place + 1 : place + 1 + LOOK_AHEAD]]
            alike = [job for job in window if _kind(job) == _kind(head)]
            for worker in able:
                for job in alike:
                    if job.model in warm[worker.worker_id] and worker.gpu.capacity_bytes >= job.needed_bytes:
                        return worker, job
            return min(able, key=lambda worker: (worker.idle_since, worker.rank)), head
        return None

    def _warm(self, worker: PeerWorker) -> set[str]:
        if worker.residency is None:
            return set()
        return {model_name(e.component) for e in worker.residency.entries if self._is_diffusion(e.component)}

    def _is_diffusion(self, key: ComponentKey) -> bool:
        return key in self.components and self.components[key].role is Role.DIFFUSION_MODEL


def _kind(job: PeerJob) -> tuple[str, int]:
    return job.job.user, job.job.priority
