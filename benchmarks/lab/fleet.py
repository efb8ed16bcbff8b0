"""The workers of a baseline policy: started when wanted, restarted when lost, given up after repeated failures.

Equal for all policies, so that a comparison is about placement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelpool.benchmarks.lab.jobs import PeerJob
from modelpool.pool.values.specs.spec import TaskSpec, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.messages import Command, EndWorker, StartWorker
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: failed starts and losses in a row, without a completed run in between, after which a worker is given up
MOST_FAILURES = 5
LONGEST_DELAY_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class PeerWorker:
    """A worker that is wanted, live or not."""

    gpu: SimulatedGpu
    #: its place among the workers
    rank: int
    incarnation: int = 1
    #: its introduction; None while it is not up
    spec: WorkerSpec | None = None
    failures: int = 0
    #: permanently gone: it failed too often, or is no longer wanted
    given_up: bool = False
    #: the running task, and its job
    job: PeerJob | None = None
    running: TaskSpec | None = None
    #: jobs that were given to it and wait there
    queue: deque[PeerJob] = field(default_factory=deque)
    #: as last reported
    residency: Residency | None = None
    #: the model of the last job that began there
    model: str = ""
    idle_since: float = 0.0

    @property
    def worker_id(self) -> WorkerId:
        return self.gpu.worker_id

    @property
    def in_flight(self) -> int:
        """Jobs that it has, waiting or running."""
        return len(self.queue) + (self.job is not None)

    @property
    def idle(self) -> bool:
        """Up, with nothing to do."""
        return self.spec is not None and self.running is None


class PeerFleet:
    """The workers that are wanted. Commands go to `out`."""

    def __init__(self, gpus: Iterable[SimulatedGpu], out: list[Command]) -> None:
        self._gpus = {gpu.worker_id: gpu for gpu in gpus}
        self._out = out
        self._incarnations: dict[WorkerId, int] = {}
        self.workers: dict[WorkerId, PeerWorker] = {}

    def usable(self) -> list[PeerWorker]:
        """Workers that are wanted and not given up, in order."""
        return [worker for worker in self.workers.values() if not worker.given_up]

    def want(self, worker_ids: Iterable[WorkerId]) -> list[PeerWorker]:
        """Set the wanted workers. Returns those that ended."""
        names = list(dict.fromkeys(worker_ids))
        over = [worker for worker_id, worker in self.workers.items() if worker_id not in names]
        for worker in over:
            self._out.append(EndWorker(worker.worker_id, worker.incarnation))
            worker.spec, worker.given_up = None, True
            del self.workers[worker.worker_id]
        for worker_id in names:
            if worker_id not in self.workers:
                incarnation = self._next_incarnation(worker_id)
                self.workers[worker_id] = PeerWorker(self._gpus[worker_id], len(self._incarnations), incarnation)
                self._out.append(StartWorker(worker_id, incarnation))
        return over

    def of(self, worker_id: WorkerId, incarnation: int) -> PeerWorker | None:
        """The worker, if this is its current incarnation."""
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.incarnation == incarnation and not worker.given_up else None

    def up(self, spec: WorkerSpec, at: float) -> PeerWorker | None:
        """A worker started."""
        worker = self.of(spec.worker_id, spec.incarnation)
        if worker is not None:
            worker.spec, worker.idle_since = spec, at
            worker.residency = Residency(spec.capacity_bytes)
        return worker

    def lost(self, worker: PeerWorker) -> None:
        """The worker is lost, or did not start: restart it, the first time at once, or give it up."""
        worker.spec = worker.residency = None
        worker.failures += 1
        if worker.failures > MOST_FAILURES:
            worker.given_up = True
            return
        worker.incarnation = self._next_incarnation(worker.worker_id)
        delay_seconds = 0.0 if worker.failures == 1 else min(LONGEST_DELAY_SECONDS, 2.0 ** (worker.failures - 2))
        self._out.append(StartWorker(worker.worker_id, worker.incarnation, delay_seconds))

    def _next_incarnation(self, worker_id: WorkerId) -> int:
        number = self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
        return number
