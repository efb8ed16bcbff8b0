"""`Controller`: the service that drivers talk to. Builds task graphs, feeds the core, and keeps each driver's
events.

Free of Ray: `actors.ray.cluster` turns it into an actor and supplies the fleet. Rules
1. Every public method is a coroutine and waits only for the catalog, for facts about the cluster or for events, never
   for a worker.
2. A submission is checked before any of it is queued; a UserError leaves the pool as it was.
3. Results are references here. Nothing in this module reads one, except the states of stopped runs, to save them.
4. A driver that is silent for `SILENCE_SECONDS` is gone: its jobs are cancelled. A living one always waits for events,
   whatever its program does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, TypeVarTuple

from modelpool.actors.config.output_address import NO_OUTPUT, OutputDefaults
from modelpool.actors.control.build_requests import build_requests
from modelpool.actors.control.catalog_questions import BUILD_STAGE, TINY_DECODERS, WEIGHTS, CatalogQuestion
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.client_events import ClientEvents
from modelpool.actors.control.cluster_facts import ClusterFacts, short_name
from modelpool.actors.control.cluster_view import ClusterView, node_changes
from modelpool.actors.control.connection import UnknownDriver
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.fleet import Clock, WorkerFleet
from modelpool.actors.control.growth import workers_for_gpus
from modelpool.actors.control.history.health_metrics import health_families
from modelpool.actors.control.history.pool_history import PoolHistory
from modelpool.actors.control.job_qos import with_qos, with_request_qos
from modelpool.actors.control.metrics.families import MetricFamily
from modelpool.actors.control.metrics.gauges import PoolGauges
from modelpool.actors.control.metrics.pool_metrics import PoolMetrics
from modelpool.actors.control.metrics.trace_export import TraceExport
from modelpool.actors.control.node_watch import ClusterNodes, NodeWatch
from modelpool.actors.control.opened_catalog import PinnableModel
from modelpool.actors.control.parked_jobs import WINDOW, JobPack, ParkedJobs, QueuedJob, packs_of
from modelpool.actors.control.past_jobs import ControllerMemory, PastJobs, memory_in_text, memory_text
from modelpool.actors.control.pool_log import PoolLog
from modelpool.actors.control.preview_wishes import PreviewWishes
from modelpool.actors.control.question_turns import QuestionTurns
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.control.status import (
    FailedJob,
    PinnedModel,
    PoolStatus,
    Whereabouts,
    pool_status,
    waiting_with_parked,
    with_parked,
)
from modelpool.actors.control.submission_list import MOST_PROMPT, SubmissionList
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.results.outcomes import TaskSummary
from modelpool.actors.request.qos import deadline_warning
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.run_checkpoints import SUSPECT_ERRORS
from modelpool.actors.worker.wire.messages import (
    ClientId,
    DriverEvents,
    JobEnded,
    JobPreview,
    PreviewMade,
    ResultRef,
    StageSubmission,
    StateSaved,
    StepDone,
    Submission,
    SubmissionId,
    TaskProgress,
    job_id_for,
    journaled_id,
    sent_order,
)
from modelpool.pool.values.core.errors import UserError, unknown_name, unusable_field
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    ComponentSpec,
    JobId,
    JudgedFile,
    NodeId,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.core.history import JobHistory, find_job, history_of, with_node_names
from modelpool.scheduler.core.snapshot import take_snapshot, waiting_by_model
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.kept_states import state_id
from modelpool.scheduler.model.messages import (
    CancelRequested,
    Command,
    ComponentsKnown,
    Event,
    Outcome,
    PinComponents,
    PoolEnding,
    Remembered,
    ResolveJob,
    ResultLost,
    Submitted,
    WorkersWanted,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0
SWEEP_SECONDS = 2.0
#: the states of stopped runs may take so long to be saved before the pool ends
ARCHIVE_SECONDS = 4.0
#: starts of workers whose node is remembered; more than run at a time
PLACES_KEPT = 4096
#: failed jobs that the status names
FAILURES_KEPT = 8
#: sizes of components that the core keeps before unused ones are pruned
COMPONENTS_KEPT = 20_000


class PoolBroken(RuntimeError):
    """The scheduler failed because of a bug in modelpool; the message has the details."""


@dataclass(slots=True)
class _Submission:
    """A submission, kept while it has unfinished parts."""

    #: calls that wait for the catalog
    checking: int = 0
    #: checked by `check_each`: their driver has not decided yet whether to queue them
    undecided: dict[int, QueuedJob] = field(default_factory=dict)
    #: converted and checked, not yet queued, and their number
    held: list[JobPack] = field(default_factory=list)
    held_jobs: int = 0
    #: queued, but their turn is far
    parked: dict[JobPack, None] = field(default_factory=dict)
    #: queued and unresolved, in order
    live: dict[JobId, None] = field(default_factory=dict)
    #: indexes of held and parked jobs that were cancelled one by one
    ended_early: set[int] = field(default_factory=set)
    #: indexes of jobs that were cancelled one by one before they were held: they end when they are
    cancelled_early: set[int] = field(default_factory=set)
    cancelled: bool = False
    #: arrival of its first part, on the core's clock: deadlines count from here
    began_at: float = 0.0
    #: minimum run times of its queued jobs whose deadline is sooner
    hopeless_seconds: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return not (self.checking or self.undecided or self.held or self.parked or self.live)


@dataclass(slots=True)
class _Client:
    events: ClientEvents
    submissions: dict[SubmissionId, _Submission] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """The pool that a controller leads.

    name          of the pool
    epoch         larger than that of every earlier controller of the pool
    node          of the controller's process
    budget_bytes  the workers' memory budget, if it is known before they start
    output        for drivers that connect
    """

    name: str = ""
    epoch: int = 0
    node: NodeId = NO_NODE
    budget_bytes: int | None = None
    output: OutputDefaults = NO_OUTPUT


@dataclass(frozen=True, slots=True)
class WatchedCluster:
    """The nodes of a pool.

    nodes         what they are; None: none is watched
    poll_seconds  interval of asking
    is_elastic    the pool has a worker for each GPU of the cluster, as nodes join and leave
    facts         what users read about them
    """

    nodes: ClusterNodes | None = None
    poll_seconds: float = 2.0
    is_elastic: bool = False
    facts: ClusterFacts | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """Where a controller writes; None: nowhere.

    recorder     the event log
    traces       receives the spans of each job
    log          receives entries about jobs, workers and failures
    checkpoints  keeps the states of sampling runs
    history      keeps events and costs
    """

    recorder: Recorder | None = None
    traces: TraceExport | None = None
    log: PoolLog | None = None
    checkpoints: CheckpointArchive | None = None
    history: PoolHistory | None = None


@dataclass(frozen=True, slots=True)
class NamedModels:
    """Models of the settings: `pins` with the replicas to pin at the start, and `named` with settings of their own."""

    pins: tuple[tuple[str, int], ...] = ()
    named: tuple[str, ...] = ()


class Controller:
    """The pool, as drivers see it."""

    def __init__(
        self,
        state: SchedulerState,
        fleet: WorkerFleet,
        clock: Clock,
        catalog: CatalogQueries,
        worker_ids: Sequence[WorkerId],
        pool: PoolIdentity = PoolIdentity(),
        cluster: WatchedCluster | None = None,
        records: Records | None = None,
        models: NamedModels = NamedModels(),
        heartbeat_seconds: float | None = None,
    ) -> None:
        """Without `cluster`, no node is watched, and users read nothing about nodes. Without `records`, nothing is kept
        outside of the process. With `heartbeat_seconds`, silent workers are asked whether they answer at this interval,
        and given up if they do not.
        """
        cluster, records = cluster or WatchedCluster(), records or Records()
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._catalog = catalog
        self._questions = QuestionTurns()
        self._worker_ids = tuple(worker_ids)
        self._budget_bytes = pool.budget_bytes
        self._epoch = pool.epoch
        self._tasks = TaskStore(self._on_report, self._node_name, pool.epoch, self._preview_wish)
        self._previews = PreviewWishes()
        self._facts = cluster.facts or ClusterFacts()
        self._name = pool.name
        self._output = pool.output
        self._node = pool.node
        #: the nodes of workers whose process has started, by id and incarnation, oldest first
        self._placed: dict[tuple[WorkerId, int], NodeId] = {}
        self._clients: dict[ClientId, _Client] = {}
        self._jobs: dict[JobId, QueuedJob] = {}
        #: groups of nodes grow by all the work that waits, so the core must know it
        self._parked = ParkedJobs(None if state.config.groups else WINDOW)
        #: set when parked jobs may be queued
        self._has_room = asyncio.Event()
        #: prune when the core knows more component sizes than this
        self._most_components = COMPONENTS_KEPT
        self._broken = ""
        self._changed = asyncio.Event()
        self._recorder = records.recorder or Recorder()
        self._metrics = PoolMetrics(state.demand, [group.name for group in state.config.groups])
        self._gauges = PoolGauges()
        #: the latest failed jobs: time, id and message, oldest first
        self._failures: deque[tuple[float, JobId, str]] = deque(maxlen=FAILURES_KEPT)
        self._past_jobs = PastJobs()
        self._submissions = SubmissionList()
        #: whether a journal has been asked for the memory of the controller before
        self._has_memory = False
        #: of the pool so far, this one included
        self._controllers = 1
        #: why detached jobs wait
        self._jobs_troubles: tuple[str, ...] = ()
        self._traces = records.traces
        self._log = records.log
        self._history = records.history or PoolHistory()
        if records.traces is not None:
            records.traces.follow(state.demand)
        self._checkpoints = records.checkpoints or CheckpointArchive()
        #: tasks with a result and checkpoints, until no job needs them, and the workers that have saved those
        self._checkpointed: dict[TaskId, tuple[WorkerId, int]] = {}
        #: states of stopped runs that are being read to be saved
        self._archiving: set[asyncio.Task[None]] = set()
        self._dispatcher = Dispatcher(
            state,
            fleet,
            clock,
            self._tasks,
            self._resolved,
            self._note_change,
            self._break,
            self._note_handled,
            heartbeat_seconds,
        )
        self._heartbeat_seconds = heartbeat_seconds
        self._elastic = cluster.is_elastic
        self._node_watch: NodeWatch | None = None
        if cluster.nodes is not None:
            self._node_watch = NodeWatch(
                cluster.nodes, self._dispatcher.post, clock, cluster.poll_seconds, on_view=self._follow_cluster
            )
        #: background tasks until the controller is closed
        self._upkeep: list[asyncio.Task[None]] = []
        self._opened_at = 0.0
        self._is_open = asyncio.Event()
        #: set once the fleet knows the workers of earlier controllers: where groups of nodes grow, jobs start workers
        self._has_taken_over = asyncio.Event()
        self._pinned_at_start = models.pins
        self._named = models.named
        #: the weights of pinned models, by the name that a user gave
        self._pins: dict[str, PinnableModel] = {}

    async def open(self) -> None:
        """Request the workers; they start while drivers already submit. What is submitted before the workers of an
        earlier controller are found waits for them. Call once. Raises OutputFailed for the event
        log, and UserError for a model to pin, or one with settings of its own.
        """
        self._opened_at = self._clock.now()
        if self._log is not None:
            self._log.started(self._name, self._epoch)
        self._recorder.open()
        self._history.open(self._state, self._tasks.model_name, self._name, self._epoch, self._opened_at)
        await self._checkpoints.open()
        taken_over = await self._fleet.take_over()  # first: their leases run
        self._has_taken_over.set()
        for name in () if taken_over else self._named:
            found = (await self._catalog.ask(WEIGHTS, name)).model.name
            if found != name:
                raise unusable_field("[pool.models]", name, f"the name of the model, {found}")
        for model, replicas in self._pinned_at_start:
            try:
                await self._pin((model,), replicas)
            except UserError:
                if not taken_over:
                    raise
                # the pool has run before: its file may be gone since
                logger.exception("model %s is not pinned again", model)
        self._dispatcher.post(WorkersWanted(self._dispatcher.now, self._worker_ids))
        self._upkeep = [
            asyncio.ensure_future(goes_on)
            for goes_on in (
                self._sweep(),
                self._keep_queueing(),
                self._recorder.keep_writing(self._clock),
                self._history.keep_writing(self._clock.now, self._clock.sleep),
            )
        ]
        if self._heartbeat_seconds is not None:
            self._upkeep.append(asyncio.ensure_future(self._keep_beating(self._heartbeat_seconds)))
        if self._node_watch is not None:
            self._upkeep.append(asyncio.ensure_future(self._node_watch.keep_watching()))
        self._is_open.set()

    async def enter(self, client_id: ClientId) -> None:
        """Register a driver. From now on it must poll for events, or counts as gone."""
        self._clients.setdefault(client_id, _Client(ClientEvents(self._clock.now())))

    async def leave(self, client_id: ClientId) -> None:
        """Remove a driver and cancel its unfinished jobs. Idempotent."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            client.events.close()
            for submission_id, submission in tuple(client.submissions.items()):
                self._previews.set(submission_id, None)
                self._cancel(submission)

    async def submit(self, submission: Submission) -> tuple[Recipe, ...]:
        """Check and queue requests; return their recipes. Raises UserError if one of them is impossible."""
        first = submission.first_index
        with self._checking(submission.client_id, submission.submission_id) as mine:
            jobs: list[QueuedJob] = []
            for index, job in enumerate(await self._built(submission, mine, until_error=True), start=first):
                if isinstance(job, QueuedJob):
                    jobs.append(job)
                elif first == 0 and len(submission.requests) == 1:
                    raise job
                else:
                    raise type(job)(f"request {index}: {job}")
            self._hold(mine, jobs)
            if not submission.hold:
                await self._queue_held(mine)
        recipes = tuple(map(_recipe_of, jobs))
        if mine.hopeless_seconds:
            warnings = (*recipes[0].warnings, *_deadline_warnings(mine))
            recipes = (replace(recipes[0], warnings=warnings), *recipes[1:])
        return recipes

    async def check_each(self, submission: Submission) -> tuple[Recipe | UserError, ...]:
        """Check requests; return the recipe or the error of each. Nothing is queued: the driver says next which of the
        possible ones to queue (`queue_checked`)."""
        with self._checking(submission.client_id, submission.submission_id) as mine:
            built = await self._built(submission, mine)
            mine.undecided |= {job.index: job for job in built if isinstance(job, QueuedJob)}
        return tuple(_recipe_of(job) if isinstance(job, QueuedJob) else job for job in built)

    async def queue_checked(
        self, client_id: ClientId, submission_id: SubmissionId, left_out: frozenset[int], hold: bool = False
    ) -> tuple[int, tuple[str, ...]]:
        """Queue the requests that `check_each` found possible, without those with the indexes `left_out`, which never
        end; `hold` as in `Submission`. Return how many were left out (0 if the submission was cancelled first: then
        all have ended), and warnings about deadlines."""
        with self._checking(client_id, submission_id) as mine:
            undecided, mine.undecided = mine.undecided, {}
            wanted = [job for index, job in undecided.items() if index not in left_out]
            self._hold(mine, wanted)
            if not hold:
                await self._queue_held(mine)
            return len(undecided) - len(wanted), _deadline_warnings(mine)

    async def _built(
        self, submission: Submission, mine: _Submission, until_error: bool = False
    ) -> list[QueuedJob | UserError]:
        """Check requests; return the job or the error of each, or of those up to the first error."""
        await self._has_taken_over.wait()
        await self._read_tiny_decoders(submission)
        if submission.previews is not None:
            self._previews.set(submission.submission_id, submission.previews)
        first = submission.first_index
        job_ids = [job_id_for(submission.submission_id, first + i) for i in range(len(submission.requests))]
        wanted = tuple(zip(job_ids, submission.requests, strict=True))
        jobs: list[QueuedJob | UserError] = []
        images = await build_requests(
            self._catalog, wanted, self._capacity_bytes(), until_error, self._questions, submission.user
        )
        self._tasks.catalog_address = self._catalog.files_address
        for i, image in enumerate(images, start=first):
            if isinstance(image, UserError):
                jobs.append(image)
                continue
            graph = with_request_qos(submission.requests[i - first], image.graph, submission, mine.began_at)
            given = {task_id: submission.given[task_id] for task_id in graph.job.given}
            found = await self._found_states(graph)
            preview = submission.requests[i - first].preview or ""
            who = submission.client_id, submission.submission_id, i
            jobs.append(QueuedJob(*who, graph, image.recipe, given, found, preview))
        return jobs

    async def submit_stage(self, wanted: StageSubmission) -> tuple[str, ...]:
        """Check and queue one stage; return its warnings. Raises UserError."""
        job_id = job_id_for(wanted.submission_id, 0)
        with self._checking(wanted.client_id, wanted.submission_id) as mine:
            await self._has_taken_over.wait()
            capacity_bytes = self._capacity_bytes()
            graph = await self._catalog.ask(BUILD_STAGE, wanted.stage, job_id, frozenset(wanted.given), capacity_bytes)
            graph = with_qos(graph, wanted.submission_id, wanted.user, wanted.priority)
            given = {task_id: wanted.given[task_id] for task_id in graph.job.given}
            found = await self._found_states(graph)
            self._hold(mine, [QueuedJob(wanted.client_id, wanted.submission_id, 0, graph, None, given, found)])
            await self._queue_held(mine)
        return graph.warnings

    async def recipes(self, requests: tuple[GenerateRequest, ...]) -> tuple[Recipe | UserError, ...]:
        """Return the recipe of each request, whose seeds must be set, or its error. Queues nothing."""
        asked = [(JobId("asked"), request) for request in requests]
        built = await build_requests(self._catalog, asked, self._capacity_bytes(), turns=self._questions)
        return tuple(one if isinstance(one, UserError) else one.recipe for one in built)

    async def result_lost(self, task_id: TaskId) -> None:
        """Note that a driver could not fetch the result of a task, which was lost with the node that stored it: a later
        job that needs it runs the task again.
        """
        self._tasks.release(task_id)
        self._dispatcher.post(ResultLost(self._dispatcher.now, task_id))

    async def cancel(self, client_id: ClientId, submission_id: SubmissionId, withdraw: bool = False) -> None:
        """Cancel the unfinished jobs of a submission; running tasks stop at their next step. To `withdraw` it, cancel
        only the jobs without a running task. Idempotent.
        """
        client = self._clients.get(client_id)
        if client is not None and submission_id in client.submissions:
            self._cancel(client.submissions[submission_id], withdraw)

    async def cancel_jobs(self, client_id: ClientId, submission_id: SubmissionId, indexes: tuple[int, ...]) -> None:
        """Cancel these jobs of a submission, unless they have ended; running tasks that no other job needs stop at
        their next step. Idempotent.
        """
        client = self._clients.get(client_id)
        if client is None or submission_id not in client.submissions:
            return
        submission = client.submissions[submission_id]
        for index in indexes:
            job_id = job_id_for(submission_id, index)
            if job_id in submission.live:
                self._dispatcher.post(CancelRequested(self._dispatcher.now, job_id))
                continue
            pack = next((each for each in (*submission.held, *submission.parked) if index in each.indexes), None)
            if pack is not None:
                self._end_unqueued(pack, (index,))
                submission.ended_early.add(index)
            elif index in submission.undecided or submission.checking:
                submission.cancelled_early.add(index)

    async def events(self, client_id: ClientId, cursor: int, timeout_seconds: float) -> DriverEvents:
        """Return the driver's pending events, waiting up to `timeout_seconds`. Raises UnknownDriver."""
        client = self._client(client_id)
        running, more = (lambda: self._running_for(client_id)), (lambda: bool(client.submissions))
        return await client.events.events(cursor, timeout_seconds, running, self._clock.now, more)

    async def step_done(self, step: StepDone) -> None:
        """Note the progress of a worker."""
        if self._dispatcher.step_done(step):
            job_id = self._tasks.first_job(step.task_id)
            job = self._jobs.get(job_id) if job_id is not None else None
            if job is not None and job.client_id in self._clients:
                self._clients[job.client_id].events.progressed()

    async def preview_made(self, made: PreviewMade) -> None:
        """Pass on a preview of a run that is under way, to the jobs that want it."""
        if not self._dispatcher.is_running(made.worker_id, made.incarnation, made.task_id, made.run):
            return
        for job in self._jobs_of(made.task_id):
            if job.client_id in self._clients and self._previews.of(job) is not None:
                preview = JobPreview(job.submission_id, job.index, job.graph.job.job_id, made.preview)
                self._clients[job.client_id].events.previewed(preview)

    async def want_previews(self, client_id: ClientId, submission_id: SubmissionId, wish: PreviewWish | None) -> None:
        """Make previews of the submission's sampling runs as `wish` says from now on, of runs that are under way, too;
        None: no more. Ignored if the submission is over."""
        client = self._clients.get(client_id)
        if client is None or submission_id not in client.submissions:
            return
        if wish is not None:
            self._previews.tiny_decoders = await self._catalog.ask(TINY_DECODERS)
            if submission_id not in client.submissions:  # it ended meanwhile
                return
        self._previews.set(submission_id, wish)
        for step in self._dispatcher.running():
            is_its = any(job.submission_id == submission_id for job in self._jobs_of(step.task_id))
            if is_its and self._tasks.spec(step.task_id).stage is Stage.SAMPLE:
                wanted = self._preview_wish(step.task_id)
                self._fleet.want_previews(step.worker_id, step.incarnation, step.run, wanted)

    def _preview_wish(self, task_id: TaskId) -> PreviewWish | None:
        """Return the previews that are wanted of a task: by the first of its jobs that wants some."""
        return next((wish for job in self._jobs_of(task_id) if (wish := self._previews.of(job)) is not None), None)

    def _jobs_of(self, task_id: TaskId) -> Iterator[QueuedJob]:
        """Yield the unresolved jobs that need a task."""
        found = map(self._jobs.get, self._tasks.jobs_of(task_id))
        return (job for job in found if job is not None)

    async def _read_tiny_decoders(self, submission: Submission) -> None:
        """Find the tiny decoders, if previews of a submission may need one; for a long one, once."""
        is_first = submission.first_index == 0 or not self._previews.tiny_decoders
        wanted = submission.previews is not None or any(request.preview for request in submission.requests)
        if is_first and wanted:
            self._previews.tiny_decoders = await self._catalog.ask(TINY_DECODERS)

    async def worker_placed(self, worker_id: WorkerId, incarnation: int, node: NodeId) -> None:
        """Note that a worker's process has started on `node`: from now on it waits for no GPU."""
        await self._facts.read_names((node,))
        self._placed[worker_id, incarnation] = node
        while len(self._placed) > PLACES_KEPT:
            del self._placed[next(iter(self._placed))]
        self._changed.set()

    async def state_saved(self, saved: StateSaved, state: ResultRef, value: RunState) -> None:
        """Hold the state of a sampling run, in place of an earlier one, and save it: a checkpoint. `value` is the state
        itself. Ignored if it is of a run of another controller, which has another number here."""
        if saved.epoch == self._epoch and self._dispatcher.state_saved(saved, state):
            node = self._placed.get((saved.worker_id, saved.incarnation))
            if self._checkpoints.is_shared and node == self._node:  # the worker saves in this folder itself
                self._checkpoints.note(saved.task_id)
            elif self._checkpoints.takes(saved.task_id):
                self._checkpoints.save(saved.task_id, value)

    async def files_judged(
        self, worker_id: WorkerId, incarnation: int, files: tuple[JudgedFile, ...], epoch: int = 0
    ) -> None:
        """Note what a worker of this controller has found out about files of its machine."""
        if epoch == self._epoch:
            self._dispatcher.files_judged(worker_id, incarnation, files)

    async def jobs_troubled(self, troubles: tuple[str, ...]) -> None:
        """Note why detached jobs wait though the pool could run them, in place of earlier reasons."""
        if self._log is not None:
            self._log.jobs_troubled(self._jobs_troubles, troubles)
        self._history.jobs_troubled(self._jobs_troubles, troubles)
        self._jobs_troubles = troubles

    async def remember(self, memory: str, gap_seconds: float, controllers: int) -> None:
        """Take over the memory of the controller before this one, which ended `gap_seconds` ago, as number
        `controllers` of the pool; "" if there is none. Only the first call counts. A memory that another version wrote
        is ignored."""
        if self._has_memory:
            return
        self._has_memory = True
        self._controllers = controllers + 1
        if memory:
            try:
                remembered = memory_in_text(memory)
            except ValueError as failed:
                logger.warning("what the controller before this one has learned is not used: %s", failed)
                return
            self._dispatcher.post(Remembered(self._dispatcher.now, remembered, gap_seconds))

    async def memory(self, ended: int) -> ControllerMemory:
        """Return what a journal keeps for the next controller, with the histories of jobs that have ended since so many
        had."""
        if self._past_jobs.since(ended):  # their nodes may be gone when somebody asks
            workers = take_snapshot(self._state, self._clock.now()).workers
            await self._facts.read_names({NodeId(worker.node) for worker in workers if worker.node})
        now = self._clock.now()
        past = self._past_jobs.packed(self._state, ended, now, self._facts.names)
        return ControllerMemory(memory_text(self._state, now), self._controllers, past, self._past_jobs.ended)

    async def output_defaults(self) -> OutputDefaults:
        """Return where drivers write outputs unless they choose another place."""
        return self._output

    async def status(self) -> PoolStatus:
        """Return the current state of the pool."""
        now, running = self._clock.now(), self._dispatcher.running()
        snapshot, seconds = take_snapshot(self._state, now), now - self._opened_at
        waiting = any(
            worker.status == "starting" and (worker.worker_id, worker.incarnation) not in self._placed
            for worker in snapshot.workers
        )
        nodes = {NodeId(worker.node) for worker in snapshot.workers} | set(self._placed.values()) | {self._node}
        await self._facts.read_names(nodes)
        whereabouts = Whereabouts(
            pool=self._name,
            controller=self._node,
            placed=dict(self._placed),
            names=self._facts.names,
            use=await self._facts.gpu_use() if waiting else None,
        )
        status = pool_status(
            snapshot,
            self._dispatcher.workers.troubles,
            running,
            seconds,
            self._recorder.words,
            whereabouts,
            self._dispatcher.workers.silent,
            {
                task.job_id: (recipe.model, recipe.prompt[:MOST_PROMPT])
                for task in snapshot.running
                if task.job_id in self._jobs and (recipe := self._jobs[task.job_id].recipe) is not None
            },
        )
        known = {pin.components: pin for pin in snapshot.pins}
        pins = [
            PinnedModel(name, pin.replicas, pin.holders, pin.loading, pin.obstacle)
            for name, weights in self._pins.items()
            if (pin := known.get(weights.keys)) is not None
        ]
        failures = tuple(FailedJob(job_id, message, now - at) for at, job_id, message in self._failures)
        by_model = waiting_by_model(self._state.demand.tasks.values())
        status = replace(
            status,
            pins=tuple(pins),
            failures=failures,
            waiting_by_model=by_model,
            jobs_troubles=self._jobs_troubles,
            controller_restarts=self._controllers - 1,
            history_trouble=self._history.trouble,
            submissions=self._submissions.statuses(now),
        )
        return with_parked(status, self._parked.waiting(), len(self._parked))

    async def metrics(self) -> tuple[MetricFamily, ...]:
        """Return the metrics of the pool, from the start of this controller."""
        now = self._clock.now()
        snapshot = take_snapshot(self._state, now)
        by_user, parked = waiting_with_parked(snapshot.waiting_by_user, self._parked.waiting()), len(self._parked)
        by_model = waiting_by_model(self._state.demand.tasks.values())
        restarts = self._controllers - 1 if self._has_memory else None
        health = health_families(self._history, self._jobs_troubles, restarts, now)
        return (*self._metrics.families(now), *self._gauges.families(snapshot, by_user, by_model, parked), *health)

    async def wait_ready(self, timeout_seconds: float) -> PoolStatus:
        """Return the status once every worker has started or was given up, or after `timeout_seconds`."""
        status = await self.status()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not status.workers or any(worker.state == "starting" for worker in status.workers):
                    self._changed.clear()
                    await self._changed.wait()
                    status = await self.status()
        return status

    async def pin(self, models: tuple[str, ...], replicas: int) -> tuple[PinnedModel, ...]:
        """Keep all weights of these models on so many workers each, from now on; 0 unpins them. Returns all pinned
        models. Raises UserError if one of them is unknown, or is to be unpinned and is not pinned; nothing changes
        then."""
        await self._is_open.wait()  # else the pins of the configuration would follow
        return await self._pin(models, replicas)

    async def _pin(self, models: tuple[str, ...], replicas: int) -> tuple[PinnedModel, ...]:
        if replicas > 0:
            found = {name: await self._catalog.ask(WEIGHTS, name) for name in models}
        else:
            unknown = next((name for name in models if name not in self._pins), None)
            if unknown is not None:
                raise unknown_name("pinned model", unknown, self._pins)
            found = {}
        self._tasks.catalog_address = self._catalog.files_address
        for name in models:
            before = self._pins.pop(name, None)
            after = found.get(name)
            if before is not None and (after is None or after.keys != before.keys):
                self._withdraw(before)
            if after is not None:
                self._pins[name] = after
                self._tasks.pin(after)
                self._send_components(spec for _, spec in after.components)
                self._dispatcher.post(PinComponents(self._dispatcher.now, after.keys, replicas))
        return (await self.status()).pins

    def _withdraw(self, weights: PinnableModel) -> None:
        """Unpin weights, unless another name pins the same."""
        if all(other.keys != weights.keys for other in self._pins.values()):
            self._dispatcher.post(PinComponents(self._dispatcher.now, weights.keys, 0))
            self._tasks.unpin(weights.keys)

    async def ask_catalog(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """Return the answer of the catalog to a question of `catalog_questions`. Raises what it raises."""
        return await self._catalog.ask(question, *arguments)

    async def history(self, job: str) -> JobHistory:
        """Return the history of the job with this id, or with this part of an id; of a job of the journal, NAME-PLACE,
        the latest. Raises UnknownName.
        """
        parked = self._parked.jobs_by_id()
        job_id = self._journaled_job(job, parked) or find_job(self._state, job, parked)
        if job_id in parked:
            pack = parked[job_id]
            return _parked_history(job_id, pack, self._parked.place_of(job_id, pack), self._clock.now())
        history = history_of(self._state, job_id, self._clock.now())
        nodes = {attempt.node for task in history.tasks for attempt in task.attempts if attempt.node}
        await self._facts.read_names(nodes | {node for node in self._placed.values() if node})
        return with_node_names(history, self._facts.names)

    def _journaled_job(self, job: str, parked: Iterable[JobId]) -> JobId | None:
        """Return the job that the journal has under the id `job`, as it was sent last; None if there is none here."""
        name, _, place = job.rpartition("-")
        begins, ends = f"{name}.", f"-{place}"
        demand = self._state.demand
        known = (each for jobs in (demand.ended, demand.jobs, parked) for each in jobs)
        # most ids are excluded by their ends, which is faster
        likely = (each for each in known if each.startswith(begins) and each.endswith(ends))
        return max((each for each in likely if journaled_id(each) == job), key=sent_order, default=None)

    async def memory_reports(self) -> dict[WorkerId, ProcessMemory]:
        """Return the host memory of every worker that answers."""
        return await self._fleet.memory_reports()

    async def node_notice(self, node: NodeId, deadline: float | None, reason: str) -> None:
        """Note a notice that a worker received: its node ends at `deadline` (Unix seconds). None withdraws it."""
        if self._node_watch is not None:
            await self._node_watch.notice(node, deadline, reason)

    async def drain(self, seconds: float) -> int:
        """Start nothing any more, and wait until all runs have ended, at most `seconds`. Runs that would not end by
        then stop at their next step, with their state. Returns the number of runs that are left. The pool must be
        closed afterwards.
        """
        self._dispatcher.post(PoolEnding(self._dispatcher.now, self._dispatcher.now + seconds))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._dispatcher.running() and not self._broken:
                    self._changed.clear()
                    await self._changed.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARCHIVE_SECONDS):
                await asyncio.gather(*self._archiving)
                await self._checkpoints.flush(ARCHIVE_SECONDS)
        return len(self._dispatcher.running())

    async def close(self) -> None:
        """End the workers. Unfinished jobs are not resolved. Idempotent."""
        for task in self._upkeep:
            task.cancel()
        for client in self._clients.values():
            client.events.close()
        for archiving in self._archiving:
            archiving.cancel()
        self._dispatcher.close()
        await self._fleet.close()
        self._catalog.close()
        self._checkpoints.close()
        self._recorder.close()
        await asyncio.to_thread(self._history.close, self._clock.now())
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)  # sends what is waiting

    def _follow_cluster(self, view: ClusterView) -> None:
        """Have one worker for each GPU of the nodes that stay."""
        self._history.nodes_seen(node_changes(view))
        if not self._elastic:
            return
        gpu_count = sum(node.gpu_count for node in view.nodes if node.alive and node.drain_deadline is None)
        table = self._state.worker_table.workers.values()
        wanted = workers_for_gpus(gpu_count, table)
        if set(wanted) != {worker.worker_id for worker in table if worker.wanted}:
            self._dispatcher.post(WorkersWanted(self._dispatcher.now, wanted))

    def _client(self, client_id: ClientId) -> _Client:
        if client_id not in self._clients:
            raise UnknownDriver(
                f"this pool does not know driver {client_id}; silent drivers are dropped after {SILENCE_SECONDS:.0f} s"
            )
        return self._clients[client_id]

    @contextlib.contextmanager
    def _checking(self, client_id: ClientId, submission_id: SubmissionId) -> Iterator[_Submission]:
        """Return the submission, new or known, and keep it at least until the end of the block."""
        if self._broken:
            raise PoolBroken(self._broken)
        client = self._client(client_id)
        submission = client.submissions.setdefault(submission_id, _Submission(began_at=self._dispatcher.now))
        submission.checking += 1
        try:
            yield submission
        finally:
            submission.checking -= 1
            self._drop_over(client, submission_id)

    def _capacity_bytes(self) -> int | None:
        """Return the largest memory of any worker; None while unknown."""
        capacities = [worker.capacity_bytes for worker in self._dispatcher.workers.specs]
        return max(capacities, default=self._budget_bytes)

    def _hold(self, submission: _Submission, jobs: Sequence[QueuedJob]) -> None:
        """Keep checked jobs until they are queued."""
        self._submissions.queued(jobs, self._clock.now())
        for pack in packs_of(jobs):
            if self._parked.must_pack(submission.held_jobs):
                pack.pack()
            submission.held.append(pack)
            submission.held_jobs += len(pack)
            cancelled = submission.cancelled_early.intersection(pack.indexes)
            self._end_unqueued(pack, sorted(cancelled))
            submission.ended_early |= cancelled
            submission.cancelled_early -= cancelled

    async def _queue_held(self, submission: _Submission) -> None:
        while submission.held and not submission.cancelled and not self._broken:
            pack = submission.held.pop(0)
            submission.held_jobs -= len(pack)
            if self._parked.may_enter(pack):
                self._queue_pack(submission, pack)
            else:
                self._parked.park(pack, self._dispatcher.now)
                submission.parked[pack] = None
            if submission.held:
                await asyncio.sleep(0)
        if submission.parked:
            self._has_room.set()  # jobs may have ended meanwhile
        self._end_held(submission)

    async def _keep_queueing(self) -> None:
        """Queue parked jobs when their turn is near."""
        while True:
            await self._has_room.wait()
            self._has_room.clear()
            while not self._broken and (pack := self._parked.take_next()) is not None:
                with self._checking(pack.client_id, pack.submission_id) as submission:
                    del submission.parked[pack]
                    self._queue_pack(submission, pack)
                await asyncio.sleep(0)

    def _queue_pack(self, submission: _Submission, pack: JobPack) -> None:
        """Queue the jobs of a pack; once the core has failed, end those that are left. The submission must be kept
        meanwhile: a job may end at once."""
        queued = 0
        try:
            for job in pack.jobs():
                if self._broken:
                    break
                queued += 1
                if job.index not in submission.ended_early:
                    self._queue(submission, job, pack.parked_at)
        except Exception:  # a bug: this job, and everything that is parked, would wait for ever
            self._break(traceback.format_exc())
        if self._broken:
            self._end_unqueued(pack, pack.indexes[queued:])

    def _queue(self, submission: _Submission, job: QueuedJob, submitted_at: float | None) -> None:
        spec = job.graph.job
        is_known = spec.job_id in self._jobs or spec.job_id in self._state.demand.ended
        self._jobs[spec.job_id] = job
        submission.live[spec.job_id] = None
        if not is_known:  # the core ignores others
            self._parked.entered(job.flow)
        self._send_components(job.graph.components)  # first: it may forget the files of components without a task
        self._tasks.add(spec, job.graph.works, job.given, job.graph.fingerprints)
        found = [  # first, as a task may start at once; those that a task has a use for
            saved
            for saved, state in job.found
            if self._tasks.needs_state(saved.task_id) and self._tasks.keep_state(saved, state)
        ]
        self._dispatcher.post(Submitted(self._dispatcher.now, spec, submitted_at))
        for saved in found:
            self._dispatcher.state_kept(saved)
        if spec.deadline is not None:
            known = self._state.demand.jobs.get(spec.job_id)
            if known is not None and known.hopeless_seconds is not None:
                submission.hopeless_seconds.append(known.hopeless_seconds)

    def _send_components(self, components: Iterable[ComponentSpec]) -> None:
        """Send the core the sizes of components that it does not know; prune unused ones first if it knows too many."""
        known = self._state.costs.components
        if len(known) > self._most_components:
            self._dispatcher.prune_components()
            # at least twice the sizes in use, so that pruning stays rare
            self._most_components = max(COMPONENTS_KEPT, 2 * len(self._state.costs.components))
            known = {}  # any of these may have been pruned
        new = tuple(component for component in components if known.get(component.key) != component)
        if new:
            self._dispatcher.post(ComponentsKnown(self._dispatcher.now, new))

    def _end_held(self, submission: _Submission) -> None:
        held, submission.held, submission.held_jobs = submission.held, [], 0
        for pack in held:
            self._end_unqueued(pack, pack.indexes)

    def _end_unqueued(self, pack: JobPack, indexes: Iterable[int]) -> None:
        """End jobs of a pack that never reached the core: the submission was cancelled in between, or the core failed.
        Does not unpack them."""
        error = RunError(RunErrorKind.INTERNAL, self._broken) if self._broken else None
        outcome = Outcome.FAILED if error else Outcome.CANCELLED
        client = self._clients.get(pack.client_id)
        submission = None if client is None else client.submissions.get(pack.submission_id)
        ended = set() if submission is None else submission.ended_early
        for index in [index for index in indexes if index not in ended]:
            job_id, nothing = job_id_for(pack.submission_id, index), TaskId("")
            end = JobEnded(pack.submission_id, index, job_id, nothing, outcome, None, None, error, ())
            self._send_end(pack.client_id, end)

    def _cancel(self, submission: _Submission, withdraw: bool = False) -> None:
        submission.cancelled = True
        parked, submission.parked = submission.parked, {}
        self._parked.remove(parked)
        for pack in parked:
            self._end_unqueued(pack, pack.indexes)
        if not withdraw:  # else they end as withdrawn once they would be queued
            undecided, submission.undecided = submission.undecided, {}
            self._hold(submission, list(undecided.values()))
        self._end_held(submission)
        for job_id in tuple(submission.live):
            if not (withdraw and self._tasks.is_running(job_id)):
                self._dispatcher.post(CancelRequested(self._dispatcher.now, job_id))

    def _on_report(self, task: TaskSpec, report: TaskReport) -> None:
        """Pass the cost of successful runs to the catalog, for later activation estimates. Keep on disk what a run that
        stopped has done, and remove checkpoints that may have failed it."""
        if report.error is None:
            self._catalog.learn(task, report.cost)
            if report.has_checkpoints:
                self._checkpointed[task.task_id] = (report.worker_id, report.incarnation)
            if self._tasks.first_job(task.task_id) is None:  # nobody waits for it any more
                self._forget_checkpoints(task.task_id)
        elif report.has_state:
            archiving = asyncio.ensure_future(self._archive(report))
            self._archiving.add(archiving)
            archiving.add_done_callback(self._archiving.discard)
        elif report.cost.steps_before and report.error.kind in SUSPECT_ERRORS:
            self._checkpoints.remove(task.task_id)

    def _forget_checkpoints(self, task_id: TaskId) -> None:
        """Remove the checkpoints of a task that has succeeded, and whose result no job needs any more."""
        self._checkpoints.remove(task_id)
        saved_by = self._checkpointed.pop(task_id, None)
        if saved_by is not None:
            self._fleet.forget_checkpoints(*saved_by, task_id)

    async def _archive(self, report: TaskReport) -> None:
        """Save the state that a run stopped with."""
        await asyncio.sleep(0)  # it is held once the report has been handled
        ref = self._tasks.find(state_id(report.task_id))
        if ref is None:
            return
        try:
            state = await self._fleet.read_result(ref)
        except Exception as failed:  # it is lost with its node, say: the task has an earlier state, or none
            logger.warning("the state of %s could not be saved: %s", report.task_id, failed)
            return
        if isinstance(state, RunState):  # in any case: its worker may end before it has written its own file
            self._checkpoints.save(report.task_id, state)

    async def _found_states(self, graph: JobGraph) -> tuple[tuple[StateSaved, ResultRef], ...]:
        """Return the states that earlier runs of the tasks of a job left, each as a checkpoint of no run."""
        found = []
        for task_id, state in (await self._checkpoints.find(graph.works)).items():
            size_bytes = sum(array.nbytes for array in state.arrays)
            saved = StateSaved(WorkerId(""), 0, task_id, 0, 0, state.step, state.steps, size_bytes)
            found.append((saved, await self._fleet.hold(state)))
        return tuple(found)

    def _node_name(self, worker_id: WorkerId, incarnation: int) -> str:
        return short_name(self._placed.get((worker_id, incarnation), NO_NODE), self._facts.names)

    def _resolved(self, command: ResolveJob) -> None:
        job = self._jobs.pop(command.job_id)
        self._past_jobs.note(command.job_id)
        if command.error is not None and command.outcome is Outcome.FAILED:
            self._failures.append((self._clock.now(), command.job_id, command.error.message))
        if self._parked.left(job.flow):
            self._has_room.set()
        result = None if command.result is None else self._tasks.result(command.result)
        made_by = None if command.result is None else self._tasks.made_by(command.result)
        node = NO_NODE if made_by is None else self._placed.get(made_by, NO_NODE)
        tasks = self._tasks.resolve(command.job_id)
        for task in job.graph.job.tasks:
            if self._tasks.first_job(task.task_id) is None:
                if command.outcome is Outcome.SUCCEEDED:
                    self._forget_checkpoints(task.task_id)
                else:  # it may be submitted again: they stay until their folder needs the room
                    self._checkpointed.pop(task.task_id, None)
        self._send_end(job.client_id, _end_of(job, command.outcome, result, command.error, tasks, node))

    def _send_end(self, client_id: ClientId, end: JobEnded) -> None:
        self._submissions.ended(end.submission_id, end.outcome)
        client = self._clients.get(client_id)
        if client is None:
            return
        client.events.ended(end)
        if end.submission_id in client.submissions:
            client.submissions[end.submission_id].live.pop(end.job_id, None)
            self._drop_over(client, end.submission_id)

    def _drop_over(self, client: _Client, submission_id: SubmissionId) -> None:
        if submission_id in client.submissions and client.submissions[submission_id].over:
            del client.submissions[submission_id]
            self._previews.set(submission_id, None)
            if not client.submissions:
                client.events.all_ended()

    def _running_for(self, client_id: ClientId) -> tuple[TaskProgress, ...]:
        running = []
        for step in self._dispatcher.running():
            job_id = self._tasks.first_job(step.task_id)
            job = self._jobs.get(job_id) if job_id is not None else None
            if job is not None and job.client_id == client_id:
                stage = self._tasks.spec(step.task_id).stage
                running.append(
                    TaskProgress(
                        job.submission_id, job.index, job.graph.job.job_id, stage, step.worker_id, step.step, step.steps
                    )
                )
        return tuple(running)

    def _note_handled(self, event: Event, commands: Sequence[Command]) -> None:
        self._recorder.note(event, commands)
        self._history.note(event, commands)
        self._metrics.note(event, commands)
        if self._traces is not None:
            self._traces.note(event, commands)
        if self._log is not None:
            self._log.note(event, commands)

    def _note_change(self) -> None:
        self._changed.set()
        for client in self._clients.values():
            client.events.progressed()

    def _break(self, traceback_text: str) -> None:
        """Handle a failure of the core: fail all unfinished jobs."""
        self._recorder.flush()
        if not self._broken:  # what follows from the first failure explains nothing
            self._broken = f"the scheduler failed, and the pool must be restarted:\n{traceback_text}"
        jobs, self._jobs = tuple(self._jobs.values()), {}
        error = RunError(RunErrorKind.INTERNAL, self._broken)
        for job in jobs:
            self._send_end(job.client_id, _end_of(job, Outcome.FAILED, None, error, ()))
        parked = self._parked.take_all()
        for pack in parked:
            client = self._clients.get(pack.client_id)
            if client is not None and pack.submission_id in client.submissions:
                client.submissions[pack.submission_id].parked.pop(pack, None)
        for pack in parked:
            self._end_unqueued(pack, pack.indexes)

    async def _keep_beating(self, interval_seconds: float) -> None:
        while True:
            await self._clock.sleep(interval_seconds)
            self._dispatcher.beat()

    async def _sweep(self) -> None:
        """Remove drivers that are gone."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            now = self._clock.now()
            for client_id, client in tuple(self._clients.items()):
                if client.events.quiet_seconds(now) > SILENCE_SECONDS:
                    await self.leave(client_id)


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


def _recipe_of(job: QueuedJob) -> Recipe:
    assert job.recipe is not None, f"job {job.index} of a request has a recipe"
    return job.recipe


def _deadline_warnings(submission: _Submission) -> tuple[str, ...]:
    """Return the warning about queued jobs whose deadline is too soon, once."""
    hopeless, submission.hopeless_seconds = submission.hopeless_seconds, []
    return (deadline_warning(hopeless),) if hopeless else ()


def _end_of(
    job: QueuedJob,
    outcome: Outcome,
    result: ResultRef | None,
    error: RunError | None,
    tasks: tuple[TaskSummary, ...],
    node: NodeId = NO_NODE,
) -> JobEnded:
    return JobEnded(
        submission_id=job.submission_id,
        index=job.index,
        job_id=job.graph.job.job_id,
        wanted=job.graph.job.wanted,
        outcome=outcome,
        recipe=job.recipe,
        result=result,
        error=error,
        tasks=tasks,
        node=node,
    )
