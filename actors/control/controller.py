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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

from modelpool.actors.config.output_address import NO_OUTPUT, OutputDefaults
from modelpool.actors.control.adaptive_batch import AdaptiveBatches
from modelpool.actors.control.build_requests import build_requests
from modelpool.actors.control.catalog_questions import BUILD_STAGE, TINY_DECODERS, WEIGHTS, CatalogQuestion
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.cluster_facts import ClusterFacts
from modelpool.actors.control.cluster_view import ClusterView, node_changes
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.drivers import Drivers, OpenSubmission
from modelpool.actors.control.fleet import Clock, WorkerFleet
from modelpool.actors.control.growth import WorkerPerGpu
from modelpool.actors.control.history.health_metrics import health_families
from modelpool.actors.control.history.pool_history import PoolHistory
from modelpool.actors.control.job_qos import with_limited_gpus, with_qos, with_request_qos
from modelpool.actors.control.job_queue import JobQueue, end_of
from modelpool.actors.control.metrics.families import MetricFamily
from modelpool.actors.control.metrics.trace_export import TraceExport
from modelpool.actors.control.model_pins import ModelPins
from modelpool.actors.control.node_watch import ClusterNodes, NodeWatch
from modelpool.actors.control.operator_desk import OperatorDesk
from modelpool.actors.control.operator_orders import OperatorOrder, OrderTaken
from modelpool.actors.control.parked_jobs import QueuedJob
from modelpool.actors.control.past_jobs import ControllerMemory, PastJobs, memory_in_text, memory_text
from modelpool.actors.control.pool_log import PoolLog
from modelpool.actors.control.pool_overview import PoolOverview
from modelpool.actors.control.preview_wishes import PreviewWishes
from modelpool.actors.control.question_turns import QuestionTurns
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.control.run_states import RunStates
from modelpool.actors.control.status import (
    PinnedModel,
    PoolStatus,
)
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.graph.features.auto_batch import AS_MEASURED, AutoBatch, BatchTerms
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, SubmittedBatches
from modelpool.actors.request.qos import deadline_warning
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.wire.messages import (
    ClientId,
    DriverEvents,
    JobPreview,
    PreviewMade,
    ResultRef,
    StageSubmission,
    StateSaved,
    StepDone,
    Submission,
    SubmissionId,
    job_id_for,
)
from modelpool.pool.values.core.errors import UserError, unusable_field
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    JobId,
    JudgedFile,
    NodeId,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.autoscaling.preview import ScalingPreview
from modelpool.scheduler.core.history import JobHistory
from modelpool.scheduler.core.scaling_preview import preview
from modelpool.scheduler.core.snapshot import take_snapshot
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.core.waiting_jobs import SubmissionWaits
from modelpool.scheduler.model.messages import (
    Command,
    Event,
    Outcome,
    PoolEnding,
    Remembered,
    ResolveJob,
    ResultLost,
    WorkersWanted,
)
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """The pool that a controller leads.

    name          of the pool
    epoch         larger than the epoch of every earlier controller of the pool
    node          of the controller's process
    budget_bytes  the workers' memory budget, if it is known before they start
    output        for drivers that connect
    auto_batch    what its configuration says about batch sizes
    most_gpus     workers that may share a run
    has_run       whether an earlier controller of the pool has run
    """

    name: str = ""
    epoch: int = 0
    node: NodeId = NO_NODE
    budget_bytes: int | None = None
    output: OutputDefaults = NO_OUTPUT
    auto_batch: AutoBatch = AS_MEASURED
    most_gpus: int = 1
    has_run: bool = False


@dataclass(frozen=True, slots=True)
class WatchedCluster:
    """The nodes of a pool.

    nodes         what they are; None: none is watched
    poll_seconds  interval of asking
    is_elastic    the pool has a worker for each GPU of the cluster, as nodes join and leave
    facts         what users read about them
    obstacle      why the pool may not be disrupted on purpose, by Unix seconds; "" if it may
    """

    nodes: ClusterNodes | None = None
    poll_seconds: float = 2.0
    is_elastic: bool = False
    facts: ClusterFacts | None = None
    obstacle: Callable[[float], str] = lambda unix_seconds: ""


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


