"""Base classes of the baseline policies: a job runs completely on one worker, its tasks one after the other.

More robust than the real systems: lost workers are replaced, failed runs are repeated, jobs of a lost worker are placed
again. Two placement modes: `Pulling` keeps jobs in a central queue until a worker is idle; `Pushing` gives each job to
a worker on arrival.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from modelpool.benchmarks.lab.core import MOST_ATTEMPTS, PeerCore
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import EncodeCache, PeerJob, peer_job
from modelpool.pool.values.specs.spec import JobId, RunError, RunErrorKind, Stage, TaskId
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import EndWorker, Outcome, ResolveJob, RunEnded, RunTask, StopTask, Submitted
from modelpool.scheduler.simulator.machines import SimulatedGpu


class Peer(PeerCore):
    """Jobs on workers; a subclass decides which job goes where."""

    #: number of encode results kept for later jobs
    kept_encodes = 0
    #: whether each worker has its own cache of them, or all share one
    encodes_per_worker = False

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self._encodes = EncodeCache(self.kept_encodes, self._results)
        self.jobs: dict[JobId, PeerJob] = {}
        self._arrived = 0

    # to be implemented by subclasses

    @abstractmethod
    def arrived(self, job: PeerJob) -> None:
        """A job needs a place: a new one, or one whose worker was lost."""

    @abstractmethod
    def withdrawn(self, job: PeerJob) -> None:
        """A waiting job was cancelled."""

    # for use by subclasses

    def fitting(self, job: PeerJob) -> list[PeerWorker]:
        """Workers with enough memory for all tasks of the job, live or starting."""
        return [worker for worker in self.fleet.usable() if worker.gpu.capacity_bytes >= job.needed_bytes]

    def begin(self, worker: PeerWorker, job: PeerJob) -> None:
        """Start the job on an idle worker."""
        worker.job, worker.model = job, job.model
        self._go_on(worker, job)

    def _go_on(self, worker: PeerWorker, job: PeerJob) -> None:
        """Start the next task of the job on its worker, or end the job."""
        task = job.next_task
        while task is not None and task.stage is Stage.ENCODE and self._encodes.has(self._scope(worker), task.task_id):
            self._completed(job, task.task_id)
            task = job.next_task
        if task is None:
            self._free(worker)
            self._resolve(job, Outcome.SUCCEEDED)
            return
        worker.running = task
        self._out.append(RunTask(worker.worker_id, worker.incarnation, task.task_id, job.attempts))

    def _scope(self, worker: PeerWorker) -> str:
        return worker.worker_id if self.encodes_per_worker else ""

    def _submit(self, event: Submitted) -> None:
        spec = event.job
        if spec.job_id in self.jobs or spec.job_id in self._ended:
            return
        self._arrived += 1
        problem = problem_with(spec, self.components.keys())
        if problem is not None:
            self._ended.add(spec.job_id)
            error = RunError(RunErrorKind.BAD_INPUT, problem)
            self._out.append(ResolveJob(spec.job_id, Outcome.FAILED, error=error))
            return
        job = peer_job(spec, self._arrived, self.at, self.components)
        self.jobs[spec.job_id] = job
        for task_id in spec.given:
            self._completed(job, task_id)
        self._place(job)

    def _place(self, job: PeerJob) -> None:
        if self.fleet.workers and not self.fitting(job):
            self._resolve(job, Outcome.FAILED, RunError(RunErrorKind.BAD_INPUT, "it fits on no worker that is left"))
        else:
            self.arrived(job)

    def _cancel(self, job_id: JobId) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.cancelled:
            return
        worker = next((worker for worker in self.fleet.workers.values() if worker.job is job), None)
        if worker is None:
            self.withdrawn(job)
            self._resolve(job, Outcome.CANCELLED)
        else:
            job.cancelled = True
            assert worker.running is not None, f"{worker.worker_id} has a job and runs nothing"
            self._out.append(StopTask(worker.worker_id, worker.incarnation, worker.running.task_id, job.attempts))

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.of(report.worker_id, report.incarnation)
        if worker is None or worker.running is None or worker.job is None:
            return
        if report.task_id != worker.running.task_id:
            return
        job, task = worker.job, worker.running
        worker.running, worker.residency = None, report.residency
        if report.error is None:
            worker.failures = 0
            self._completed(job, task.task_id)
            if task.stage is Stage.ENCODE:
                self._encodes.keep(self._scope(worker), task.task_id)
            if job.next_task is None:
                self._free(worker)
                self._resolve(job, Outcome.SUCCEEDED)
                return
        elif report.error.kind is RunErrorKind.WORKER_LOST:
            self._out.append(EndWorker(worker.worker_id, worker.incarnation))
            self._lose(worker, report.error.message)
            return
        if job.cancelled:
            self._free(worker)
            self._resolve(job, Outcome.CANCELLED)
        elif report.error is not None and self._hopeless(job, report.error):
            self._free(worker)
            self._resolve(job, Outcome.FAILED, report.error)
        else:
            self._go_on(worker, job)

    def _hopeless(self, job: PeerJob, error: RunError) -> bool:
        """Count a failed attempt; return whether it was the last."""
        job.attempts += 1
        return job.attempts >= MOST_ATTEMPTS or error.kind is RunErrorKind.BAD_INPUT

    def _free(self, worker: PeerWorker) -> None:
        worker.job, worker.running, worker.idle_since = None, None, self.at
        self.freed(worker)

    def _lose(self, worker: PeerWorker, reason: str) -> None:
        self.fleet.lost(worker)
        self._abandon(worker, reason, counts=True)
        if worker.given_up:
            for job in list(self.jobs.values()):
                if not self.fitting(job):
                    self.withdrawn(job)
                    self._resolve(job, Outcome.FAILED, RunError(RunErrorKind.WORKER_LOST, "no worker is left for it"))

    def _unwanted(self, workers: Sequence[PeerWorker]) -> None:
        for worker in workers:
            self._abandon(worker, "its worker is no longer wanted", counts=False)

    def _looked_again(self) -> None:
        """Begin what can begin, as after every event."""

    def _abandon(self, worker: PeerWorker, reason: str, counts: bool) -> None:
        """Place the worker's jobs again. If `counts`, the job that ran there loses an attempt."""
        job, queued = worker.job, list(worker.queue)
        worker.job, worker.running, worker.model = None, None, ""
        worker.queue.clear()
        if job is not None:
            error = RunError(RunErrorKind.WORKER_LOST, reason)
            if job.cancelled:
                self._resolve(job, Outcome.CANCELLED)
            elif counts and self._hopeless(job, error):
                self._resolve(job, Outcome.FAILED, error)
            else:
                self._place(job)
        for waiting in queued:
            self._place(waiting)

    def _completed(self, job: PeerJob, task_id: TaskId) -> None:
        if task_id not in job.completed:
            job.completed.add(task_id)
            self._results.hold(task_id)

    def _result_lost(self, task_id: TaskId) -> None:
        """Jobs that still need it compute it again."""
        self._results.lost(task_id)
        self._encodes.lost(task_id)
        for job in self.jobs.values():
            job.completed.discard(task_id)

    def _resolve(self, job: PeerJob, outcome: Outcome, error: RunError | None = None) -> None:
        spec = job.job
        del self.jobs[spec.job_id]
        self._ended.add(spec.job_id)
        result = spec.wanted if outcome is Outcome.SUCCEEDED else None
        self._out.append(ResolveJob(spec.job_id, outcome, result, error))
        self._results.let_go(sorted(job.completed))


