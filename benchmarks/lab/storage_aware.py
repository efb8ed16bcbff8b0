"""By the soonest start over storage tiers, as ServerlessLLM places models.

After its paper (OSDI 2024) and `storage_aware_scheduler`: requests in order of arrival, each to the server with the
least estimated start: what waits there before it, and the bytes that are missing over the bandwidth of the best tier
that has them (memory of the machine, or its disks). Nothing is known of jobs to come, and nothing is placed again.
ServerlessLLM lets a request wait until a GPU is free; here each has its place when it comes, which mostly helps: the
queues that it makes are known to it. Jobs that come before the machines are known wait until every worker that starts
has told of its own, or has failed to start. To its advantage: its wait counts the expected runs too, with the true
speeds; what is on the GPU costs nothing; components and adapters count each by its own bytes; and its guess of what a
worker keeps is the very rule by which that worker evicts (whole components, least recently used first), as long as
nothing unexpected happens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelpool.benchmarks.lab.base import Pushing
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.pool.plan.residency import needed_bytes
from modelpool.pool.specs.spec import ComponentKey, JobId, NodeId, TaskSpec, WorkerId, WorkerSpec
from modelpool.scheduler.simulator.machines import SimulatedGpu


@dataclass(slots=True)
class _Expected:
    """What should be on a GPU once all is done that was placed there."""

    free_at: float = 0.0
    used_bytes: int = 0
    #: the patches of each component that is there, the longest unused first
    patches: OrderedDict[ComponentKey, str] = field(default_factory=OrderedDict)


class StorageAware(Pushing):
    """Each job to where it starts soonest, by the bytes that are missing there."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self._expected: dict[WorkerId, _Expected] = {}
        #: files in memory of each machine, the longest unused first
        self._files: dict[NodeId | WorkerId, OrderedDict[ComponentKey, int]] = {}
        #: estimated seconds of each job where it was placed
        self._seconds: dict[JobId, float] = {}
        #: workers as they introduced themselves last
        self._specs: dict[WorkerId, WorkerSpec] = {}

    def arrived(self, job: PeerJob) -> None:
        """It gets its place as soon as all machines are known."""
        if self._knows_machines():
            super().arrived(job)
        else:
            self._early.append(job)

    def dispatch(self) -> None:
        """Nothing begins before the machines are known."""
        if self._knows_machines():
            super().dispatch()

    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        """Where it starts soonest by what is expected to be there."""
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
        """What is left to do there is what waits there."""
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
        """For what is neither on the GPU nor there with these patches."""
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
        """The components of the task are there, and what had to make room is not."""
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
