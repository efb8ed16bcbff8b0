"""Offline planner that knows a batch completely: how little can be loaded if everything may be reordered.

For jobs that all arrive at one time, it gives a schedule that can be executed in the simulated cluster, with a makespan
planned for `factor` times the lower bound (`benchmarks.lab.bounds`). Its GPU-seconds of loading are those of the best
plan that this method finds, not the minimum, which is between `least_load_seconds` and this value. It is a plan, not a
bound: another schedule may be better. No online policy has its freedom: it starts with everything known, lets any job
wait for all others, needs no fairness, and has true run times. Later jobs are unknown until they arrive; it plans them
as a separate batch after the current plan. Latencies of single jobs are meaningless here. The workers' memory gets the
complete sequence (`KnownFuture`), and files are prefetched. The plan counts bytes over links, not reads from disks:
where disks limit the GPUs, other policies may load in less time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelpool.benchmarks.lab.core import MOST_ATTEMPTS, PeerCore
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.planning import Prices, plan_batch
from modelpool.benchmarks.lab.prefetch_order import PrefetchOrder
from modelpool.pool.values.specs.spec import JobId, JobSpec, RunError, RunErrorKind, TaskId, TaskSpec, WorkerId
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import (
    EndWorker,
    Outcome,
    Prefetch,
    ResolveJob,
    RunEnded,
    RunTask,
    ScheduleTick,
    Submitted,
)
from modelpool.scheduler.simulator.eviction_policies import KnownFuture
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: planned makespan, as a multiple of the lower bound
FACTOR = 1.1


@dataclass(slots=True, eq=False)
class _Admitted:
    """The planned steps of one worker, in order."""

    steps: deque[TaskSpec] = field(default_factory=deque)
    #: jobs that are done with a step
    waiting: dict[TaskId, list[JobSpec]] = field(default_factory=dict)
    attempts: int = 0
    #: when it should be done with all planned steps
    busy_until: float = 0.0
    #: number of finished steps
    done: int = 0
    ahead: PrefetchOrder = field(default_factory=PrefetchOrder)


class Clairvoyant(PeerCore):
    """Plans each batch as a whole, announces the sequence to the memories, and follows the plan."""

    def __init__(
        self,
        gpus: Iterable[SimulatedGpu],
        memory: KnownFuture,
        factor: float = FACTOR,
        patch_switch_seconds: float = 0.05,
    ) -> None:
        super().__init__(gpus)
        self._memory = memory
        self._factor = factor
        self._prices = Prices(self.components, patch_switch_seconds)
        self._admitted: dict[WorkerId, _Admitted] = {}
        #: jobs without a plan
        self._new: dict[JobId, JobSpec] = {}
        self._live: dict[JobId, JobSpec] = {}
        self._stopping: set[JobId] = set()

    def dispatch(self) -> None:
        """Start the next step of every idle worker."""
        for worker in self.fleet.workers.values():
            self._go_on(worker)

    def freed(self, worker: PeerWorker) -> None:
        """Nothing to do: the plan continues, as after every event."""

    def _submit(self, event: Submitted) -> None:
        """Accept the job; it is planned when everything of this time has arrived."""
        job = event.job
        if job.job_id in self._live or job.job_id in self._ended:
            return
        self._live[job.job_id] = job
        for task_id in job.given:
            self._results.hold(task_id)
        problem = problem_with(job, self.components.keys())
        if problem is not None:
            self._resolve(job, Outcome.FAILED, RunError(RunErrorKind.BAD_INPUT, problem))
        elif job.wanted in job.given:
            self._resolve(job, Outcome.SUCCEEDED)
        else:
            self._await_plan(job)

    def _await_plan(self, job: JobSpec) -> None:
        if not self._new:
            self._out.append(ScheduleTick(0.0))
        self._new[job.job_id] = job

    def _looked_again(self) -> None:
        """Plan all new jobs after the current plan."""
        workers = self.fleet.usable()
        if not workers or not self._new:
            if self._new and self.fleet.workers:
                self._give_up_on_new(-1)
            return
        self._give_up_on_new(max(worker.gpu.capacity_bytes for worker in workers))
        gpus = [worker.gpu for worker in workers]
        admitted = [self._admitted.setdefault(worker.worker_id, _Admitted()) for worker in workers]
        busy = [max(0.0, each.busy_until - self.at) for each in admitted]
        plan = plan_batch(list(self._new.values()), gpus, busy, self._prices, self._factor)
        self._new.clear()
        for worker, each, tasks, jobs, busy_seconds in zip(
            workers, admitted, plan.tasks, plan.jobs, plan.busy_seconds, strict=True
        ):
            each.busy_until = self.at + busy_seconds
            each.steps.extend(tasks)
            each.ahead.expect(tasks)
            for task in tasks:
                for need in task.needs:
                    self._results.hold(need)
            for job in jobs:
                each.waiting.setdefault(job.wanted, []).append(job)
            self._memory.expect(worker.worker_id, [tuple(use.component for use in task.uses) for task in tasks])

    def _give_up_on_new(self, capacity_bytes: int) -> None:
        """Fail jobs that fit on nothing of this size."""
        for job in list(self._new.values()):
            if any(needed_bytes(task.uses, task.least_activation_bytes) > capacity_bytes for task in job.tasks):
                del self._new[job.job_id]
                error = RunError(RunErrorKind.WORKER_LOST, "it fits on no worker that is left")
                self._resolve(job, Outcome.FAILED, error)

    def _go_on(self, worker: PeerWorker) -> None:
        """Start the next step of an idle worker."""
        admitted = self._admitted.get(worker.worker_id)
        if admitted is None or not worker.idle or not admitted.steps:
            return
        task = admitted.steps[0]
        worker.running = task
        self._out.append(RunTask(worker.worker_id, worker.incarnation, task.task_id, admitted.attempts))
        if worker.spec is not None and worker.spec.storage_bytes_per_second:
            # half of the memory is for files that were read before
            sharing = sum(each.gpu.node == worker.gpu.node for each in self.fleet.workers.values())
            room_bytes = worker.spec.host_bytes // (2 * sharing)
            keys = admitted.ahead.at_step(admitted.done, room_bytes, self.components)
            if keys:
                self._out.append(Prefetch(worker.worker_id, worker.incarnation, keys))

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.of(report.worker_id, report.incarnation)
        if worker is None or worker.running is None or worker.running.task_id != report.task_id:
            return
        admitted, task = self._admitted[worker.worker_id], worker.running
        worker.running, worker.residency = None, report.residency
        if report.error is not None:
            if report.error.kind is RunErrorKind.WORKER_LOST:
                self._out.append(EndWorker(worker.worker_id, worker.incarnation))
                self._lose(worker, report.error.message)
            else:
                self._try_again(admitted, report.error)
            return
        worker.failures = admitted.attempts = 0
        admitted.steps.popleft()
        admitted.done += 1
        self._results.hold(task.task_id)
        for job in admitted.waiting.pop(task.task_id, []):
            outcome = Outcome.CANCELLED if job.job_id in self._stopping else Outcome.SUCCEEDED
            self._resolve(job, outcome)
        self._results.let_go((*task.needs, task.task_id))

    def _try_again(self, admitted: _Admitted, error: RunError) -> None:
        """The first step failed: repeat it, or fail the jobs that wait for it."""
        admitted.attempts += 1
        if admitted.attempts < MOST_ATTEMPTS and error.kind is not RunErrorKind.BAD_INPUT:
            return
        admitted.attempts = 0
        hopeless = {admitted.steps[0].task_id}
        kept: deque[TaskSpec] = deque()
        for task in admitted.steps:
            if task.task_id in hopeless or hopeless.intersection(task.needs):
                hopeless.add(task.task_id)
                self._results.let_go(task.needs)
            else:
                kept.append(task)
        admitted.steps = kept
        for task_id in sorted(hopeless & admitted.waiting.keys()):
            for job in admitted.waiting.pop(task_id):
                cancelled = job.job_id in self._stopping
                self._resolve(job, Outcome.CANCELLED if cancelled else Outcome.FAILED, None if cancelled else error)

    def _cancel(self, job_id: JobId) -> None:
        """The planned steps run all the same: a plan without them would be another plan."""
        job = self._new.pop(job_id, None)
        if job is not None:
            self._resolve(job, Outcome.CANCELLED)
        elif job_id in self._live:
            self._stopping.add(job_id)

    def _lose(self, worker: PeerWorker, reason: str) -> None:
        """The worker continues with its plan when it is back; if it never is, other workers get it."""
        running, worker.running = worker.running, None
        self.fleet.lost(worker)
        if running is not None:
            error = RunError(RunErrorKind.WORKER_LOST, f"{worker.worker_id} was lost")
            self._try_again(self._admitted[worker.worker_id], error)
        if worker.given_up:
            self._plan_again(worker)

    def _unwanted(self, workers: Sequence[PeerWorker]) -> None:
        for worker in workers:
            self._plan_again(worker)
        if self._new:
            self._out.append(ScheduleTick(0.0))

    def _result_lost(self, task_id: TaskId) -> None:
        self._results.lost(task_id)

    def _plan_again(self, worker: PeerWorker) -> None:
        """All steps of the worker have to be planned again."""
        admitted = self._admitted.pop(worker.worker_id, None)
        if admitted is None:
            return
        for task in admitted.steps:
            self._results.let_go(task.needs)
        for jobs in admitted.waiting.values():
            for job in jobs:
                self._await_plan(job)

    def _resolve(self, job: JobSpec, outcome: Outcome, error: RunError | None = None) -> None:
        self._out.append(ResolveJob(job.job_id, outcome, job.wanted if outcome is Outcome.SUCCEEDED else None, error))
        self._results.let_go(job.given)
        del self._live[job.job_id]
        self._ended.add(job.job_id)
