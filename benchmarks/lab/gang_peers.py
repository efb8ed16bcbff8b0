"""Policies of other systems for runs that several GPUs share, as cores for the simulator.

FixedDegree   groups of so many GPUs, each with one job at a time, in order of arrival: xDiT and vLLM-Omni as deployed
TailAware     the same, and long requests, up to a quota, wait behind all others and are stopped for them at a step
              (`super_p95`, vllm-project/vllm-omni#3916)
RoundRobin    the same, and deficit round robin over the models (keyed DRR, vllm-project/vllm-omni#3860)
Rounds        TetriServe (arXiv 2510.01565): in rounds, each request gets the least number of GPUs with which it meets
              its deadline, those first that can wait least; what is left makes others faster
SlackFirst    GENSERVE (arXiv 2604.04335): images on one GPU each; for those that would be late the video with most
              time to spare is stopped at a step; videos get the least number of GPUs that meets their deadline, and
              idle ones

They know run times exactly, load and form gangs at the same price as all policies, and prefer GPUs that have the
weights. Nothing fails here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from modelpool.benchmarks.lab.core import PeerCore
from modelpool.benchmarks.lab.fleet import PeerWorker
from modelpool.benchmarks.lab.jobs import PeerJob, peer_job
from modelpool.pool.values.specs.spec import JobId, NodeId, Stage, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.model.gang_times import FORMING_SECONDS, prior_seconds
from modelpool.scheduler.model.messages import (
    GangMember,
    Outcome,
    ResolveJob,
    RunEnded,
    RunInGang,
    RunTask,
    ScheduleTick,
    StopTask,
    Submitted,
)
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: seconds of a round of TetriServe: several steps of a video, and long against the 0.8 s in which a gang is formed. No
#: other length was measured
ROUND_SECONDS = 5.0
#: part of the requests that `super_p95` may treat as long
TAIL_QUOTA = 0.1
#: seconds that each model earns in a turn of deficit round robin
QUANTUM_SECONDS = 10.0
#: seconds before a deadline that are left for loads and messages
SPARE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Sampling:
    """The sampling run of a job: waiting, or on `members`, of which `left` have not ended.

    step     that it has done
    due      when it must have ended; infinity without a deadline
    """

    job: PeerJob
    task: TaskSpec
    due: float
    step: int = 0
    attempt: int = 0
    members: tuple[PeerWorker, ...] = ()
    left: set[WorkerId] = field(default_factory=set)
    began_at: float = 0.0
    is_stopping: bool = False

    @property
    def is_running(self) -> bool:
        return bool(self.members)

    @property
    def is_long(self) -> bool:
        """Whether it is a video: eight GPUs may share it."""
        return self.task.degrees[-1] >= 8

    def seconds(self, degree: int) -> float:
        """Of the steps that were left when it began last, or are left."""
        steps = self.task.uses[0].passes
        remaining = (steps - self.step) / steps
        return prior_seconds(self.task, self.task.run_seconds * remaining, degree, remaining)

    def left_seconds(self, at: float) -> float:
        """Until it ends on its workers."""
        return max(0.0, self.began_at + self.seconds(len(self.members)) - at)

    def least_degree(self, at: float) -> int | None:
        """The least number of GPUs with which it would meet its deadline from now on; None if it cannot."""
        done = 0.0
        if self.is_running:
            done = (at - self.began_at) / max(1e-9, self.seconds(len(self.members)))
        for degree in self.task.degrees:
            if at + SPARE_SECONDS + (1.0 - min(1.0, max(0.0, done))) * self.seconds(degree) <= self.due:
                return degree
        return None


class GangPeer(PeerCore):
    """Jobs of tasks that run where they may; a subclass decides which workers sample what."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        super().__init__(gpus)
        self.jobs: dict[JobId, PeerJob] = {}
        self.samplings: dict[TaskId, Sampling] = {}
        #: other tasks that can start, in order
        self.side: deque[tuple[PeerJob, TaskSpec]] = deque()
        self._begun: set[TaskId] = set()
        self._owners: dict[TaskId, PeerJob] = {}
        self._on: dict[WorkerId, TaskId] = {}
        self._gangs = 0

    # to be implemented by subclasses

    @abstractmethod
    def plan(self) -> None:
        """Start and stop samplings."""

    def places(self, job: PeerJob) -> list[PeerWorker]:
        """The idle workers for another task of the job, best first."""
        return self.idle()

    def arrived(self, job: PeerJob) -> None:
        """A job has come."""

    def ended(self, job: PeerJob) -> None:
        """A job has its result."""

    # for use by subclasses

    def idle(self) -> list[PeerWorker]:
        """Workers that run nothing."""
        return [worker for worker in self.fleet.workers.values() if worker.spec and worker.worker_id not in self._on]

    def start(self, sampling: Sampling, workers: Sequence[PeerWorker]) -> None:
        """Start a sampling on these workers."""
        sampling.members, sampling.left = tuple(workers), {worker.worker_id for worker in workers}
        sampling.attempt += 1
        sampling.is_stopping = False
        sampling.began_at = self.at + (FORMING_SECONDS if len(workers) > 1 else 0.0)
        members = tuple(GangMember(worker.worker_id, worker.incarnation) for worker in workers)
        self._gangs += 1
        for rank, worker in enumerate(workers):
            self._on[worker.worker_id] = sampling.task.task_id
            run = RunTask(
                worker.worker_id,
                worker.incarnation,
                sampling.task.task_id,
                sampling.attempt,
                resume=sampling.step > 0,
            )
            self._out.append(run if len(workers) == 1 else RunInGang(run, str(self._gangs), members, rank))

    def stop(self, sampling: Sampling) -> None:
        """Stop a sampling at its next step, with its state."""
        if sampling.is_running and not sampling.is_stopping:
            sampling.is_stopping = True
            for worker in sampling.members:
                self._out.append(
                    StopTask(worker.worker_id, worker.incarnation, sampling.task.task_id, sampling.attempt, True)
                )

    def waiting(self) -> list[Sampling]:
        """Samplings that run nowhere, in order of arrival."""
        return [sampling for sampling in self.samplings.values() if not sampling.is_running]

    def running(self) -> list[Sampling]:
        """Samplings that run, and were not asked to stop."""
        return [one for one in self.samplings.values() if one.is_running and not one.is_stopping]

    def take(self, sampling: Sampling, degree: int) -> list[PeerWorker] | None:
        """Idle workers of one machine for a sampling, those first that have its weights; None if there are too few."""
        by_node: dict[NodeId, list[PeerWorker]] = {}
        for worker in self.idle():
            by_node.setdefault(worker.gpu.node, []).append(worker)
        component = sampling.task.uses[0].component
        best: tuple[int, list[PeerWorker]] | None = None
        for workers in by_node.values():
            workers.sort(key=lambda worker: (_misses(worker, component), worker.rank))
            if len(workers) >= degree:
                misses = sum(_misses(worker, component) for worker in workers[:degree])
                if best is None or misses < best[0]:
                    best = (misses, workers[:degree])
        return None if best is None else best[1]

    # events

    def dispatch(self) -> None:
        """Start what can start, after every event."""
        self._run_side()
        self.plan()
        self._run_side()

    def _run_side(self) -> None:
        left: deque[tuple[PeerJob, TaskSpec]] = deque()
        while self.side:
            job, task = self.side.popleft()
            places = self.places(job)
            if not places:
                left.append((job, task))
                continue
            component = task.uses[0].component if task.uses else None
            worker = min(places, key=lambda one: (_misses(one, component), one.rank))
            self._on[worker.worker_id] = task.task_id
            self._out.append(RunTask(worker.worker_id, worker.incarnation, task.task_id, 1))
        self.side = left

    def _submit(self, event: Submitted) -> None:
        job = peer_job(event.job, len(self.jobs) + len(self._ended) + 1, self.at, self.components)
        self.jobs[event.job.job_id] = job
        self.arrived(job)
        self._go_on(job)

    def _go_on(self, job: PeerJob) -> None:
        for task in job.job.tasks:
            if task.task_id in self._begun or not job.completed.issuperset(task.needs):
                continue
            self._begun.add(task.task_id)
            self._owners[task.task_id] = job
            if task.stage is Stage.SAMPLE:
                later = sum(other.run_seconds for other in job.job.tasks if other.stage is Stage.DECODE)
                parts = sum(other.stage is Stage.DECODE for other in job.job.tasks)
                deadline = job.job.deadline
                due = inf if deadline is None else deadline - later / max(1, parts - 1)
                self.samplings[task.task_id] = Sampling(job, task, due)
            else:
                self.side.append((job, task))

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self.fleet.workers[report.worker_id]
        worker.residency = report.residency
        if self._on.pop(report.worker_id, None) != report.task_id:
            return
        sampling, job = self.samplings.get(report.task_id), self._owners[report.task_id]
        if sampling is not None:
            sampling.left.discard(report.worker_id)
            if report.has_state:
                sampling.step = max(sampling.step, report.step)
            elif report.error is None:
                sampling.is_stopping = False
                job.completed.add(report.task_id)
            if sampling.left:
                return
            sampling.members = ()
            if report.task_id not in job.completed:
                return
            del self.samplings[report.task_id]
        job.completed.add(report.task_id)
        if job.job.wanted in job.completed:
            del self.jobs[job.job.job_id]
            self._ended.add(job.job.job_id)
            self._out.append(ResolveJob(job.job.job_id, Outcome.SUCCEEDED, job.job.wanted))
            self.ended(job)
        else:
            self._go_on(job)

    def freed(self, worker: PeerWorker) -> None:
        """A worker came up."""

    def _cancel(self, job_id: JobId) -> None:
        raise AssertionError("nothing is cancelled here")

    def _result_lost(self, task_id: TaskId) -> None:
        raise AssertionError("nothing is lost here")

    def _unwanted(self, workers: Sequence[PeerWorker]) -> None:
        """All workers stay."""

    def _lose(self, worker: PeerWorker, reason: str) -> None:
        raise AssertionError(f"nothing is lost here: {reason}")

    def _looked_again(self) -> None:
        """Time has passed."""


