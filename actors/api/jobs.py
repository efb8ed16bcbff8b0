"""`Jobs`: one submission. Iterate over its results, watch it, cancel it from any thread.

Results stay references until they are returned, and each is returned once: a batch of any size takes only the memory
of the images that the program keeps.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelpool.actors.api.output_writer import ImageWriter
from modelpool.actors.control.connection import Connection, ResultGone
from modelpool.actors.control.controller import Controller, UnknownDriver
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.results.outcomes import (
    AudioResult,
    ImageResult,
    JobFailure,
    OutputResult,
    PoolLost,
    Summary,
    TaskSummary,
    VideoResult,
    sampled_by,
    unshared_seconds,
)
from modelpool.actors.results.progress import Progress, RunningJob
from modelpool.actors.wire.messages import ClientId, JobEnded, SubmissionId, TaskProgress
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import AudioSamples, ImagePixels, VideoFrames
from modelpool.pool.specs.spec import RunErrorKind
from modelpool.scheduler.tables.messages import Outcome

Kind = TypeVar("Kind", bound=OutputResult)

#: how often an output is generated again that was lost with the node that stored it
MOST_REPEATS = 3
#: maximum delay of Ctrl-C, see `Jobs._settled`
_SIGNAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _ReadyOutput:
    """An output that is ready to be returned."""

    job: JobEnded
    path: Path | None


class Jobs:
    """The jobs of one `ModelPool.submit` call."""

    def __init__(
        self,
        connection: Connection,
        client_id: ClientId,
        submission_id: SubmissionId,
        writer: ImageWriter | None,
        on_over: Callable[[], None],
        submit_again: Callable[[JobEnded, GenerateRequest, SubmissionId], None] | None = None,
    ) -> None:
        """`submit_again` submits a request whose output was lost, as a submission with that id; None if it cannot."""
        self._connection = connection
        self._client_id = client_id
        self._submission_id = submission_id
        self._writer = writer
        self._on_over = on_over
        self._submit_again = submit_again
        self._started_at = time.monotonic()
        #: guards everything below; notified when a job ends or no more events will come
        self._changed = threading.Condition()
        self._requests: list[GenerateRequest] = []
        self._sealed = False
        self._waiting: deque[_ReadyOutput | JobFailure] = deque()
        self._succeeded = 0
        self._ended = 0
        self._ended_at = self._started_at
        self._without_image: list[JobFailure] = []
        self._tasks: list[TaskSummary] = []
        self._running: tuple[TaskProgress, ...] = ()
        self._lost: Exception | None = None
        #: submissions of outputs that were lost, and how often each was, by index
        self._repeated: list[SubmissionId] = []
        self._losses: Counter[int] = Counter()

    def images(self) -> Iterator[ImageResult]:
        """Iterate over the images as they finish, each once: a second iterator continues where the first one
        stopped.

        Jobs without an image are skipped; see `failures`, and `results` for submissions that also generate videos.

        Raises PoolLost if the pool ends first.
        """
        return self._of_kind(ImageResult)

    def videos(self) -> Iterator[VideoResult]:
        """Iterate over the videos, as `images`."""
        return self._of_kind(VideoResult)

    def audios(self) -> Iterator[AudioResult]:
        """Iterate over the audio clips, as `images`."""
        return self._of_kind(AudioResult)

    def films(self) -> Iterator[VideoResult]:
        """Deprecated: use `videos`."""
        warnings.warn("Jobs.films() is deprecated; use Jobs.videos()", DeprecationWarning, stacklevel=2)
        return self.videos()

    def sounds(self) -> Iterator[AudioResult]:
        """Deprecated: use `audios`."""
        warnings.warn("Jobs.sounds() is deprecated; use Jobs.audios()", DeprecationWarning, stacklevel=2)
        return self.audios()

    def results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over all outputs as they finish, each once, including jobs that failed or were cancelled."""
        while (waiting := self._take()) is not None:
            try:
                result = waiting if isinstance(waiting, JobFailure) else self._delivered(waiting)
            except BaseException:
                self._put_back(waiting)
                raise
            if result is not None:
                yield result

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until every job has ended; results can still be iterated. Raises TimeoutError, or PoolLost."""
        with self._changed:
            if not self._settled(lambda: self._over or self._lost is not None, timeout):
                raise TimeoutError(f"{len(self._requests) - self._ended} of {len(self._requests)} jobs have not ended")
            if not self._over and self._lost is not None:
                raise self._lost
            return self._summary()

    def cancel(self) -> None:
        """Cancel all unfinished jobs; running ones stop at their next step. Returns at once. Idempotent."""
        if not self._over and self._lost is None:
            with self._changed:
                submissions = (self._submission_id, *self._repeated)
            for submission_id in submissions:
                self._connection.call(Controller.cancel, self._client_id, submission_id)

    def progress(self) -> Progress:
        """Return the current progress."""
        with self._changed:
            cancelled = sum(f.cancelled for f in self._without_image)
            return Progress(
                total=len(self._requests),
                done=self._succeeded,
                failed=len(self._without_image) - cancelled,
                cancelled=cancelled,
                running=tuple(self._running_job(task) for task in self._running),
            )

    def _of_kind(self, kind: type[Kind]) -> Iterator[Kind]:
        for result in self.results():
            if isinstance(result, kind):
                yield result

    @property
    def failures(self) -> tuple[JobFailure, ...]:
        """The jobs that failed so far, without cancelled ones."""
        with self._changed:
            return tuple(f for f in self._without_image if not f.cancelled)

    def summary(self) -> Summary:
        """Return the totals so far."""
        with self._changed:
            return self._summary()

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """Register requests that are about to be submitted. Called by `ModelPool.submit`."""
        with self._changed:
            self._requests.extend(requests)

    def seal(self) -> None:
        """Note that no requests will be added. Called by `ModelPool.submit`."""
        with self._changed:
            self._sealed = True
            self._note_over()

    def on_job_ended(self, job: JobEnded) -> None:
        """See `Listener`."""
        if job.outcome is not Outcome.SUCCEEDED:
            self._finish(job, self._failure(job))
        elif self._writer is None:
            self._finish(job, _ReadyOutput(job, None))
        else:
            self._writer.write(job, lambda path: self._note_written(job, path))

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """See `Listener`."""
        with self._changed:
            self._running = running

    def on_lost(self, reason: Exception) -> None:
        """See `Listener`."""
        with self._changed:
            self._lost = reason
            self._running = ()
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._sealed and self._ended == len(self._requests)

    def _finish(self, job: JobEnded, end: _ReadyOutput | JobFailure) -> None:
        with self._changed:
            self._tasks.extend(task for task in job.tasks if not task.shared)
            if isinstance(end, JobFailure):
                self._without_image.append(end)
            else:
                self._succeeded += 1
            self._ended += 1
            self._ended_at = time.monotonic()
            self._waiting.append(end)
            self._note_over()

    def _note_over(self) -> None:
        self._changed.notify_all()
        if self._over:
            self._running = ()
            self._on_over()

    def _take(self) -> _ReadyOutput | JobFailure | None:
        """Wait for the next end and return it; None if there are no more. Raises if the event stream ended before."""
        with self._changed:
            self._settled(lambda: self._waiting or self._over or self._lost is not None)
            if self._waiting:
                return self._waiting.popleft()
            if not self._over and self._lost is not None:
                raise self._lost
            return None

    def _settled(self, is_settled: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait for a condition, holding `_changed`, and return whether it holds. Waits in short pieces: a signal
        that arrives just before a thread falls asleep does not wake it, and Ctrl-C would only take effect at the
        next change, possibly hours later.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_settled():
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, _SIGNAL_SECONDS))
        return True

    def _put_back(self, waiting: _ReadyOutput | JobFailure) -> None:
        with self._changed:
            self._waiting.appendleft(waiting)

    def _delivered(self, finished: _ReadyOutput) -> OutputResult | JobFailure | None:
        """Return the output; None if it was lost and is generated again."""
        job = finished.job
        try:
            output = self._connection.fetch(job.result)
        except ResultGone as gone:
            if self._repeat(job, ended=True):
                return None
            failure = self._no_image(job, RunErrorKind.INPUT_LOST, str(gone))
            with self._changed:
                self._succeeded -= 1
                self._without_image.append(failure)
            return failure
        assert job.recipe is not None, f"job {job.job_id} of a request has a recipe"
        about: dict[str, Any] = {
            "index": job.index,
            "job_id": job.job_id,
            "request": self._requests[job.index],
            "recipe": job.recipe,
            "path": finished.path,
            "worker": sampled_by(job.tasks),
            "seconds": unshared_seconds(job.tasks),
            "tasks": job.tasks,
        }
        match output:
            case ImagePixels():
                return ImageResult(pixels=output.pixels_HWC, **about)
            case VideoFrames():
                return VideoResult(frames=output.frames_THWC, frame_rate=output.frame_rate, **about)
            case AudioSamples():
                return AudioResult(samples=output.samples_SC, samples_per_second=output.samples_per_second, **about)
        raise AssertionError(f"job {job.job_id} returned {type(output).__name__}")

    def _note_written(self, job: JobEnded, path: Path | Exception) -> None:
        if not (isinstance(path, ResultGone) and self._repeat(job, ended=False)):
            self._finish(job, self._written(job, path))

    def _repeat(self, job: JobEnded, ended: bool) -> bool:
        """Submit a job again whose output was lost with the node that stored it. False if it was lost too often, or if
        the pool is gone. `ended` jobs were counted as such.
        """
        with self._changed:
            self._losses[job.index] += 1
            submission_id = SubmissionId(f"{self._submission_id}r{len(self._repeated) + 1}")
            if self._submit_again is None or self._lost is not None or self._losses[job.index] > MOST_REPEATS:
                return False
            self._repeated.append(submission_id)
            if ended:
                self._succeeded -= 1
                self._ended -= 1
            request = self._requests[job.index]
        try:
            self._submit_again(job, request, submission_id)
        except (PoolLost, UserError, UnknownDriver):
            with self._changed:
                if ended:
                    self._succeeded += 1
                    self._ended += 1
            return False
        return True

    def _written(self, job: JobEnded, path: Path | Exception) -> _ReadyOutput | JobFailure:
        if isinstance(path, Exception):
            return self._no_image(job, RunErrorKind.INTERNAL, f"the output could not be written: {path}")
        return _ReadyOutput(job, path)

    def _failure(self, job: JobEnded) -> JobFailure:
        if job.error is None:
            return self._no_image(job, RunErrorKind.CANCELLED, "cancelled")
        return self._no_image(job, job.error.kind, job.error.message, job.error.traceback_text)

    def _no_image(self, job: JobEnded, kind: RunErrorKind, message: str, traceback_text: str = "") -> JobFailure:
        return JobFailure(job.index, job.job_id, self._requests[job.index], kind, message, traceback_text)

    def _running_job(self, task: TaskProgress) -> RunningJob:
        prompt = self._requests[task.index].prompt
        return RunningJob(task.job_id, task.index, prompt, task.worker, task.stage, task.step, task.steps)

    def _summary(self) -> Summary:
        cancelled = sum(f.cancelled for f in self._without_image)
        until = self._ended_at if self._over else time.monotonic()
        return Summary(
            jobs=len(self._requests),
            succeeded=self._succeeded,
            failed=len(self._without_image) - cancelled,
            cancelled=cancelled,
            seconds=until - self._started_at,
            tasks=tuple(self._tasks),
        )
