"""Earliest start over storage tiers: the placement policy of ServerlessLLM.

After its paper (OSDI 2024) and `storage_aware_scheduler`: requests in order of arrival, each to the server with the
least estimated start: the waiting work there, and the missing bytes over the bandwidth of the best tier that has them
(memory of the machine, or its disks). Later jobs are unknown, and nothing is placed again. ServerlessLLM lets a request
wait until a GPU is free; here each is placed on arrival, which mostly helps: it knows the resulting queues. Jobs that
come before the machines are known wait until every starting worker has reported its machine, or has failed to start. To
its advantage: its wait counts the expected runs too, with the true speeds; what is on the GPU costs nothing; components
and adapters each count by bytes; and its estimate of what a worker keeps is the very rule by which that worker evicts
(complete components, LRU), as long as nothing unexpected happens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelpool.benchmarks.lab.base import Pushing
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.pool.values.specs.spec import ComponentKey, JobId, NodeId, TaskSpec, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.simulator.machines import SimulatedGpu


@dataclass(slots=True)
class _Expected:
    """The expected residency of a GPU once all placed jobs are done."""

    free_at: float = 0.0
    used_bytes: int = 0
    #: the patches of each resident component, least recently used first
    patches: OrderedDict[ComponentKey, str] = field(default_factory=OrderedDict)


class StorageAware(Pushing):
    """Each job to the worker where it starts earliest, by the bytes that are missing there."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self._expected: dict[WorkerId, _Expected] = {}
        #: files in memory of each machine, least recently used first
        self._files: dict[NodeId | WorkerId, OrderedDict[ComponentKey, int]] = {}
        #: estimated seconds of each job on its worker
        self._seconds: dict[JobId, float] = {}
        #: the last introduction of each worker
        self._specs: dict[WorkerId, WorkerSpec] = {}

    def arrived(self, job: PeerJob) -> None:
        """Place the job as soon as all machines are known."""
        if self._knows_machines():
            super().arrived(job)
        else:
            self._early.append(job)

    def dispatch(self) -> None:
        """Begin nothing before the machines are known."""
        if self._knows_machines():
            super().dispatch()

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        """Choose the earliest start by expected residency."""
        chosen, least_seconds = among[0], float("inf")
        for worker in among:
            expected = self._of(worker)
            wait_seconds = max(0.0, expected.free_at - self.at)
            if wait_seconds >= least_seconds:
                continue
            start_seconds = wait_seconds + self._loading_seconds(worker, expected, job)
            if start_seconds < least_seconds:
                chosen, least_seconds = worker, start_seconds
        self._assume(chosen, job)
        return chosen

    def freed(self, worker: PeerWorker) -> None:
        """The remaining work there is that of its waiting jobs."""
        super().freed(worker)
        if worker.spec is not None:
            self._specs[worker.worker_id] = worker.spec
        waiting_seconds = sum(self._seconds.get(job.job.job_id, 0.0) for job in worker.queue)
        self._of(worker).free_at = self.at + waiting_seconds

    def _knows_machines(self) -> bool:
        return all(worker.worker_id in self._specs or worker.failures for worker in self.fleet.usable())

    def _of(self, worker: PeerWorker) -> _Expected:
        return self._expected.setdefault(worker.worker_id, _Expected())

    def _loading_seconds(self, worker: PeerWorker, expected: _Expected, job: PeerJob) -> float:
        """Seconds for what is not on the GPU with these patches."""
        files = self._files_of(worker)
        link = worker.gpu.link_bytes_per_second
        storage = self._storage_rate(worker)
        seconds = 0.0
        seen: set[ComponentKey] = set()
        for use in (use for task in job.job.tasks for use in task.uses):
            patches = expected.patches.get(use.component)
            wanted = [] if patches == use.patch_digest else list(use.adapters)
            if patches is None:
                wanted.append(use.component)
            for key in wanted:
                if key in seen or key not in self.components:
                    continue
                seen.add(key)
                size_bytes = self.components[key].upload_bytes
                seconds += size_bytes / (link if key in files else min(link, storage))
        return seconds

    def _assume(self, worker: PeerWorker, job: PeerJob) -> None:
        expected = self._of(worker)
        seconds = self._loading_seconds(worker, expected, job)
        seconds += sum(task.run_seconds for task in job.job.tasks) / worker.gpu.speed
        self._seconds[job.job.job_id] = seconds
        expected.free_at = max(self.at, expected.free_at) + seconds
        files = self._files_of(worker)
        for task in job.job.tasks:
            self._assume_task(worker, expected, task)
            for key in (key for use in task.uses for key in (*use.adapters, use.component)):
                if key in self.components:
                    files[key] = self.components[key].upload_bytes
                    files.move_to_end(key)
        spec = self._specs.get(worker.worker_id)
        if spec is not None and spec.host_bytes:
            used_bytes = sum(files.values())
            while used_bytes > spec.host_bytes and files:
                used_bytes -= files.popitem(last=False)[1]

    def _assume_task(self, worker: PeerWorker, expected: _Expected, task: TaskSpec) -> None:
        """Mark the components of the task as resident, and evict what had to make room."""
        for use in task.uses:
            if expected.patches.pop(use.component, None) is None:
                expected.used_bytes += self.components[use.component].weight_bytes
        room_bytes = worker.gpu.capacity_bytes - needed_bytes(task.uses, task.activation_bytes)
        while expected.patches and expected.used_bytes > room_bytes:
            key, _ = expected.patches.popitem(last=False)
            expected.used_bytes -= self.components[key].weight_bytes
        for use in task.uses:
            expected.patches[use.component] = use.patch_digest

    def _files_of(self, worker: PeerWorker) -> OrderedDict[ComponentKey, int]:
        return self._files.setdefault(worker.gpu.node or worker.worker_id, OrderedDict())

    def _storage_rate(self, worker: PeerWorker) -> float:
        spec = self._specs.get(worker.worker_id)
        if spec is None or not spec.storage_bytes_per_second:
            return worker.gpu.link_bytes_per_second
        return spec.storage_bytes_per_second

    def _abandon(self, worker: PeerWorker, reason: str, counts: bool) -> None:
        self._expected.pop(worker.worker_id, None)
        super()._abandon(worker, reason, counts)
