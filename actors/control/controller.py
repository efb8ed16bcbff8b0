"""`Controller`: the service that drivers talk to. Cuts submissions, feeds the core, and keeps each driver's news.

Plain and free of Ray: `actors.ray.cluster` makes an actor of it and brings the fleet. Rules
1. Every public method is a coroutine and waits only for the catalog's thread or for news, never for a worker.
2. A submission is checked before any of it is queued; a UserError leaves the pool as it was.
3. Results are references here. Nothing in this module looks into one.
4. A driver that is not heard of for `SILENCE_SECONDS` is gone: its jobs are cancelled. A living one always waits for
   news, whatever its program does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from modelpool.actors.control.catalog_service import CatalogDesk
from modelpool.actors.control.client_events import ClientFeed
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.fleet import Clock, Fleet
from modelpool.actors.control.job_qos import on_terms, on_terms_of
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.control.status import PoolStatus, pool_status
from modelpool.actors.control.task_store import TaskBook
from modelpool.actors.graph.build_graph import CutJob
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.request.qos import too_late
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.results.outcomes import TaskSummary
from modelpool.actors.wire.messages import (
    ClientId,
    JobEnded,
    News,
    ResultRef,
    RunningTask,
    StageSubmission,
    StepDone,
    Submission,
    SubmissionId,
    job_id_for,
)
from modelpool.actors.worker.host_memory import HostMemory
from modelpool.pool.core.errors import UserError
from modelpool.pool.specs.spec import (
    ComponentSpec,
    JobId,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.core.history import JobHistory, find_job, history_of
from modelpool.scheduler.core.snapshot import take_snapshot
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.tables.messages import (
    CancelAsked,
    ComponentsKnown,
    Outcome,
    ResolveJob,
    Submitted,
    WorkersWanted,
)

if TYPE_CHECKING:
    from modelpool.pool.registry.listings import LoraListing, ModelListing

SILENCE_SECONDS = 60.0
SWEEP_SECONDS = 10.0
#: jobs that are queued before drivers and workers get a word in
QUEUED_AT_ONCE = 16


class UnknownDriver(RuntimeError):
    """A driver that the pool does not know: it was silent for too long, or the pool is another one by now."""


class PoolBroken(RuntimeError):
    """The scheduler failed. That is a mistake of modelpool's; the message holds what it knows."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that is not resolved, whom it is for, and what the driver brought for its tasks to read."""

    client_id: ClientId
    submission_id: SubmissionId
    index: int
    cut: CutJob
    recipe: Recipe | None
    given: Mapping[TaskId, ResultRef]


@dataclass(slots=True)
class _Submission:
    """Kept while there is anything in it."""

    #: calls that wait for the catalog
    checking: int = 0
    #: cut and checked, not queued yet
    held: list[_Job] = field(default_factory=list)
    #: queued and not resolved, in order
    live: dict[JobId, None] = field(default_factory=dict)
    cancelled: bool = False
    #: when its first part came, on the core's clock: deadlines count from here
    began_at: float = 0.0
    #: of its jobs that are queued: seconds that they take at least, where their deadline is sooner
    hopeless_seconds: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return not (self.checking or self.held or self.live)


@dataclass(slots=True)
class _Client:
    feed: ClientFeed
    submissions: dict[SubmissionId, _Submission] = field(default_factory=dict)


