"""`StageResult`: the result of a single stage, for programs that compose stages themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from modelpool.actors.control.connection import CONTROLLER, Connection, ResultGone
from modelpool.actors.graph.common.stage_request import StageLike
from modelpool.actors.outputs.results.outcomes import JobFailed, JobFailure
from modelpool.actors.worker.wire.messages import (
    ClientId,
    JobEnded,
    JobPreview,
    NodesEnded,
    ResultRef,
    SubmissionId,
    TaskProgress,
    job_id_for,
)
from modelpool.pool.values.core.stage_params import Result
from modelpool.pool.values.specs.spec import RunErrorKind, TaskId
from modelpool.scheduler.model.messages import Outcome


class StageResult:
    """A finished or pending result. Created by `ModelPool.encode`, `sample`, `decode` and `upscale`.

    stage  what was requested; a later stage includes it, and the pool reuses existing results
    """

    def __init__(
        self,
        stage: StageLike,
        connection: Connection,
        submission_id: SubmissionId,
        client_id: ClientId,
        forget: Callable[[], None],
    ) -> None:
        """`forget` is called when there are no more events."""
        self.stage = stage
        self._connection = connection
        self._submission_id, self._client_id = submission_id, client_id
        self._job_id = job_id_for(submission_id, 0)
        self._forget = forget
        self._ended = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._job: JobEnded | None = None
        self._lost: Exception | None = None
        self._result: Result | None = None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result. Raises JobFailed, TimeoutError or PoolLost."""
        if self._result is None:
            if not self._ended.wait(timeout):
                raise TimeoutError(f"job {self._job_id} has not ended after {timeout} s")
            self._result = self._fetch()
        return self._result

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Cancel it, unless it has ended. Idempotent. Raises PoolLost."""
        if not self.done():
            self._connection.call(CONTROLLER.cancel, self._client_id, self._submission_id)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` when it has ended, in another thread; at once if it has. It must not block."""
        self._watchers.append(ended)
        if self.done():
            self._notify()

    @property
    def held(self) -> dict[TaskId, ResultRef]:
        """The task and the reference of the result once it exists, for a later stage to read."""
        job = self._job
        return {} if job is None or job.result is None else {job.wanted: job.result}

    def __repr__(self) -> str:
        state = "ended" if self.done() else "pending"
        return f"<StageResult {self._job_id}: {self.stage.stage.value}, {state}>"

    def on_job_ended(self, job: JobEnded) -> None:
        """See `Listener`."""
        self._job = job
        self._end()

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """See `Listener`."""

    def on_preview(self, made: JobPreview) -> None:
        """See `Listener`. Nobody can ask for previews of a single stage."""

    def on_nodes_ended(self, nodes: tuple[NodesEnded, ...]) -> None:
        """See `Listener`. A single stage is no workflow."""

    def on_lost(self, reason: Exception) -> None:
        """See `Listener`."""
        if not self._ended.is_set():
            self._lost = reason
            self._end()

    def _end(self) -> None:
        self._ended.set()
        self._forget()
        self._notify()

    def _notify(self) -> None:
        """Call each watcher once: two threads may be here."""
        while self._watchers:
            try:
                watcher = self._watchers.pop()
            except IndexError:
                return
            watcher()

    def _fetch(self) -> Result:
        job = self._job
        if job is None:
            assert self._lost is not None, "the job has ended or was lost"
            raise self._lost
        if job.outcome is not Outcome.SUCCEEDED:
            kind, message, text = RunErrorKind.CANCELLED, "cancelled", ""
            if job.error is not None:
                kind, message, text = job.error.kind, job.error.message, job.error.traceback_text
            raise JobFailed(JobFailure(0, job.job_id, None, kind, message, text))
        try:
            return self._connection.fetch(job.result)
        except ResultGone as gone:
            raise JobFailed(JobFailure(0, job.job_id, None, RunErrorKind.INPUT_LOST, str(gone))) from gone
