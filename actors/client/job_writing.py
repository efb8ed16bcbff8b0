"""`JobWriting`: has the outputs of a submission written, and holds the submission while its folder cannot be written.

While it cannot, nothing more of the submission starts: what waits is withdrawn from the pool, and submitted again when
the folder is usable.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

from modelpool.actors.client.job_ends import JobEnds
from modelpool.actors.client.monitor import Monitor
from modelpool.actors.client.output_writer import ImageWriter
from modelpool.actors.client.pool_submission import PoolSubmission
from modelpool.actors.client.result_queue import ReadyOutput, ResultQueue
from modelpool.actors.control.connection import ResultGone
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.place import WrittenOutput, name_values
from modelpool.actors.outputs.results.outcomes import JobFailure, PoolLost, TaskSummary
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels, labels_of
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import JobEnded
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import RunErrorKind
from modelpool.scheduler.model.messages import Outcome


class JobWriting:
    """A `WriteListener` of one submission. `name` is of the written files; `finish` receives the ends of jobs."""

    def __init__(
        self,
        monitor: Monitor,
        ends: JobEnds,
        pool: PoolSubmission,
        results: ResultQueue,
        requests: Sequence[GenerateRequest],
        name: NameTemplate | None,
        finish: Callable[[ReadyOutput | JobFailure, Sequence[TaskSummary]], None],
    ) -> None:
        self._monitor = monitor
        self._ends = ends
        self._pool = pool
        self._results = results
        self._requests = requests
        self._name = name
        self._finish = finish
        self.writer: ImageWriter | None = None
        #: why the output folder cannot be written, while that is tried again; and why it was given up
        self.held = ""
        self._given_up = ""

    def write_with(self, writer: ImageWriter | None) -> None:
        """Write outputs with `writer` from now on. Called by `RequestStream` before it queues the first request."""
        self.writer = writer
        if writer is not None:
            writer.add(self)

    def release(self) -> None:
        """Stop listening to the writer."""
        if self.writer is not None:
            self.writer.remove(self)

    def ended(self, job: JobEnded) -> None:
        """The pool has ended a job: have its output written, or note its failure."""
        if job.outcome is Outcome.CANCELLED and self._keep_withdrawn(job):
            return
        if job.outcome is not Outcome.SUCCEEDED:
            failure = self._failure(job)
            self._note_failure(job, failure)
            self._finish(failure, job.tasks)
        elif self.writer is None:
            self._finish(ReadyOutput(job, None), job.tasks)
        else:
            self.writer.write(job, self)

    def end_withdrawn(self, indexes: Sequence[int]) -> None:
        """End withdrawn jobs that are not submitted again."""
        for job in self._pool.take_withdrawn(indexes):
            self._finish(self._failure(job), job.tasks)

    def wait_while_held(self) -> None:
        """Wait until the output folder is usable. Called by `ModelPool.submit` before it submits more. Raises
        FolderFailed if it was given up.
        """
        with self._monitor:
            self._monitor.wait_until(lambda: not self.held or self._ends.lost is not None)
            if self._given_up:
                raise FolderFailed(self._given_up)

    @property
    def wants_no_outputs(self) -> bool:
        """See `WriteListener`."""
        return self._pool.follower.is_cancelled or self._ends.lost is not None

    def labels_of(self, job: JobEnded) -> Labels:
        """See `WriteListener`."""
        request = self._requests[job.index]
        stem = ""
        if self._name is not None and job.recipe is not None and not self._name.missing(request):
            stem = self._name.stem(name_values(request, job.recipe, job.index))
        return labels_of(request, stem)

    def on_written(self, job: JobEnded, outcome: WrittenOutput | Exception) -> None:
        """See `WriteListener`."""
        if isinstance(outcome, WrittenOutput):
            assert self.writer is not None, "what is written has a writer"
            self._finish(self._results.written(job, outcome, self.writer.place), job.tasks)
        elif not (isinstance(outcome, ResultGone) and self._pool.repeat(job)):
            failure = _not_written(job, self._requests[job.index], outcome)
            if not isinstance(outcome, FolderFailed):
                self._note_failure(job, failure)
            self._finish(failure, job.tasks)

    def on_folder_failed(self, problem: FolderFailed) -> None:
        """See `WriteListener`: withdraw what has not started."""
        with self._monitor:
            if self._ends.is_over or not self._pool.follower.hold(self._pool.ids):
                return
            self.held = str(problem)
            self._monitor.notify()
        self._pool.cancel(withdraw=True)

    def on_folder_usable(self) -> None:
        """See `WriteListener`: submit again what was withdrawn."""
        with self._monitor:
            self._pool.follower.release()
            self.held = self._given_up = ""
            self._monitor.notify()
        self._submit_withdrawn()

    def on_folder_given_up(self, problem: FolderFailed) -> None:
        """See `WriteListener`: cancel the rest."""
        with self._monitor:
            self.held, self._given_up = "", str(problem)
            withdrawn = self._pool.follower.give_up()
            self._monitor.notify()
        self.end_withdrawn(withdrawn)
        self._pool.cancel()

    def _keep_withdrawn(self, job: JobEnded) -> bool:
        """Keep a job that was withdrawn until the folder is usable; False if it was cancelled."""
        with self._monitor:
            if not self._pool.keep_withdrawn(job):
                return False
            is_late = not self._pool.follower.is_held
        if is_late and self.writer is not None:
            self.writer.run(self._submit_late)
        return True

    def _submit_late(self) -> None:
        """Submit again what was withdrawn late, unless the folder has failed again: then it waits for that, too."""
        with self._monitor:
            if self._pool.follower.is_held:
                return
        self._submit_withdrawn()

    def _submit_withdrawn(self) -> None:
        jobs, problem = self._pool.submit_withdrawn()
        for job in jobs:
            failure = no_output(job, self._requests[job.index], RunErrorKind.CANCELLED, f"not started again: {problem}")
            self._finish(failure, job.tasks)

    def _failure(self, job: JobEnded) -> JobFailure:
        request = self._requests[job.index]
        if job.error is None:
            message = f"not started: {self._given_up}" if self._given_up else "cancelled"
            return no_output(job, request, RunErrorKind.CANCELLED, message)
        return no_output(job, request, job.error.kind, job.error.message, job.error.traceback_text)

    def _note_failure(self, job: JobEnded, failure: JobFailure) -> None:
        """Remember a failure where the output would have been written. A cancelled job has not failed."""
        if self.writer is None or failure.cancelled or job.recipe is None:
            return
        labels = labels_of(self._requests[job.index])
        about = job.index, job.job_id, failure.kind.value, failure.message
        self.writer.note_failure(FailedOutput.of(job.recipe, labels, *about, at=time.time()))


def no_output(
    job: JobEnded, request: GenerateRequest, kind: RunErrorKind, message: str, traceback_text: str = ""
) -> JobFailure:
    """Return the failure of a job."""
    return JobFailure(job.index, job.job_id, request, kind, message, traceback_text)


def _not_written(job: JobEnded, request: GenerateRequest, problem: Exception) -> JobFailure:
    message = f"the output could not be written: {problem}"
    if isinstance(problem, UserError):
        return no_output(job, request, RunErrorKind.OUTPUT, message)
    if isinstance(problem, (ResultGone, PoolLost)):
        return no_output(job, request, RunErrorKind.INPUT_LOST, message)
    return no_output(job, request, RunErrorKind.INTERNAL, message, "".join(traceback.format_exception(problem)))