class Controller:
    """The pool, as drivers see it."""

    def __init__(
        self,
        state: SchedulerState,
        fleet: Fleet,
        clock: Clock,
        desk: CatalogDesk,
        worker_ids: Sequence[WorkerId],
        budget_bytes: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`budget_bytes` is the workers' memory budget where it is known before they are up."""
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._desk = desk
        self._worker_ids = tuple(worker_ids)
        self._budget_bytes = budget_bytes
        self._book = TaskBook(self._heard)
        self._clients: dict[ClientId, _Client] = {}
        self._jobs: dict[JobId, _Job] = {}
        #: what the core was told of
        self._components: set[ComponentSpec] = set()
        self._broken = ""
        self._changed = asyncio.Event()
        self._recorder = recorder or Recorder()
        self._dispatcher = Dispatcher(
            state, fleet, clock, self._book, self._resolved, self._note_change, self._break, self._recorder.heard
        )
        #: what goes on until the controller is closed
        self._upkeep: list[asyncio.Task[None]] = []
        self._opened_at = 0.0

    async def open(self) -> None:
        """Ask for the workers; they come up while drivers already submit. Once. Raises OutputFailed for the record."""
        self._opened_at = self._clock.now()
        self._recorder.open()
        self._dispatcher.tell(WorkersWanted(self._dispatcher.now, self._worker_ids))
        self._upkeep = [
            asyncio.ensure_future(goes_on) for goes_on in (self._sweep(), self._recorder.keep_writing(self._clock))
        ]

    async def enter(self, client_id: ClientId) -> None:
        """A driver introduces itself. From now on it asks for news, or counts as gone."""
        self._clients.setdefault(client_id, _Client(ClientFeed(self._clock.now())))

    async def leave(self, client_id: ClientId) -> None:
        """A driver goes; what it did not wait for is cancelled. Idempotent."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            client.feed.close()
            for submission in tuple(client.submissions.values()):
                self._cancel(submission)

    async def submit(self, submission: Submission) -> tuple[Recipe, ...]:
        """Check and queue images; their recipes. Raises UserError when one of them cannot be made."""
        first = submission.first_index
        job_ids = [job_id_for(submission.submission_id, first + i) for i in range(len(submission.requests))]
        wanted = tuple(zip(job_ids, submission.requests, strict=True))
        with self._checking(submission.client_id, submission.submission_id) as mine:
            images = await self._desk.cut_images(wanted, first, self._capacity_bytes())
            for i, image in enumerate(images, start=first):
                cut = on_terms_of(submission.requests[i - first], image.cut, submission, mine.began_at)
                given = {task_id: submission.given[task_id] for task_id in cut.job.given}
                mine.held.append(_Job(submission.client_id, submission.submission_id, i, cut, image.recipe, given))
            if not submission.hold:
                await self._queue_held(mine)
        recipes = tuple(image.recipe for image in images)
        if mine.hopeless_seconds:
            warnings = (*recipes[0].warnings, too_late(mine.hopeless_seconds))
            recipes = (replace(recipes[0], warnings=warnings), *recipes[1:])
            mine.hopeless_seconds = []
        return recipes

    async def submit_stage(self, wanted: StageSubmission) -> tuple[str, ...]:
        """Check and queue one stage; what to warn of. Raises UserError."""
        job_id = job_id_for(wanted.submission_id, 0)
        with self._checking(wanted.client_id, wanted.submission_id) as mine:
            cut = await self._desk.cut_stage(wanted.order, job_id, frozenset(wanted.given), self._capacity_bytes())
            cut = on_terms(cut, wanted.submission_id, wanted.user)
            given = {task_id: wanted.given[task_id] for task_id in cut.job.given}
            mine.held.append(_Job(wanted.client_id, wanted.submission_id, 0, cut, None, given))
            await self._queue_held(mine)
        return cut.warnings

    async def recipes(self, requests: tuple[GenerateRequest, ...]) -> tuple[Recipe | UserError, ...]:
        """What each of `requests`, whose seeds must be set, would be made by, or why it cannot be. Queues nothing."""
        return await self._desk.recipes(requests, self._capacity_bytes())

    async def cancel(self, client_id: ClientId, submission_id: SubmissionId) -> None:
        """End what is left of a submission; what runs stops at its next step. Idempotent."""
        client = self._clients.get(client_id)
        if client is not None and submission_id in client.submissions:
            self._cancel(client.submissions[submission_id])

    async def news(self, client_id: ClientId, cursor: int, timeout_seconds: float) -> News:
        """What the driver has not heard yet; waits for that up to `timeout_seconds`. Raises UnknownDriver."""
        client = self._client(client_id)
        running, more = (lambda: self._running_for(client_id)), (lambda: bool(client.submissions))
        return await client.feed.news(cursor, timeout_seconds, running, self._clock.now, more)

    async def step_done(self, step: StepDone) -> None:
        """A worker says how far it is."""
        if self._dispatcher.step_done(step):
            job_id = self._book.first_job(step.task_id)
            job = self._jobs.get(job_id) if job_id is not None else None
            if job is not None and job.client_id in self._clients:
                self._clients[job.client_id].feed.progressed()

    async def status(self) -> PoolStatus:
        """The pool, now."""
        now, running = self._clock.now(), self._dispatcher.running()
        snapshot, seconds = take_snapshot(self._state, now), now - self._opened_at
        return pool_status(snapshot, self._dispatcher.troubles, running, seconds, self._recorder.words)

    async def wait_ready(self, timeout_seconds: float) -> PoolStatus:
        """The status once every worker is up or given up, or when `timeout_seconds` are over."""
        status = await self.status()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not status.workers or any(worker.state == "starting" for worker in status.workers):
                    self._changed.clear()
                    await self._changed.wait()
                    status = await self.status()
        return status

    async def listings(self) -> tuple[tuple[ModelListing, ...], tuple[LoraListing, ...]]:
        """The checkpoints and the LoRAs in the folders."""
        return await self._desk.models(), await self._desk.loras()

    async def history(self, job: str) -> JobHistory:
        """What is remembered of the job with this id, or with this in its id. Raises UnknownName."""
        return history_of(self._state, find_job(self._state, job), self._clock.now())

    async def memory_reports(self) -> dict[WorkerId, HostMemory]:
        """The host memory of every worker that answers."""
        return await self._fleet.memory_reports()

    async def close(self) -> None:
        """End the workers. Jobs that are left are not resolved. Idempotent."""
        for task in self._upkeep:
            task.cancel()
        for client in self._clients.values():
            client.feed.close()
        self._dispatcher.close()
        self._desk.close()
        self._recorder.close()

    def _client(self, client_id: ClientId) -> _Client:
        if client_id not in self._clients:
            raise UnknownDriver(
                f"this pool knows no driver {client_id}; silent ones are dropped after {SILENCE_SECONDS:.0f} s"
            )
        return self._clients[client_id]

    @contextlib.contextmanager
    def _checking(self, client_id: ClientId, submission_id: SubmissionId) -> Iterator[_Submission]:
        """The submission, new or known, kept at least until this is over."""
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
        """The most memory that any worker has; None while that is not known."""
        capacities = [worker.capacity_bytes for worker in self._dispatcher.live_workers]
        return max(capacities, default=self._budget_bytes)

    async def _queue_held(self, submission: _Submission) -> None:
        while submission.held and not submission.cancelled and not self._broken:
            jobs, submission.held = submission.held[:QUEUED_AT_ONCE], submission.held[QUEUED_AT_ONCE:]
            for job in jobs:
                self._queue(submission, job)
            if submission.held:
                await asyncio.sleep(0)
        held, submission.held = submission.held, []
        self._end_unqueued(held)

    def _queue(self, submission: _Submission, job: _Job) -> None:
        spec = job.cut.job
        self._jobs[spec.job_id] = job
        submission.live[spec.job_id] = None
        self._book.add(spec, job.cut.works, job.given)
        new = tuple(component for component in job.cut.components if component not in self._components)
        if new:
            self._components.update(new)
            self._dispatcher.tell(ComponentsKnown(self._dispatcher.now, new))
        self._dispatcher.tell(Submitted(self._dispatcher.now, spec))
        if spec.deadline is not None:
            known = self._state.demand.jobs.get(spec.job_id)
            if known is not None and known.hopeless_seconds is not None:
                submission.hopeless_seconds.append(known.hopeless_seconds)

    def _end_unqueued(self, jobs: Iterable[_Job]) -> None:
        """Jobs that the core never saw: the submission was cancelled in between, or the core is broken."""
        for job in jobs:
            error = RunError(RunErrorKind.INTERNAL, self._broken) if self._broken else None
            self._tell_end(job, Outcome.FAILED if error else Outcome.CANCELLED, None, error, ())

    def _cancel(self, submission: _Submission) -> None:
        submission.cancelled = True
        held, submission.held = submission.held, []
        self._end_unqueued(held)
        for job_id in tuple(submission.live):
            self._dispatcher.tell(CancelAsked(self._dispatcher.now, job_id))

    def _heard(self, task: TaskSpec, report: TaskReport) -> None:
        """Let later figures of activations take in what a run took that ended well."""
        if report.error is None:
            self._desk.learn(task, report.cost)

    def _resolved(self, command: ResolveJob) -> None:
        job = self._jobs.pop(command.job_id)
        result = None if command.result is None else self._book.result(command.result)
        tasks = self._book.resolve(command.job_id)
        self._tell_end(job, command.outcome, result, command.error, tasks)

    def _tell_end(
        self,
        job: _Job,
        outcome: Outcome,
        result: ResultRef | None,
        error: RunError | None,
        tasks: tuple[TaskSummary, ...],
    ) -> None:
        client = self._clients.get(job.client_id)
        if client is None:
            return
        job_id = job.cut.job.job_id
        client.feed.ended(
            JobEnded(
                submission_id=job.submission_id,
                index=job.index,
                job_id=job_id,
                wanted=job.cut.job.wanted,
                outcome=outcome,
                recipe=job.recipe,
                result=result,
                error=error,
                tasks=tasks,
            )
        )
        if job.submission_id in client.submissions:
            client.submissions[job.submission_id].live.pop(job_id, None)
            self._drop_over(client, job.submission_id)

    def _drop_over(self, client: _Client, submission_id: SubmissionId) -> None:
        if submission_id in client.submissions and client.submissions[submission_id].over:
            del client.submissions[submission_id]
            if not client.submissions:
                client.feed.all_ended()

    def _running_for(self, client_id: ClientId) -> tuple[RunningTask, ...]:
        running = []
        for step in self._dispatcher.running():
            job_id = self._book.first_job(step.task_id)
            job = self._jobs.get(job_id) if job_id is not None else None
            if job is not None and job.client_id == client_id:
                stage = self._book.spec(step.task_id).stage
                running.append(
                    RunningTask(
                        job.submission_id, job.index, job.cut.job.job_id, stage, step.worker_id, step.step, step.steps
                    )
                )
        return tuple(running)

    def _note_change(self) -> None:
        self._changed.set()
        for client in self._clients.values():
            client.feed.progressed()

    def _break(self, traceback_text: str) -> None:
        """The core failed: everything that waits is told so."""
        self._recorder.flush()
        self._broken = f"the scheduler failed, and the pool must be started again:\n{traceback_text}"
        jobs, self._jobs = tuple(self._jobs.values()), {}
        self._end_unqueued(jobs)

    async def _sweep(self) -> None:
        """Let go of drivers that are gone."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            now = self._clock.now()
            for client_id, client in tuple(self._clients.items()):
                if client.feed.quiet_seconds(now) > SILENCE_SECONDS:
                    await self.leave(client_id)