class EventWitness(Protocol):
    """Is told of each event that the core has handled, with its commands."""

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Note an event."""


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
        self._budget_bytes, self._most_gpus = pool.budget_bytes, pool.most_gpus
        self._auto_batch = pool.auto_batch
        self._adaptive_batches = AdaptiveBatches(state)
        self._epoch, self._has_run = pool.epoch, pool.has_run
        self._name = pool.name
        self._output = pool.output
        self._node = pool.node
        self._models = models
        self._previews = PreviewWishes()
        self._overview = PoolOverview(state, clock, pool.name, pool.node, cluster.facts)
        self._tasks = TaskStore(
            self._on_report,
            self._overview.node_name,
            pool.epoch,
            lambda task_id: self._previews.of_jobs(self._queue.of_task(task_id)) if self._previews.are_any else None,
            lambda task, report: self._queue.task_ended(task, report),
        )
        self._states = RunStates(records.checkpoints or CheckpointArchive(), fleet)
        self._changed = asyncio.Event()
        self._recorder = records.recorder or Recorder()
        self._past_jobs = PastJobs()
        #: whether a journal has been asked for the memory of the controller before
        self._has_memory = False
        self._traces = records.traces
        self._log = records.log
        self._history = records.history or PoolHistory()
        if records.traces is not None:
            records.traces.follow(state.demand)
        witnesses: list[EventWitness] = [self._recorder, self._history, self._overview.metrics]
        witnesses += [each for each in (records.traces, records.log) if each is not None]
        self._dispatcher = Dispatcher(
            state,
            fleet,
            clock,
            self._tasks,
            self._resolved,
            self._note_change,
            lambda traceback_text: self._queue.fail_all(traceback_text),
            partial(_note_handled, tuple(witnesses)),
            heartbeat_seconds,
        )
        self._drivers = Drivers(clock, self._previews)
        self._queue = JobQueue(state, self._dispatcher, self._tasks, self._drivers, self._recorder.flush)
        self._pins = ModelPins(catalog, self._tasks, self._dispatcher, self._queue)
        self._heartbeat_seconds = heartbeat_seconds
        self._node_watch: NodeWatch | None = None
        self._desk = OperatorDesk(state, self._dispatcher, cluster.nodes, cluster.obstacle)
        if cluster.nodes is not None:
            growth = WorkerPerGpu(state.worker_table, self._dispatcher) if cluster.is_elastic else None
            self._node_watch = NodeWatch(
                cluster.nodes,
                self._dispatcher.post,
                clock,
                cluster.poll_seconds,
                on_view=partial(_follow_cluster, self._history, self._desk, growth),
            )
        #: background tasks until the controller is closed
        self._upkeep: list[asyncio.Task[None]] = []
        self._is_open = asyncio.Event()
        #: set once the fleet knows the workers of earlier controllers: where groups of nodes grow, jobs start workers
        self._has_taken_over = asyncio.Event()

    async def open(self) -> None:
        """Request the workers; they start while drivers already submit. Requests that arrive before the workers of an
        earlier controller are found wait for them. Call once. Of a pool that has not run before, raises OutputFailed
        for the event log, and UserError for a model to pin, or one with settings of its own.
        """
        self._overview.opened()
        if self._log is not None:
            self._log.started(self._name, self._epoch)
        self._recorder.open()
        now = self._clock.now()
        self._history.open(self._state, self._tasks.model_name, self._name, self._epoch, now)
        await self._states.archive.open()
        taken_over = await self._fleet.take_over()  # first: their leases run
        self._has_taken_over.set()
        has_run = self._has_run or taken_over > 0
        if not has_run:  # somebody waits for it who can name another place
            self._recorder.require_file()
        for name in () if has_run else self._models.named:
            found = (await self._catalog.ask(WEIGHTS, name)).model.name
            if found != name:
                raise unusable_field("[pool.models]", name, f"the name of the model, {found}")
        for model, replicas in self._models.pins:
            try:
                await self._pins.pin((model,), replicas)
            except UserError:
                if not has_run:
                    raise
                # its file may be gone since
                logger.exception("model %s is not pinned again", model)
        self._dispatcher.post(WorkersWanted(self._dispatcher.now, self._worker_ids))
        goes_on = [
            self._drivers.keep_sweeping(self.leave),
            self._queue.keep_queueing(),
            self._recorder.keep_writing(self._clock),
            self._history.keep_writing(self._clock.now, self._clock.sleep),
            self._desk.keep_watching_windows(self._clock),
        ]
        if self._heartbeat_seconds is not None:
            goes_on.append(_keep_beating(self._dispatcher, self._clock, self._heartbeat_seconds))
        if self._node_watch is not None:
            goes_on.append(self._node_watch.keep_watching())
        self._upkeep = [asyncio.create_task(each, name=getattr(each, "__qualname__", None)) for each in goes_on]
        for task in self._upkeep:
            task.add_done_callback(_log_bug)
        self._is_open.set()

    async def enter(self, client_id: ClientId) -> None:
        """Register a driver. From now on it must poll for events, or counts as gone."""
        self._drivers.enter(client_id)

    async def leave(self, client_id: ClientId) -> None:
        """Remove a driver and cancel its unfinished jobs. Idempotent."""
        for submission in self._drivers.leave(client_id):
            self._queue.cancel(submission)

    async def submit(self, submission: Submission) -> tuple[Recipe, ...]:
        """Check and queue requests; return their recipes. Raises UserError if one of them is impossible."""
        first = submission.first_index
        with self._queue.checking(submission.client_id, submission.submission_id) as mine:
            jobs: list[QueuedJob] = []
            for index, job in enumerate(await self._built(submission, mine, until_error=True), start=first):
                if isinstance(job, QueuedJob):
                    jobs.append(job)
                elif first == 0 and len(submission.requests) == 1:
                    raise job
                else:
                    raise type(job)(f"request {index}: {job}")
            self._queue.hold(mine, jobs)
            if not submission.hold:
                await self._queue.queue_held(mine)
        recipes = tuple(map(_recipe_of, jobs))
        if mine.hopeless_seconds:
            warnings = (*recipes[0].warnings, *_deadline_warnings(mine))
            recipes = (replace(recipes[0], warnings=warnings), *recipes[1:])
        return recipes

    async def check_each(self, submission: Submission) -> tuple[Recipe | UserError, ...]:
        """Check requests; return the recipe or the error of each. Nothing is queued: the driver says next which of the
        possible ones to queue (`queue_checked`)."""
        with self._queue.checking(submission.client_id, submission.submission_id) as mine:
            built = await self._built(submission, mine)
            mine.undecided |= {job.index: job for job in built if isinstance(job, QueuedJob)}
        return tuple(_recipe_of(job) if isinstance(job, QueuedJob) else job for job in built)

    async def queue_checked(
        self, client_id: ClientId, submission_id: SubmissionId, left_out: frozenset[int], hold: bool = False
    ) -> tuple[int, tuple[str, ...]]:
        """Queue the requests that `check_each` found possible, without those with the indexes `left_out`, which never
        end; `hold` as in `Submission`. Return how many were left out (0 if the submission was cancelled first: then
        all have ended), and warnings about deadlines."""
        with self._queue.checking(client_id, submission_id) as mine:
            undecided, mine.undecided = mine.undecided, {}
            wanted = [job for index, job in undecided.items() if index not in left_out]
            self._queue.hold(mine, wanted)
            if not hold:
                await self._queue.queue_held(mine)
            return len(undecided) - len(wanted), _deadline_warnings(mine)

    async def _built(
        self, submission: Submission, mine: OpenSubmission, until_error: bool = False
    ) -> list[QueuedJob | UserError]:
        """Check requests; return the job or the error of each, or of those up to the first error."""
        await self._has_taken_over.wait()
        is_first = submission.first_index == 0 or not self._previews.tiny_decoders  # for a long submission, once
        if is_first and (submission.previews is not None or any(request.preview for request in submission.requests)):
            self._previews.tiny_decoders = await self._catalog.ask(TINY_DECODERS)
        if submission.previews is not None:
            self._previews.set(submission.submission_id, submission.previews)
        first = submission.first_index
        job_ids = [job_id_for(submission.submission_id, first + i) for i in range(len(submission.requests))]
        wanted = tuple(zip(job_ids, submission.requests, strict=True))
        jobs: list[QueuedJob | UserError] = []
        capacity_bytes = _largest_bytes(self._dispatcher, self._budget_bytes)
        batches = BatchTerms(self._auto_batch, submission.batches)
        images = await build_requests(
            self._catalog, wanted, capacity_bytes, until_error, self._questions, submission.user, batches
        )
        images = await self._adaptive_batches.sized(
            wanted, images, self._catalog, capacity_bytes, self._questions, submission.user, self._dispatcher.now
        )
        self._tasks.catalog_address = self._catalog.files_address
        for i, image in enumerate(images, start=first):
            if isinstance(image, UserError):
                jobs.append(image)
                continue
            try:
                limited = with_limited_gpus(image.graph, self._most_gpus)
            except UserError as problem:
                jobs.append(problem)
                continue
            graph = with_request_qos(submission.requests[i - first], limited, submission, mine.began_at)
            given = {task_id: submission.given[task_id] for task_id in graph.job.given}
            found = await self._states.found(graph)
            preview = submission.requests[i - first].preview or ""
            if preview:
                self._previews.named()
            who = submission.client_id, submission.submission_id, i
            jobs.append(QueuedJob(*who, graph, image.recipe, given, found, preview))
        return jobs

    async def submit_stage(self, wanted: StageSubmission) -> tuple[str, ...]:
        """Check and queue one stage; return its warnings. Raises UserError."""
        job_id = job_id_for(wanted.submission_id, 0)
        with self._queue.checking(wanted.client_id, wanted.submission_id) as mine:
            await self._has_taken_over.wait()
            capacity_bytes = _largest_bytes(self._dispatcher, self._budget_bytes)
            graph = await self._catalog.ask(BUILD_STAGE, wanted.stage, job_id, frozenset(wanted.given), capacity_bytes)
            graph = with_limited_gpus(graph, self._most_gpus)
            graph = with_qos(graph, wanted.submission_id, wanted.user, wanted.priority)
            given = {task_id: wanted.given[task_id] for task_id in graph.job.given}
            found = await self._states.found(graph)
            self._queue.hold(mine, [QueuedJob(wanted.client_id, wanted.submission_id, 0, graph, None, given, found)])
            await self._queue.queue_held(mine)
        return graph.warnings

    async def recipes(
        self, requests: tuple[GenerateRequest, ...], batches: SubmittedBatches = NO_BATCHES
    ) -> tuple[Recipe | UserError, ...]:
        """Return the recipe of each request, or its error. Seeds must be set. Queues nothing. `batches` as in
        `Submission`."""
        asked = [(JobId("asked"), request) for request in requests]
        capacity_bytes = _largest_bytes(self._dispatcher, self._budget_bytes)
        terms = BatchTerms(self._auto_batch, batches)
        built = await build_requests(self._catalog, asked, capacity_bytes, turns=self._questions, batches=terms)
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
        submission = self._drivers.submission(client_id, submission_id)
        if submission is not None:
            self._queue.cancel(submission, withdraw)

    async def cancel_jobs(self, client_id: ClientId, submission_id: SubmissionId, indexes: tuple[int, ...]) -> None:
        """Cancel these jobs of a submission, unless they have ended; running tasks that no other job needs stop at
        their next step. Idempotent.
        """
        submission = self._drivers.submission(client_id, submission_id)
        if submission is not None:
            self._queue.cancel_jobs(submission_id, submission, indexes)

    async def events(self, client_id: ClientId, cursor: int, timeout_seconds: float) -> DriverEvents:
        """Return the driver's pending events, waiting up to `timeout_seconds`. Raises UnknownDriver."""
        driver = self._drivers.get(client_id)
        running, more = (lambda: self._queue.running_for(client_id)), (lambda: bool(driver.submissions))
        return await driver.events.events(cursor, timeout_seconds, running, self._clock.now, more)

    async def steps_done(self, steps: Sequence[StepDone]) -> None:
        """Note the progress of runs that a worker computes together."""
        for step in steps:
            if self._dispatcher.step_done(step):
                job = self._queue.first_of(step.task_id)
                if job is not None and job.client_id in self._drivers.known:
                    self._drivers.known[job.client_id].events.progressed()

    async def preview_made(self, made: PreviewMade) -> None:
        """Pass on a preview of a run that is under way, to the jobs that want it."""
        if not self._dispatcher.is_running(made.worker_id, made.incarnation, made.task_id, made.run):
            return
        for job in self._queue.of_task(made.task_id):
            if job.client_id in self._drivers.known and self._previews.of(job) is not None:
                preview = JobPreview(job.submission_id, job.index, job.graph.job.job_id, made.preview)
                self._drivers.known[job.client_id].events.previewed(preview)

    async def want_previews(self, client_id: ClientId, submission_id: SubmissionId, wish: PreviewWish | None) -> None:
        """Make previews of the submission's sampling runs as `wish` says from now on, of runs that workers have, too;
        None: no more. Ignored if the submission is over."""
        if self._drivers.submission(client_id, submission_id) is None:
            return
        if wish is not None:
            self._previews.tiny_decoders = await self._catalog.ask(TINY_DECODERS)
            if self._drivers.submission(client_id, submission_id) is None:  # it ended meanwhile
                return
        self._previews.set(submission_id, wish)
        for step in self._dispatcher.sent():
            is_its = any(job.submission_id == submission_id for job in self._queue.of_task(step.task_id))
            if is_its and self._tasks.spec(step.task_id).stage is Stage.SAMPLE:
                wanted = self._previews.of_jobs(self._queue.of_task(step.task_id))
                self._fleet.want_previews(step.worker_id, step.incarnation, step.run, wanted)

    async def worker_placed(self, worker_id: WorkerId, incarnation: int, node: NodeId) -> None:
        """Note that a worker's process has started on `node`: from now on it waits for no GPU."""
        await self._overview.placed(worker_id, incarnation, node)
        self._changed.set()

    async def state_saved(self, saved: StateSaved, state: ResultRef, value: RunState) -> None:
        """Hold the state of a sampling run, in place of an earlier one, and save it: a checkpoint. `value` is the state
        itself. Ignored if it is of a run of another controller, which has another number here."""
        if saved.epoch == self._epoch and self._dispatcher.state_saved(saved, state):
            node = self._overview.place_of((saved.worker_id, saved.incarnation))
            self._states.saved(saved, value, is_here=bool(node) and node == self._node)

    async def files_judged(
        self, worker_id: WorkerId, incarnation: int, files: tuple[JudgedFile, ...], epoch: int = 0
    ) -> None:
        """Note what a worker of this controller has found out about files of its machine."""
        if epoch == self._epoch:
            self._dispatcher.files_judged(worker_id, incarnation, files)

    async def jobs_troubled(self, troubles: tuple[str, ...]) -> None:
        """Note why detached jobs wait though the pool could run them, in place of earlier reasons."""
        if self._log is not None:
            self._log.jobs_troubled(self._overview.jobs_troubles, troubles)
        self._history.jobs_troubled(self._overview.jobs_troubles, troubles)
        self._overview.jobs_troubles = troubles

    async def remember(self, memory: str, gap_seconds: float, controllers: int) -> None:
        """Take over the memory of the controller before this one, which ended `gap_seconds` ago, as number
        `controllers` of the pool; "" if there is none. Only the first call counts. A memory that another version wrote
        is ignored."""
        if self._has_memory:
            return
        self._has_memory = True
        self._overview.controllers = controllers + 1
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
        now, facts = self._clock.now(), self._overview.facts
        if self._past_jobs.since(ended):  # their nodes may be gone when somebody asks
            workers = take_snapshot(self._state, now).workers
            await facts.read_names({NodeId(worker.node) for worker in workers if worker.node})
        past = self._past_jobs.packed(self._state, ended, now, facts.names)
        return ControllerMemory(memory_text(self._state, now), self._overview.controllers, past, self._past_jobs.ended)

    async def output_defaults(self) -> OutputDefaults:
        """Return where drivers write outputs unless they choose another place."""
        return self._output

    async def status(self) -> PoolStatus:
        """Return the current state of the pool."""
        status, snapshot = await self._overview.status(self._dispatcher, self._recorder.words, self._queue)
        return replace(
            status,
            pins=self._pins.status(snapshot),
            history_trouble=self._history.trouble,
            submissions=self._drivers.listed.statuses(self._clock.now()),
        )

    async def metrics(self) -> tuple[MetricFamily, ...]:
        """Return the metrics of the pool, from the start of this controller."""
        restarts = self._overview.controllers - 1 if self._has_memory else None
        health = health_families(self._history, self._overview.jobs_troubles, restarts, self._clock.now())
        return (*self._overview.families(self._queue.parked), *health)

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
        await self._pins.pin(models, replicas)
        return (await self.status()).pins

    async def operate(self, order: OperatorOrder) -> OrderTaken:
        """Begin to carry out an operator's order: cordon, uncordon, drain, restart. Raises UserError for a place that
        the pool does not have, and for an order that a limit forbids."""
        await self._is_open.wait()
        return await self._desk.take(order)

    async def would_request(
        self, groups: tuple[NodeGroup, ...] = (), limits: AutoscalingConfig | None = None
    ) -> ScalingPreview:
        """Return what would be requested for the waiting work now, without requesting it: by the pool's groups of
        nodes, or by these. Raises UserError for groups that lack one that workers of the pool are of."""
        return preview(self._state, self._clock.now(), groups, limits)

    async def ask_catalog(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """Return the answer of the catalog to a question of `catalog_questions`. Raises what it raises."""
        return await self._catalog.ask(question, *arguments)

    async def history(self, job: str) -> JobHistory:
        """Return the history of the job with this id, or with this part of an id; of a job of the journal, NAME-PLACE,
        the latest. Raises UnknownName.
        """
        return await self._overview.history(job, self._queue.parked)

    async def waits(self, submission: str) -> SubmissionWaits | None:
        """Return why the unresolved jobs of a submission have not ended; see `PoolOverview.waits`."""
        return self._overview.waits(submission, self._queue.parked)

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
                while self._dispatcher.running() and not self._queue.broken:
                    self._changed.clear()
                    await self._changed.wait()
        await self._states.settle()
        return len(self._dispatcher.running())

    async def close(self) -> None:
        """End the workers. Unfinished jobs are not resolved. Idempotent."""
        for task in self._upkeep:
            task.cancel()
        self._drivers.close()
        self._dispatcher.close()
        await self._fleet.close()
        self._catalog.close()
        self._states.close()
        self._recorder.close()
        await asyncio.to_thread(self._history.close, self._clock.now())
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)  # sends the waiting messages

    def _on_report(self, task: TaskSpec, report: TaskReport) -> None:
        """Pass the cost of successful runs to the catalog, for later activation estimates, and care for the states of
        runs."""
        if report.error is None and report.cost.shows_activations:
            self._catalog.learn(task, report.cost)
        self._states.run_ended(task, report, self._tasks)

    def _resolved(self, command: ResolveJob) -> None:
        job = self._queue.resolve(command.job_id)
        self._past_jobs.note(command.job_id)
        if command.error is not None and command.outcome is Outcome.FAILED:
            self._overview.failed(command.job_id, command.error.message)
        result = None if command.result is None else self._tasks.result(command.result)
        made_by = None if command.result is None else self._tasks.made_by(command.result)
        result_bytes = 0 if command.result is None else self._tasks.result_bytes(command.result)
        tasks = self._tasks.resolve(command.job_id)
        if self._states.has_checkpoints:
            unneeded = [task.task_id for task in job.graph.job.tasks if self._tasks.first_job(task.task_id) is None]
            self._states.job_ended(unneeded, command.outcome is Outcome.SUCCEEDED)
        node = self._overview.place_of(made_by)
        end = end_of(job, command.outcome, result, command.error, tasks, node, result_bytes)
        self._drivers.ended(job.client_id, end)

    def _note_change(self) -> None:
        self._changed.set()
        self._drivers.progressed()