class FixedDegree(GangPeer):
    """Groups of `degree` GPUs, each with one job at a time."""

    def __init__(self, gpus: Iterable[SimulatedGpu], degree: int) -> None:
        found = tuple(gpus)
        super().__init__(found)
        self._degree = degree
        self._groups = [
            tuple(gpu.worker_id for gpu in found[first : first + degree]) for first in range(0, len(found), degree)
        ]
        self._held: dict[int, PeerJob] = {}
        self._models: dict[int, str] = {}
        self.queue: list[PeerJob] = []

    def arrived(self, job: PeerJob) -> None:
        self.queue.append(job)

    def ended(self, job: PeerJob) -> None:
        self._held = {group: held for group, held in self._held.items() if held is not job}

    def next_job(self) -> PeerJob:
        """The job that an idle group gets; there is one."""
        return self.queue[0]

    def places(self, job: PeerJob) -> list[PeerWorker]:
        mine = [name for group, held in self._held.items() if held is job for name in self._groups[group]]
        return [worker for worker in self.idle() if worker.worker_id in mine]

    def plan(self) -> None:
        up = {worker.worker_id for worker in self.idle()}
        while self.queue:
            free = [place for place in range(len(self._groups)) if place not in self._held]
            free = [place for place in free if up.issuperset(self._groups[place])]
            if not free:
                break
            job = self.next_job()
            group = min(free, key=lambda place: (self._models.get(place, job.model) != job.model, place))
            self.queue.remove(job)
            self._held[group], self._models[group] = job, job.model
        for sampling in self.waiting():
            workers = self.places(sampling.job)
            degree = max((one for one in sampling.task.degrees if one <= self._degree), default=1)
            if len(workers) >= degree:
                self.start(sampling, workers[:degree])


