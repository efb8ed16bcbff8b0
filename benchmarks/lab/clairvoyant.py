"""An offline planner that knows a batch whole: how little can be loaded when everything may be reordered.

What it is. For jobs that all arrive at one time, it is a schedule that can be carried out in the simulated world, with
a makespan planned for `factor` times the least there is (`benchmarks.lab.bounds`). The GPU-seconds that it spends on
loading are those of the best plan that this method finds, not the least possible ones: these lie between
`least_load_seconds` and its own. It is a plan and no bound: another schedule may well be better. No policy that decides
as it goes has its freedom: it starts when all is known, lets any job wait for all others, needs no fairness, and has
true run times. Of jobs that arrive later it knows nothing before; it plans them as a batch of their own, behind what is
planned. Latencies of single jobs say nothing here. The workers' memory is told the whole sequence (`KnownFuture`), and
files are read ahead. The plan counts bytes over links, not reads from disks: where the disks of a machine hold up its
GPUs, others may load in less time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelpool.benchmarks.lab.core import MOST_ATTEMPTS, PeerCore
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.planning import Prices, plan_batch
from modelpool.benchmarks.lab.reading_ahead import ReadingAhead
from modelpool.pool.plan.residency import needed_bytes
from modelpool.pool.specs.spec import JobId, JobSpec, RunError, RunErrorKind, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.simulator.eviction_policies import KnownFuture
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.tables.jobs import problem_with
from modelpool.scheduler.tables.messages import (
    EndWorker,
    LookAgain,
    Outcome,
    Prefetch,
    ResolveJob,
    RunEnded,
    RunTask,
    Submitted,
)

#: the makespan that is planned for, as a multiple of the least
FACTOR = 1.1


@dataclass(slots=True, eq=False)
class _Given:
    """What one worker is to do, in order."""

    steps: deque[TaskSpec] = field(default_factory=deque)
    #: jobs that are done when a step is
    waiting: dict[TaskId, list[JobSpec]] = field(default_factory=dict)
    attempts: int = 0
    #: when it should be done with all that was planned
    busy_until: float = 0.0
    #: steps that are over
    done: int = 0
    ahead: ReadingAhead = field(default_factory=ReadingAhead)


class Clairvoyant(PeerCore):
    """Plans each batch as a whole, tells the memories what comes, and follows the plan."""

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
        self._given: dict[WorkerId, _Given] = {}
        #: jobs that no plan has yet
        self._new: dict[JobId, JobSpec] = {}
        self._live: dict[JobId, JobSpec] = {}
        self._stopping: set[JobId] = set()

    def dispatch(self) -> None:
        """The next step of every worker that is idle."""
        for worker in self.fleet.workers.values():
            self._go_on(worker)

    def freed(self, worker: PeerWorker) -> None:
        """It goes on with its plan, as after every event."""

    def _submit(self, event: Submitted) -> None:
        """Known now; planned when everything of this time is known."""
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
            self._out.append(LookAgain(0.0))
        self._new[job.job_id] = job

    def _looked_again(self) -> None:
        """Give everything that is new a place behind what is planned."""
        workers = self.fleet.usable()
        if not workers or not self._new:
            if self._new and self.fleet.workers:
                self._give_up_on_new(-1)
            return
        self._give_up_on_new(max(worker.gpu.capacity_bytes for worker in workers))
        gpus = [worker.gpu for worker in workers]
        given = [self._given.setdefault(worker.worker_id, _Given()) for worker in workers]
        busy = [max(0.0, each.busy_until - self.at) for each in given]
        plan = plan_batch(list(self._new.values()), gpus, busy, self._prices, self._factor)
        self._new.clear()
        for worker, each, tasks, jobs, busy_seconds in zip(
            workers, given, plan.tasks, plan.jobs, plan.busy_seconds, strict=True
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
        """Jobs that fit on nothing of this size fail."""
        for job in list(self._new.values()):
            if any(needed_bytes(task.uses, task.least_activation_bytes) > capacity_bytes for task in job.tasks):
                del self._new[job.job_id]
                error = RunError(RunErrorKind.WORKER_LOST, "it fits on no worker that is left")
                self._resolve(job, Outcome.FAILED, error)

    def _go_on(self, worker: PeerWorker) -> None:
        """The next step of a worker that is idle."""
        given = self._given.get(worker.worker_id)
        if given is None or not worker.idle or not given.steps:
            return
        task = given.steps[0]
        worker.running = task
        self._out.append(RunTask(worker.worker_id, worker.incarnation, task.task_id, given.attempts))
        if worker.spec is not None and worker.spec.storage_bytes_per_second:
            # half of the memory is for what was read before
            sharing = sum(each.gpu.node == worker.gpu.node for each in self.fleet.workers.values())
            room_bytes = worker.spec.host_bytes // (2 * sharing)
            keys = given.ahead.at_step(given.done, room_bytes, self.components)
            if keys:
                self._out.append(Prefetch(worker.worker_id, worker.incarnation, keys))

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.of(report.worker_id, report.incarnation)
        if worker is None or worker.running is None or worker.running.task_id != report.task_id:
            return
        given, task = self._given[worker.worker_id], worker.running
        worker.running, worker.residency = None, report.residency
        if report.error is not None:
            if report.error.kind is RunErrorKind.WORKER_LOST:
                self._out.append(EndWorker(worker.worker_id, worker.incarnation))
                self._lose(worker, report.error.message)
            else:
                self._try_again(given, report.error)
            return
        worker.failures = given.attempts = 0
        given.steps.popleft()
        given.done += 1
        self._results.hold(task.task_id)
        for job in given.waiting.pop(task.task_id, []):
            outcome = Outcome.CANCELLED if job.job_id in self._stopping else Outcome.SUCCEEDED
            self._resolve(job, outcome)
        self._results.let_go((*task.needs, task.task_id))

    def _try_again(self, given: _Given, error: RunError) -> None:
        """The first step came to nothing: once more, or whoever waits for it fails."""
        given.attempts += 1
        if given.attempts < MOST_ATTEMPTS and error.kind is not RunErrorKind.BAD_INPUT:
            return
        given.attempts = 0
        hopeless = {given.steps[0].task_id}
        kept: deque[TaskSpec] = deque()
        for task in given.steps:
            if task.task_id in hopeless or hopeless.intersection(task.needs):
                hopeless.add(task.task_id)
                self._results.let_go(task.needs)
            else:
                kept.append(task)
        given.steps = kept
        for task_id in sorted(hopeless & given.waiting.keys()):
            for job in given.waiting.pop(task_id):
                cancelled = job.job_id in self._stopping
                self._resolve(job, Outcome.CANCELLED if cancelled else Outcome.FAILED, None if cancelled else error)

    def _cancel(self, job_id: JobId) -> None:
        """What is planned is done all the same: a plan without it would be another plan."""
        job = self._new.pop(job_id, None)
        if job is not None:
            self._resolve(job, Outcome.CANCELLED)
        elif job_id in self._live:
            self._stopping.add(job_id)

    def _lose(self, worker: PeerWorker, reason: str) -> None:
        """It goes on with its plan when it is back; if it never is, others get it."""
        running, worker.running = worker.running, None
        self.fleet.lost(worker)
        if running is not None:
            error = RunError(RunErrorKind.WORKER_LOST, f"{worker.worker_id} was lost")
            self._try_again(self._given[worker.worker_id], error)
        if worker.given_up:
            self._plan_again(worker)

    def _unwanted(self, workers: Sequence[PeerWorker]) -> None:
        for worker in workers:
            self._plan_again(worker)
        if self._new:
            self._out.append(LookAgain(0.0))

    def _result_lost(self, task_id: TaskId) -> None:
        self._results.lost(task_id)

    def _plan_again(self, worker: PeerWorker) -> None:
        """Everything that the worker was to do is new."""
        given = self._given.pop(worker.worker_id, None)
        if given is None:
            return
        for task in given.steps:
            self._results.let_go(task.needs)
        for jobs in given.waiting.values():
            for job in jobs:
                self._await_plan(job)

    def _resolve(self, job: JobSpec, outcome: Outcome, error: RunError | None = None) -> None:
        self._out.append(ResolveJob(job.job_id, outcome, job.wanted if outcome is Outcome.SUCCEEDED else None, error))
        self._results.let_go(job.given)
        del self._live[job.job_id]
        self._ended.add(job.job_id)
