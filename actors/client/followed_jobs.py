"""`FollowedJobs`: what a driver knows of one submission, as events arrive. `Jobs` is what programs see of it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

from modelpool.actors.client.job_ends import JobEnds
from modelpool.actors.client.job_writing import JobWriting, no_output
from modelpool.actors.client.kept_previews import KeptPreviews
from modelpool.actors.client.monitor import Monitor
from modelpool.actors.client.output_writer import ImageWriter
from modelpool.actors.client.pool_submission import PoolSubmission, SubmitAgain
from modelpool.actors.client.result_queue import ReadyOutput, ResultQueue, index_of, state_of
from modelpool.actors.control.connection import Connection, ResultGone
from modelpool.actors.outputs.results.outcomes import JobFailure, PoolLost, TaskSummary
from modelpool.actors.outputs.results.packed_list import PackedList
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.results.progress import Progress, RunningJob
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import (
    ClientId,
    JobEnded,
    JobPreview,
    NodesEnded,
    SubmissionId,
    TaskProgress,
)
from modelpool.pool.values.core.previews import INTERVAL_SECONDS, PreviewWish
from modelpool.pool.values.specs.spec import RunErrorKind

#: ends of nodes that wait to be read, some hundred bytes each; the oldest are dropped
MOST_NODES = 4096


class FollowedJobs:
    """The jobs of one `ModelPool.submit` call; a `Listener`. Thread-safe.

    An index is the position of a request among all that the caller gave, from 0, also those that were not queued.

    monitor   guards everything here; its watchers are called after every change
    ends      which jobs have ended
    outputs   results on their way to the program
    pool      the jobs in the pool
    writing   the outputs that are being written
    """

    def __init__(
        self,
        connection: Connection,
        client_id: ClientId,
        submission_id: SubmissionId,
        writer: ImageWriter | None,
        on_over: Callable[[], None],
        submit_again: SubmitAgain | None = None,
        name: NameTemplate | None = None,
        on_preview: Callable[[ImagePreview], None] = lambda preview: None,
        wish: PreviewWish | None = None,
    ) -> None:
        """`submit_again` submits withdrawn requests, and requests with a lost output; None if it cannot. `name` is of
        the written files. `on_preview` is called with each preview that arrives; it must not block.
        """
        self.id = submission_id
        #: the previews that were wanted when it was submitted
        self.wish = wish
        self._on_over = on_over
        self._on_preview = on_preview
        self._requests: PackedList[GenerateRequest] = PackedList()
        self._running: tuple[TaskProgress, ...] = ()
        self._nodes: deque[NodesEnded] = deque(maxlen=MOST_NODES)
        self.monitor = monitor = Monitor()
        self.ends = JobEnds(monitor)
        self.previews = KeptPreviews(monitor)
        self.outputs = ResultQueue(monitor, self.ends, self.previews, self._requests, connection, self._generate_again)
        self.pool = PoolSubmission(
            monitor, self.ends, self._requests, connection, client_id, submission_id, submit_again
        )
        self.writing = JobWriting(monitor, self.ends, self.pool, self.outputs, self._requests, name, self._finish)
        self.writing.write_with(writer)

    @property
    def request_count(self) -> int:
        """Number of requests so far."""
        with self.monitor:
            return len(self._requests)

    def request_at(self, index: int) -> GenerateRequest:
        """Return a request as submitted, with its seed."""
        with self.monitor:
            return self._requests[index]

    def state_at(self, index: int) -> tuple[str, TaskProgress | None]:
        """Return the state of a job, and the task that runs for it: "waiting", "running", or how it ended."""
        with self.monitor:
            running = next((task for task in self._running if task.index == index), None)
            state = self.ends.ledger.end_of(index)
        return ("running" if running else "waiting") if state is None else state, running

    def lost(self) -> Exception | None:
        """Return why no more jobs will end, although some have not, or why not all requests could be taken; None
        while they do.
        """
        with self.monitor:
            return self.ends.problem

    def progress(self) -> Progress:
        """Return the current progress."""
        ledger = self.ends.ledger
        with self.monitor:
            return Progress(
                total=ledger.expected,
                done=ledger.count("succeeded"),
                failed=ledger.count("failed"),
                cancelled=ledger.count("cancelled"),
                running=tuple(_running_job(task, self._requests[task.index]) for task in self._running),
                held=self.writing.held,
            )

    def take_nodes(self) -> tuple[NodesEnded, ...]:
        """Return the ends of nodes of workflows, and failures of tasks, that were not returned before; of many, the
        latest."""
        with self.monitor:
            nodes = tuple(self._nodes)
            self._nodes.clear()
        return nodes

    def cancel(self) -> None:
        """Cancel all unfinished jobs; running ones stop at their next step. Returns at once. Idempotent."""
        with self.monitor:
            if self.ends.is_over or self.ends.lost is not None:
                return
            withdrawn = self.pool.follower.cancel()  # no more requests are accepted
        self.writing.end_withdrawn(withdrawn)
        if self.writing.writer is not None:
            self.writing.writer.wake()
        self.pool.cancel()

    def cancel_job(self, index: int) -> None:
        """Cancel one job, as `cancel`."""
        with self.monitor:
            if self.ends.ledger.has_ended(index) or self.ends.lost is not None:
                return
            withdrawn = [index] if self.pool.follower.cancel_job(index) else []
        self.writing.end_withdrawn(withdrawn)
        self.pool.cancel_job(index)

    def want_previews(self, interval_seconds: float | None = INTERVAL_SECONDS) -> None:
        """Have previews made of the images that are sampled from now on, at most one of each image in this time; None:
        no more. The first preview of an image that is being sampled already may need another image first. Returns at
        once. Raises PoolLost.
        """
        self.pool.want_previews(None if interval_seconds is None else PreviewWish(interval_seconds=interval_seconds))

    # ---- requests, for `ModelPool.submit` and `RequestStream` -------------------------------------------------------

    def add(self, requests: Sequence[GenerateRequest]) -> bool:
        """Register requests that are about to be submitted; False, and no effect, after `cancel`."""
        follower = self.pool.follower
        with self.monitor:
            if follower.is_cancelled:
                return False
            self._requests.extend(requests)
            follower.sent(follower.submit(len(requests), time.monotonic()), self.id)
            return True

    def leave_out(self, count: int) -> None:
        """Note that `count` of the registered requests are not queued."""
        with self.monitor:
            self.ends.ledger.leave_out(count)
            self._note_over()

    def seal(self) -> None:
        """Note that no requests will be added."""
        with self.monitor:
            self.ends.ledger.seal()
            self._note_over()

    def fail(self, problem: Exception) -> None:
        """Cancel all jobs, since no more requests can be taken; `results` raises `problem`."""
        with self.monitor:
            self.ends.stream_problem = self.ends.stream_problem or problem
            self.pool.follower.cancel()
            self.monitor.notify()
        with contextlib.suppress(PoolLost):
            self.pool.cancel()

    def abandon(self) -> None:
        """Cancel everything, since the call that submits it raises."""
        self._release()
        self.pool.cancel()

    # ---- events of the pool -----------------------------------------------------------------------------------------

    def on_job_ended(self, job: JobEnded) -> None:
        """See `Listener`."""
        with self.monitor:
            if not self.pool.follower.arrived(job.index, job.submission_id):
                return
        self.writing.ended(job)

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """See `Listener`."""
        with self.monitor:
            if running != self._running:
                self._running = running
                self.monitor.notify()

    def on_preview(self, made: JobPreview) -> None:
        """See `Listener`."""
        now = made.preview
        preview = ImagePreview(now.step, now.steps, now.content, index=made.index, job_id=made.job_id)
        self.previews.add(preview)
        self._on_preview(preview)

    def on_nodes_ended(self, nodes: tuple[NodesEnded, ...]) -> None:
        """See `Listener`."""
        with self.monitor:
            self._nodes.extend(nodes)
            self.monitor.notify()

    def on_lost(self, reason: Exception) -> None:
        """See `Listener`."""
        with self.monitor:
            self.ends.lost = reason
            self._running = ()
            self.monitor.notify()

    def _finish(self, end: ReadyOutput | JobFailure, tasks: Sequence[TaskSummary]) -> None:
        with self.monitor:
            if not self.pool.follower.end(index_of(end), state_of(end)):
                return
            self.ends.note(end if isinstance(end, JobFailure) else None, tasks)
            self.outputs.put(end)
            self._note_over()

    def _generate_again(self, job: JobEnded, gone: ResultGone) -> JobFailure | None:
        """Generate an output again that was lost with its node; return its failure if that is impossible."""
        if self.pool.repeat(job):
            return None
        failure = no_output(job, self._requests[job.index], RunErrorKind.INPUT_LOST, str(gone))
        with self.monitor:
            if not self.pool.follower.end(job.index, "failed"):  # it has ended with the output
                self.ends.ledger.replace(job.index, "failed")
            self.ends.note_lost(failure)
            self._note_over()
        return failure

    def _note_over(self) -> None:
        self.monitor.notify()
        if self.ends.is_over:
            self._running = ()
            self._release()

    def _release(self) -> None:
        """Stop listening to the pool and to the writer."""
        self.writing.release()
        self._on_over()


def _running_job(task: TaskProgress, request: GenerateRequest) -> RunningJob:
    return RunningJob(
        task.job_id, task.index, request.prompt, task.worker, task.stage, task.step, task.steps, task.nodes
    )