class TailAware(FixedDegree):
    """The same with a quota of long requests that others go before, also at a step."""

    def __init__(self, gpus: Iterable[SimulatedGpu], degree: int) -> None:
        super().__init__(gpus, degree)
        self._seen = self._long = 0
        self._low: set[JobId] = set()

    def arrived(self, job: PeerJob) -> None:
        self._seen += 1
        longest = max(task.run_seconds for task in job.job.tasks)
        others = [max(task.run_seconds for task in one.job.tasks) for one in self.jobs.values()]
        if longest >= max(others) and longest > min(others) and self._long < TAIL_QUOTA * self._seen:
            self._long += 1
            self._low.add(job.job.job_id)
        super().arrived(job)

    def next_job(self) -> PeerJob:
        return min(self.queue, key=lambda job: (job.job.job_id in self._low, job.number))

    def plan(self) -> None:
        super().plan()
        normal = [job for job in self.queue if job.job.job_id not in self._low]
        for group, job in list(self._held.items()):
            if not normal:
                return
            sampling = next((one for one in self.samplings.values() if one.job is job), None)
            if job.job.job_id not in self._low or sampling is None:
                continue
            if sampling.is_running:
                self.stop(sampling)
            else:  # it has stopped: it waits again, and another job takes its group
                del self._held[group]
                self.queue.append(job)
            normal.pop()
        if any(place not in self._held for place in range(len(self._groups))) and self.queue:
            super().plan()


class RoundRobin(FixedDegree):
    """The same with deficit round robin over the models."""

    def __init__(self, gpus: Iterable[SimulatedGpu], degree: int) -> None:
        super().__init__(gpus, degree)
        self._deficits: dict[str, float] = {}
        self._turn: deque[str] = deque()

    def arrived(self, job: PeerJob) -> None:
        if job.model not in self._deficits:
            self._deficits[job.model] = 0.0
            self._turn.append(job.model)
        super().arrived(job)

    def next_job(self) -> PeerJob:
        while True:
            model = self._turn[0]
            job = next((one for one in self.queue if one.model == model), None)
            if job is None:
                self._deficits[model] = 0.0
            else:
                cost = sum(task.run_seconds for task in job.job.tasks)
                if self._deficits[model] >= cost:
                    self._deficits[model] -= cost
                    return job
                self._deficits[model] += QUANTUM_SECONDS
            self._turn.rotate(-1)


