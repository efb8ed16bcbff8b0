"""`StageResult`: one stage's result in the driver's hands, for people who compose stages themselves."""

from __future__ import annotations

import threading

from modelpool.actors.control.connection import Line, ResultGone
from modelpool.actors.graph.orders import Order
from modelpool.actors.results.outcomes import JobFailed, JobFailure
from modelpool.actors.wire.messages import JobEnded, ResultRef, RunningTask, SubmissionId, job_id_for
from modelpool.pool.core.stage_params import Result
from modelpool.pool.specs.spec import RunErrorKind, TaskId
from modelpool.scheduler.tables.messages import Outcome


class StageResult:
    """A result that is there or on the way. Made by `ModelPool.encode`, `sample` and `decode`.

    order  what it is made from; a later stage takes it along, and the pool shares what is made already
    """

    def __init__(self, order: Order, line: Line, submission_id: SubmissionId) -> None:
        self.order = order
        self._line = line
        self._job_id = job_id_for(submission_id, 0)
        self._heard = threading.Event()
        self._job: JobEnded | None = None
        self._lost: Exception | None = None
        self._result: Result | None = None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for it. Raises JobFailed, TimeoutError or PoolLost."""
        if self._result is None:
            if not self._heard.wait(timeout):
                raise TimeoutError(f"job {self._job_id} has not ended after {timeout} s")
            self._result = self._fetch()
        return self._result

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._heard.is_set()

    @property
    def held(self) -> dict[TaskId, ResultRef]:
        """The result's task and reference, once there is one: what a later stage can read it by."""
        job = self._job
        return {} if job is None or job.result is None else {job.wanted: job.result}

    def heard_end(self, job: JobEnded) -> None:
        """See `Listener`."""
        self._job = job
        self._heard.set()

    def heard_running(self, running: tuple[RunningTask, ...]) -> None:
        """See `Listener`."""

    def heard_loss(self, reason: Exception) -> None:
        """See `Listener`."""
        if not self._heard.is_set():
            self._lost = reason
            self._heard.set()

    def _fetch(self) -> Result:
        job = self._job
        if job is None:
            assert self._lost is not None, "what was heard is an end or a loss"
            raise self._lost
        if job.outcome is not Outcome.SUCCEEDED:
            kind, message, text = RunErrorKind.CANCELLED, "it was cancelled", ""
            if job.error is not None:
                kind, message, text = job.error.kind, job.error.message, job.error.traceback_text
            raise JobFailed(JobFailure(0, job.job_id, None, kind, message, text))
        try:
            return self._line.fetch(job.result)
        except ResultGone as gone:
            raise JobFailed(JobFailure(0, job.job_id, None, RunErrorKind.INPUT_LOST, str(gone))) from gone