def _follow_cluster(history: PoolHistory, desk: OperatorDesk, growth: WorkerPerGpu | None, view: ClusterView) -> None:
    history.nodes_seen(node_changes(view))
    desk.follow_cluster(view)
    if growth is not None:
        growth.follow(view)


async def _keep_beating(dispatcher: Dispatcher, clock: Clock, interval_seconds: float) -> None:
    while True:
        await clock.sleep(interval_seconds)
        dispatcher.beat()


def _log_bug(task: asyncio.Task[None]) -> None:
    """Log the exception that ended a background task: the pool goes on without it."""
    bug = None if task.cancelled() else task.exception()
    if bug is not None:
        logger.error("a background task of the controller has ended: %s", task.get_name(), exc_info=bug)


def _note_handled(witnesses: Iterable[EventWitness], event: Event, commands: Sequence[Command]) -> None:
    for witness in witnesses:
        witness.note(event, commands)


def _largest_bytes(dispatcher: Dispatcher, budget_bytes: int | None) -> int | None:
    """Return the largest memory of any worker; while none is up, the budget, or None if that is unknown."""
    return max((worker.residency.capacity_bytes for worker in dispatcher.workers), default=budget_bytes)


def _recipe_of(job: QueuedJob) -> Recipe:
    assert job.recipe is not None, f"job {job.index} of a request has a recipe"
    return job.recipe


def _deadline_warnings(submission: OpenSubmission) -> tuple[str, ...]:
    """Return the warning about queued jobs with too early a deadline, once."""
    hopeless, submission.hopeless_seconds = submission.hopeless_seconds, []
    return (deadline_warning(hopeless),) if hopeless else ()