class Rounds(GangPeer):
    """TetriServe."""

    def __init__(self, gpus: Iterable[SimulatedGpu], round_seconds: float = ROUND_SECONDS) -> None:
        super().__init__(gpus)
        self._round_seconds = round_seconds
        self._next_at = 0.0
        self._ticking = False

    def _looked_again(self) -> None:
        self._ticking = False

    def plan(self) -> None:
        if not self.samplings:
            return
        if not self._ticking:
            self._ticking = True
            self._out.append(ScheduleTick(self._round_seconds))
        if self.at >= self._next_at:
            self._next_at = self.at + self._round_seconds - 1e-6
            self._new_round()
        for sampling in sorted(self.waiting(), key=self._urgency):
            degree = sampling.least_degree(self.at) or 1
            workers = self.take(sampling, self._grown(sampling, degree)) or self.take(sampling, 1)
            if workers is not None:
                self.start(sampling, workers)

    def _urgency(self, sampling: Sampling) -> tuple[bool, float]:
        """How long it can wait and still meet its deadline; those that cannot meet it come last."""
        degree = sampling.least_degree(self.at)
        return degree is None, sampling.due - sampling.seconds(degree or 1)

    def _grown(self, sampling: Sampling, degree: int) -> int:
        """As many GPUs as nothing else needs in this round."""
        others = len(self.waiting()) - 1
        spare = len(self.idle()) - others
        return max([one for one in sampling.task.degrees if degree <= one <= spare], default=degree)

    def _new_round(self) -> None:
        """Stop what should continue on another number of GPUs: what needs more to meet its deadline, and what has more
        than it needs while others wait."""
        waiting = [one for one in self.waiting() if one.least_degree(self.at) is not None]
        free = len(self.idle())
        needed = sum(one.least_degree(self.at) or 1 for one in waiting)
        for sampling in sorted(self.running(), key=lambda one: -one.due):
            degree = sampling.least_degree(self.at)
            has = len(sampling.members)
            if sampling.left_seconds(self.at) <= self._round_seconds / 2:
                continue
            is_short = degree is not None and degree > has and degree - has <= free
            is_rich = needed > free and (degree or 1) < has
            if is_short or is_rich:
                self.stop(sampling)
                free += has - (degree or 1)


class SlackFirst(GangPeer):
    """GENSERVE."""

    def plan(self) -> None:
        images = [one for one in self.waiting() if not one.is_long]
        videos = [one for one in self.waiting() if one.is_long]
        for sampling in sorted(images, key=lambda one: one.due):
            workers = self.take(sampling, 1)
            if workers is not None:
                self.start(sampling, workers)
            elif self.at + sampling.seconds(1) <= sampling.due and not any(
                one.is_stopping for one in self.samplings.values()
            ):
                self._preempt(sampling)
        if images and any(not one.is_running for one in images):
            return
        for sampling in sorted(videos, key=lambda one: one.due):
            degree = sampling.least_degree(self.at) or 1
            spare = len(self.idle()) - (len(videos) - 1)
            grown = max([one for one in sampling.task.degrees if degree <= one <= spare], default=degree)
            workers = self.take(sampling, grown) or self.take(sampling, degree) or self.take(sampling, 1)
            if workers is not None:
                self.start(sampling, workers)
        self._grow()

    def _preempt(self, image: Sampling) -> None:
        """Stop the video with most time to spare, if the image would be late otherwise."""
        soonest = min((one.left_seconds(self.at) for one in self.running()), default=inf)
        if self.at + soonest + image.seconds(1) <= image.due:
            return
        videos = [one for one in self.running() if one.is_long]
        slack = {one.task.task_id: one.due - self.at - one.left_seconds(self.at) for one in videos}
        best = max(videos, key=lambda one: slack[one.task.task_id], default=None)
        if best is not None and best.left_seconds(self.at) > 2.0:
            self.stop(best)

    def _grow(self) -> None:
        """Let a video continue on idle GPUs."""
        idle = len(self.idle())
        for sampling in self.running():
            has = len(sampling.members)
            more = [one for one in sampling.task.degrees if has < one <= has + idle]
            if sampling.is_long and more and sampling.left_seconds(self.at) > 10.0:
                self.stop(sampling)
                return


def _misses(worker: PeerWorker, component: str | None) -> bool:
    """Whether a worker lacks weights."""
    if component is None or worker.residency is None:
        return False
    return all(entry.component != component for entry in worker.residency.entries)
