"""`JobQueue`: the checked jobs of all drivers until they are resolved: held, parked, or in the core."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.drivers import Drivers, OpenSubmission
from modelpool.actors.control.parked_jobs import WINDOW, JobPack, ParkedJobs, QueuedJob, packs_of
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.outputs.results.outcomes import TaskSummary
from modelpool.actors.worker.wire.messages import (
    ClientId,
    JobEnded,
    NodesEnded,
    ResultRef,
    StateSaved,
    SubmissionId,
    TaskProgress,
    job_id_for,
)
from modelpool.pool.values.specs.spec import (
    NO_NODE,
    WITH_STATE,
    ComponentSpec,
    JobId,
    NodeId,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    TaskSpec,
)
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import CancelRequested, ComponentsKnown, Outcome, Submitted

#: sizes of components that the core keeps before unused ones are pruned
COMPONENTS_KEPT = 20_000


class PoolBroken(RuntimeError):
    """The scheduler failed because of a bug in modelpool; the message has the details."""


class JobQueue:
    """The unresolved jobs of a pool. `broken` says why the scheduler failed; "" while it works."""

    def __init__(
        self,
        state: SchedulerState,
        dispatcher: Dispatcher,
        tasks: TaskStore,
        drivers: Drivers,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_broken` is called before jobs fail because the scheduler has."""
        self._state = state
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._drivers = drivers
        self._on_broken = on_broken
        self.broken = ""
        #: in the core, by id
        self.jobs: dict[JobId, QueuedJob] = {}
        #: the workflows among them
        self._workflows: set[JobId] = set()
        #: groups of nodes grow by all the work that waits, so the core must know it
        self.parked = ParkedJobs(None if state.config.groups else WINDOW)
        #: set when parked jobs may be queued
        self._has_room = asyncio.Event()
        #: prune when the core knows more component sizes than this
        self._most_components = COMPONENTS_KEPT

    @contextlib.contextmanager
    def checking(self, client_id: ClientId, submission_id: SubmissionId) -> Iterator[OpenSubmission]:
        """Return the submission, new or known, and keep it at least until the end of the block. Raises PoolBroken and
        UnknownDriver."""
        if self.broken:
            raise PoolBroken(self.broken)
        driver = self._drivers.get(client_id)
        submission = driver.submissions.setdefault(submission_id, OpenSubmission(began_at=self._dispatcher.now))
        submission.checking += 1
        try:
            yield submission
        finally:
            submission.checking -= 1
            self._drivers.drop_over(driver, submission_id)

    def hold(self, submission: OpenSubmission, jobs: Sequence[QueuedJob]) -> None:
        """Keep checked jobs until they are queued."""
        self._drivers.listed.queued(jobs, self._dispatcher.now)
        for pack in packs_of(jobs):
            if self.parked.must_pack(submission.held_jobs):
                pack.pack()
            submission.held.append(pack)
            submission.held_jobs += len(pack)
            cancelled = submission.cancelled_early.intersection(pack.indexes)
            self._end_unqueued(pack, sorted(cancelled))
            submission.ended_early |= cancelled
            submission.cancelled_early -= cancelled

    async def queue_held(self, submission: OpenSubmission) -> None:
        """Queue the held jobs, or park them if their turn is far."""
        while submission.held and not submission.cancelled and not self.broken:
            pack = submission.held.pop(0)
            submission.held_jobs -= len(pack)
            if self.parked.may_enter(pack):
                self._queue_pack(submission, pack)
            else:
                self.parked.park(pack, self._dispatcher.now)
                submission.parked[pack] = None
            if submission.held:
                await asyncio.sleep(0)
        if submission.parked:
            self._has_room.set()  # jobs may have ended meanwhile
        self._end_held(submission)

    async def keep_queueing(self) -> None:
        """Queue parked jobs when their turn is near, until cancelled."""
        while True:
            await self._has_room.wait()
            self._has_room.clear()
            while not self.broken and (pack := self.parked.take_next()) is not None:
                with self.checking(pack.client_id, pack.submission_id) as submission:
                    del submission.parked[pack]
                    self._queue_pack(submission, pack)
                await asyncio.sleep(0)

    def _queue_pack(self, submission: OpenSubmission, pack: JobPack) -> None:
        """Queue the jobs of a pack; once the core has failed, end those that are left. The submission must be kept
        meanwhile: a job may end at once."""
        queued, found = 0, list[StateSaved]()
        last = next((index for index in reversed(pack.indexes) if index not in submission.ended_early), -1)
        try:
            jobs = pack.jobs()
            wanted = [job for job in jobs if job.index not in submission.ended_early]
            # before the first job: an event between two jobs would let tasks start without the later ones
            self.send_components(dict.fromkeys(spec for job in wanted for spec in job.graph.components))
            for job in jobs:
                if self.broken:
                    break
                queued += 1
                if job.index not in submission.ended_early:
                    found += self._queue(submission, job, pack.parked_at, job.index == last, bool(found))
            for number, saved in enumerate(found, start=1):  # behind the last job: tasks start with the last of them
                self._dispatcher.state_kept(saved, others_follow=number < len(found))
        except Exception:  # a bug: this job, and everything that is parked, would wait for ever
            self.fail_all(traceback.format_exc())
        if self.broken:
            self._end_unqueued(pack, pack.indexes[queued:])

    def _queue(
        self, submission: OpenSubmission, job: QueuedJob, submitted_at: float | None, is_last: bool, resumes: bool
    ) -> list[StateSaved]:
        """Queue a job of a pack; return the saved states of its runs, which the core has still to learn: nothing
        starts before. `resumes`: earlier jobs of the pack have such states."""
        spec = job.graph.job
        is_known = spec.job_id in self.jobs or spec.job_id in self._state.demand.ended
        self.jobs[spec.job_id] = job
        submission.live[spec.job_id] = None
        if job.graph.nodes:
            self._workflows.add(spec.job_id)
        if not is_known:  # the core ignores others
            self.parked.entered(job.flow)
        self._tasks.add(spec, job.graph.works, job.given, job.graph.fingerprints)
        if job.graph.nodes:
            self._tell_found(job)
        found = [  # first, as a task may start at once; those that a task has a use for
            saved
            for saved, state in job.found
            if self._tasks.needs_state(saved.task_id) and self._tasks.keep_state(saved, state)
        ]
        others_follow = not is_last or resumes or bool(found)
        self._dispatcher.post(Submitted(self._dispatcher.now, spec, submitted_at, others_follow))
        if spec.deadline is not None:
            known = self._state.demand.jobs.get(spec.job_id)
            if known is not None and known.hopeless_seconds is not None:
                submission.hopeless_seconds.append(known.hopeless_seconds)
        return found

    def send_components(self, components: Iterable[ComponentSpec]) -> None:
        """Send the core the sizes of components that it does not know, before the tasks that use them. If it knows too
        many, prune unused ones first, which may forget the files of components without a task."""
        known = self._state.costs.components
        if len(known) > self._most_components:
            self._dispatcher.prune_components()
            # at least twice the sizes in use, so that pruning stays rare
            self._most_components = max(COMPONENTS_KEPT, 2 * len(self._state.costs.components))
            known = {}  # any of these may have been pruned
        new = tuple(component for component in components if known.get(component.key) != component)
        if new:
            self._dispatcher.post(ComponentsKnown(self._dispatcher.now, new))

    def cancel(self, submission: OpenSubmission, withdraw: bool = False) -> None:
        """Cancel the unfinished jobs of a submission; to `withdraw` it, only those without a running task."""
        submission.cancelled = True
        parked, submission.parked = submission.parked, {}
        self.parked.remove(parked)
        for pack in parked:
            self._end_unqueued(pack, pack.indexes)
        if not withdraw:  # else they end as withdrawn once they would be queued
            undecided, submission.undecided = submission.undecided, {}
            self.hold(submission, list(undecided.values()))
        self._end_held(submission)
        for job_id in tuple(submission.live):
            if not (withdraw and self._tasks.is_running(job_id)):
                self._dispatcher.post(CancelRequested(self._dispatcher.now, job_id))

    def cancel_jobs(self, submission_id: SubmissionId, submission: OpenSubmission, indexes: Iterable[int]) -> None:
        """Cancel these jobs of a submission, unless they have ended."""
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

    def resolve(self, job_id: JobId) -> QueuedJob:
        """Remove and return a job that the core has resolved."""
        job = self.jobs.pop(job_id)
        self._workflows.discard(job_id)
        if self.parked.left(job.flow):
            self._has_room.set()
        return job

    def fail_all(self, traceback_text: str) -> None:
        """Fail all unfinished jobs: the core has failed."""
        self._on_broken()
        if not self.broken:  # what follows from the first failure explains nothing
            self.broken = f"the scheduler failed, and the pool must be restarted:\n{traceback_text}"
        jobs, self.jobs = tuple(self.jobs.values()), {}
        self._workflows.clear()
        error = RunError(RunErrorKind.INTERNAL, self.broken)
        for job in jobs:
            self._drivers.ended(job.client_id, end_of(job, Outcome.FAILED, None, error, ()))
        parked = self.parked.take_all()
        for pack in parked:
            submission = self._drivers.submission(pack.client_id, pack.submission_id)
            if submission is not None:
                submission.parked.pop(pack, None)
        for pack in parked:
            self._end_unqueued(pack, pack.indexes)

    def of_task(self, task_id: TaskId) -> Iterator[QueuedJob]:
        """Yield the unresolved jobs that need a task."""
        found = map(self.jobs.get, self._tasks.jobs_of(task_id))
        return (job for job in found if job is not None)

    def first_of(self, task_id: TaskId) -> QueuedJob | None:
        """Return the first job that needs a task, if it is unresolved."""
        job_id = self._tasks.first_job(task_id)
        return None if job_id is None else self.jobs.get(job_id)

    def running_for(self, client_id: ClientId) -> tuple[TaskProgress, ...]:
        """Return the progress of the running tasks of a driver."""
        running = []
        for step in self._dispatcher.running():
            first = self.first_of(step.task_id)
            for job in self.of_task(step.task_id):
                # others are named if they are workflows: people watch their nodes
                if job.client_id == client_id and (job is first or job.graph.nodes):
                    nodes = job.graph.nodes_of(step.task_id)
                    stage, job_id = self._tasks.spec(step.task_id).stage, job.graph.job.job_id
                    running.append(
                        TaskProgress(
                            job.submission_id, job.index, job_id, stage, step.worker_id, step.step, step.steps, nodes
                        )
                    )
        return tuple(running)

    def task_ended(self, task: TaskSpec, report: TaskReport) -> None:
        """Tell the drivers of workflows that a task has ended, and all drivers that one has failed."""
        error, cost = report.error, report.cost
        if error is not None and error.kind in WITH_STATE:
            return
        message = "" if error is None else error.message
        if not message and not self._workflows:
            return
        seconds = round(cost.load_seconds + cost.run_seconds, 4)
        for job in self.of_task(task.task_id):
            if job.graph.nodes or message:
                self._tell(job, task, str(report.worker_id), seconds, message=message)

    def _tell_found(self, job: QueuedJob) -> None:
        """Tell the driver of a workflow which nodes need not be computed: their results exist, or later ones do."""
        graph = job.graph
        specs = {task.task_id: task for task in graph.job.tasks}
        needed = set[TaskId]()
        waiting = [graph.job.wanted]
        while waiting:
            task_id = waiting.pop()
            if task_id in specs and task_id not in needed and not self._tasks.has_result(task_id):
                needed.add(task_id)
                waiting += specs[task_id].needs
        for task in graph.job.tasks:
            if task.task_id not in needed:
                self._tell(job, task, "", 0.0, is_found=True)

    def _tell(
        self,
        job: QueuedJob,
        task: TaskSpec,
        worker: str,
        seconds: float,
        is_found: bool = False,
        message: str = "",
    ) -> None:
        driver = self._drivers.known.get(job.client_id)
        if driver is not None:
            graph = job.graph
            nodes, ended = graph.nodes_of(task.task_id), graph.nodes_ended_by(task.task_id)
            about = job.submission_id, job.index, graph.job.job_id
            driver.events.nodes_ended(
                NodesEnded(*about, nodes, task.stage, worker, seconds, ended, is_found=is_found, message=message)
            )

    def _end_held(self, submission: OpenSubmission) -> None:
        held, submission.held, submission.held_jobs = submission.held, [], 0
        for pack in held:
            self._end_unqueued(pack, pack.indexes)

    def _end_unqueued(self, pack: JobPack, indexes: Iterable[int]) -> None:
        """End jobs of a pack that never reached the core: the submission was cancelled in between, or the core failed.
        Does not unpack them."""
        error = RunError(RunErrorKind.INTERNAL, self.broken) if self.broken else None
        outcome = Outcome.FAILED if error else Outcome.CANCELLED
        submission = self._drivers.submission(pack.client_id, pack.submission_id)
        ended = set() if submission is None else submission.ended_early
        for index in [index for index in indexes if index not in ended]:
            job_id, nothing = job_id_for(pack.submission_id, index), TaskId("")
            end = JobEnded(pack.submission_id, index, job_id, nothing, outcome, None, None, error, ())
            self._drivers.ended(pack.client_id, end)


def end_of(
    job: QueuedJob,
    outcome: Outcome,
    result: ResultRef | None,
    error: RunError | None,
    tasks: tuple[TaskSummary, ...],
    node: NodeId = NO_NODE,
    result_bytes: int = 0,
) -> JobEnded:
    """Return the end of a job, for its driver."""
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
        result_bytes=result_bytes,
    )