class Pulling(Peer):
    """Jobs wait in a central queue, in order of arrival; an idle worker gets one."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self.waiting: dict[int, PeerJob] = {}
        self._idle: dict[str, PeerWorker] = {}

    @abstractmethod
    def choose(self, idle: list[PeerWorker]) -> tuple[PeerWorker, PeerJob] | None:
        """Return one of the idle workers and a waiting job for it; None to wait. There is at least one of each."""

    def arrived(self, job: PeerJob) -> None:
        self.waiting[job.number] = job

    def withdrawn(self, job: PeerJob) -> None:
        self.waiting.pop(job.number, None)

    def freed(self, worker: PeerWorker) -> None:
        self._idle[worker.worker_id] = worker

    def dispatch(self) -> None:
        """Begin jobs while some wait, workers are idle, and the policy chooses."""
        while self.waiting and self._idle:
            for worker_id in [name for name, worker in self._idle.items() if not worker.idle]:
                del self._idle[worker_id]
            choice = self.choose(list(self._idle.values())) if self._idle else None
            if choice is None:
                return
            worker, job = choice
            self.withdrawn(job)
            self.begin(worker, job)
            if not worker.idle:
                del self._idle[worker.worker_id]


class Pushing(Peer):
    """Each job is given to a worker on arrival and waits in the queue of that worker."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self._changed: dict[str, PeerWorker] = {}
        #: jobs that arrived before there was any worker
        self._early: list[PeerJob] = []

    @abstractmethod
    def place(self, job: PeerJob, among: list[PeerWorker]) -> PeerWorker:
        """Return the worker that gets the job. There is at least one."""

    def arrived(self, job: PeerJob) -> None:
        among = self.fitting(job)
        if among:
            self.give(self.place(job, among), job)
        else:
            self._early.append(job)

    def give(self, worker: PeerWorker, job: PeerJob) -> None:
        """Append the job to the worker's queue."""
        worker.queue.append(job)
        self._changed[worker.worker_id] = worker

    def withdrawn(self, job: PeerJob) -> None:
        if job in self._early:
            self._early.remove(job)
        for worker in self.fleet.workers.values():
            if job in worker.queue:
                worker.queue.remove(job)

    def freed(self, worker: PeerWorker) -> None:
        self._changed[worker.worker_id] = worker

    def dispatch(self) -> None:
        """Place jobs that came too early, and begin what idle workers have in their queues."""
        if self._early and self.fleet.usable():
            early, self._early = self._early, []
            for job in early:
                self._place(job)
        while self._changed:
            worker = self._changed.pop(next(iter(self._changed)))
            while worker.idle and worker.queue:
                self.begin(worker, worker.queue.popleft())
