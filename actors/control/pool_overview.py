"""`PoolOverview`: what users read about a pool: its status, its metrics, and the histories of its jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from modelpool.actors.control.cluster_facts import ClusterFacts, short_name
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.fleet import Clock
from modelpool.actors.control.job_queue import JobQueue
from modelpool.actors.control.metrics.families import MetricFamily
from modelpool.actors.control.metrics.gauges import PoolGauges
from modelpool.actors.control.metrics.pool_metrics import PoolMetrics
from modelpool.actors.control.parked_jobs import JobPack, ParkedJobs
from modelpool.actors.control.status import (
    FailedJob,
    PoolStatus,
    Whereabouts,
    pool_status,
    waiting_with_parked,
    with_parked,
)
from modelpool.actors.control.submission_list import MOST_PROMPT
from modelpool.actors.worker.wire.messages import journaled_id, sent_order
from modelpool.pool.values.specs.spec import NO_NODE, JobId, NodeId, WorkerId
from modelpool.scheduler.core.history import JobHistory, find_job, history_of, with_node_names
from modelpool.scheduler.core.snapshot import Snapshot, take_snapshot, waiting_by_model
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.core.waiting_jobs import JobGroup, SubmissionWaits, groups_of

#: starts of workers with a remembered node; more than run at a time
PLACES_KEPT = 4096
#: why a job waits that the core does not know yet
_PARKED = "waits for its turn: earlier jobs of its user and priority have not ended"
#: failed jobs that the status names
FAILURES_KEPT = 8


class PoolOverview:
    """What users read about one pool, from the core and from what its shell has noted here."""

    def __init__(
        self, state: SchedulerState, clock: Clock, name: str, node: NodeId, facts: ClusterFacts | None
    ) -> None:
        """`node` is the node of the controller; without `facts`, nothing is known about nodes."""
        self._state = state
        self._clock = clock
        self._name = name
        self._node = node
        self.facts = facts or ClusterFacts()
        self._opened_at = 0.0
        #: the nodes of started workers, by id and incarnation, oldest first
        self._placed: dict[tuple[WorkerId, int], NodeId] = {}
        #: the latest failed jobs: time, id and message, oldest first
        self._failures: deque[tuple[float, JobId, str]] = deque(maxlen=FAILURES_KEPT)
        #: controllers of the pool so far, this one included
        self.controllers = 1
        #: why detached jobs wait
        self.jobs_troubles: tuple[str, ...] = ()
        self.metrics = PoolMetrics(state.demand, [group.name for group in state.config.groups])
        self._gauges = PoolGauges()

    def opened(self) -> None:
        """Count the seconds of the pool from now on."""
        self._opened_at = self._clock.now()

    async def placed(self, worker_id: WorkerId, incarnation: int, node: NodeId) -> None:
        """Note that a worker's process has started on `node`."""
        await self.facts.read_names((node,))
        self._placed[worker_id, incarnation] = node
        while len(self._placed) > PLACES_KEPT:
            del self._placed[next(iter(self._placed))]

    def place_of(self, worker: tuple[WorkerId, int] | None) -> NodeId:
        """Return the node of a worker's process, by id and incarnation; NO_NODE if unknown."""
        return NO_NODE if worker is None else self._placed.get(worker, NO_NODE)

    def node_name(self, worker_id: WorkerId, incarnation: int) -> str:
        """Return the display name of that node."""
        return short_name(self.place_of((worker_id, incarnation)), self.facts.names)

    def failed(self, job_id: JobId, message: str) -> None:
        """Note a job that failed."""
        self._failures.append((self._clock.now(), job_id, message))

    async def status(self, dispatcher: Dispatcher, record: str, queue: JobQueue) -> tuple[PoolStatus, Snapshot]:
        """Return the current state of the pool without its pins, and the snapshot that it was made from. `record` is
        as in `PoolStatus`."""
        now, running = self._clock.now(), dispatcher.running()
        snapshot, seconds = take_snapshot(self._state, now), now - self._opened_at
        waiting = any(
            worker.status == "starting" and (worker.worker_id, worker.incarnation) not in self._placed
            for worker in snapshot.workers
        )
        nodes = {NodeId(worker.node) for worker in snapshot.workers} | set(self._placed.values()) | {self._node}
        nodes |= {node for node, _ in snapshot.cordoned_nodes}
        await self.facts.read_names(nodes)
        whereabouts = Whereabouts(
            pool=self._name,
            controller=self._node,
            placed=dict(self._placed),
            names=self.facts.names,
            use=await self.facts.gpu_use() if waiting else None,
        )
        jobs = queue.jobs
        named = {
            task.job_id: (recipe.model, recipe.prompt[:MOST_PROMPT])
            for task in snapshot.running
            if task.job_id in jobs and (recipe := jobs[task.job_id].recipe) is not None
        }
        workers = dispatcher.workers
        status = pool_status(snapshot, workers.troubles, running, seconds, record, whereabouts, workers.silent, named)
        failures = tuple(FailedJob(job_id, message, now - at) for at, job_id, message in self._failures)
        status = replace(
            status,
            failures=failures,
            waiting_by_model=waiting_by_model(self._state.demand.tasks.values()),
            jobs_troubles=self.jobs_troubles,
            controller_restarts=self.controllers - 1,
        )
        return with_parked(status, queue.parked.waiting(), len(queue.parked)), snapshot

    def families(self, parked: ParkedJobs) -> tuple[MetricFamily, ...]:
        """Return the metrics of the pool, from the start of this controller."""
        now = self._clock.now()
        snapshot = take_snapshot(self._state, now)
        by_user = waiting_with_parked(snapshot.waiting_by_user, parked.waiting())
        by_model = waiting_by_model(self._state.demand.tasks.values())
        return (*self.metrics.families(now), *self._gauges.families(snapshot, by_user, by_model, len(parked)))

    async def history(self, job: str, parked_jobs: ParkedJobs) -> JobHistory:
        """Return the history of the job with this id, or with this part of an id; of a job of the journal, NAME-PLACE,
        the latest. Raises UnknownName.
        """
        parked = parked_jobs.jobs_by_id()
        job_id = self._journaled_job(job, parked) or find_job(self._state, job, parked)
        if job_id in parked:
            pack = parked[job_id]
            return _parked_history(job_id, pack, parked_jobs.place_of(job_id, pack), self._clock.now())
        history = history_of(self._state, job_id, self._clock.now())
        nodes = {attempt.node for task in history.tasks for attempt in task.attempts if attempt.node}
        await self.facts.read_names(nodes | {node for node in self._placed.values() if node})
        return with_node_names(history, self.facts.names)

    def waits(self, submission: str, parked_jobs: ParkedJobs) -> SubmissionWaits | None:
        """Return why the unresolved jobs of a submission have not ended, by its id or the only beginning of one; None
        if no such job is here."""
        core: dict[str, list[JobId]] = {}
        for job_id in self._state.demand.jobs:
            core.setdefault(_submission_of(job_id), []).append(job_id)
        parked: dict[str, list[JobId]] = {}
        for job_id in parked_jobs.jobs_by_id():
            parked.setdefault(_submission_of(job_id), []).append(job_id)
        known = {**core, **parked}
        found = [submission] if submission in known else [each for each in known if each.startswith(submission)]
        if len(found) != 1 or not submission:
            return None
        groups = groups_of(self._state, core.get(found[0], ()), self._clock.now())
        if waiting := parked.get(found[0]):
            groups += (JobGroup(len(waiting), _PARKED, waiting[0]),)
        return SubmissionWaits(found[0], groups)

    def _journaled_job(self, job: str, parked: Iterable[JobId]) -> JobId | None:
        """Return the job that the journal has under the id `job`, as it was sent last; None if there is none here."""
        name, _, place = job.rpartition("-")
        begins, ends = f"{name}.", f"-{place}"
        demand = self._state.demand
        known = (each for jobs in (demand.ended, demand.jobs, parked) for each in jobs)
        # most ids are excluded by their ends, which is faster
        likely = (each for each in known if each.startswith(begins) and each.endswith(ends))
        return max((each for each in likely if journaled_id(each) == job), key=sent_order, default=None)


def _submission_of(job_id: JobId) -> str:
    """Return the id of a submission, or its name in the journal, from the id of one of its jobs."""
    return journaled_id(job_id).rpartition("-")[0]


def _parked_history(job_id: JobId, pack: JobPack, before: int, now: float) -> JobHistory:
    """Return the history of a job that the core does not know yet, with `before` jobs of its flow before it."""
    user, priority = pack.flow
    return JobHistory(
        job_id=job_id,
        status="active",
        at=now,
        submitted_at=pack.parked_at,
        note=f"waits for its turn: {before} earlier jobs of its user and priority have not ended",
        priority=priority,
        user=user,
    )
