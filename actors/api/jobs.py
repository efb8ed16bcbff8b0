"""`Jobs`: a submission in the driver's hands. Iterate over its images, watch it, cancel it from any thread.

Results stay references until they are handed out, and each is handed out once: a batch of any size takes the memory of
the images that the program keeps.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelpool.actors.api.output_writer import ImageWriter
from modelpool.actors.control.connection import Line, ResultGone
from modelpool.actors.control.controller import Controller
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.results.outcomes import (
    AudioResult,
    ImageResult,
    JobFailure,
    MadeResult,
    Summary,
    TaskSummary,
    VideoResult,
    own_seconds,
    sampled_by,
)
from modelpool.actors.results.progress import Progress, RunningJob
from modelpool.actors.wire.messages import ClientId, JobEnded, RunningTask, SubmissionId
from modelpool.pool.core.stage_params import AudioSamples, ImagePixels, VideoFrames
from modelpool.pool.specs.spec import RunErrorKind
from modelpool.scheduler.tables.messages import Outcome

Kind = TypeVar("Kind", bound=MadeResult)

#: how late Ctrl-C may be heard, see `Jobs._settled`
_SIGNAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Finished:
    """An image that is ready to be handed out."""

    job: JobEnded
    path: Path | None


class Jobs:
    """What one `submit` call brought. Made by `ModelPool.submit`."""

    def __init__(
        self,
        line: Line,
        client_id: ClientId,
        submission_id: SubmissionId,
        writer: ImageWriter | None,
        on_over: Callable[[], None],
    ) -> None:
        self._line = line
        self._client_id = client_id
        self._submission_id = submission_id
        self._writer = writer
        self._on_over = on_over
        self._started_at = time.monotonic()
        #: guards all that follows; told when a job ended or no more news will come
        self._changed = threading.Condition()
        self._requests: list[GenerateRequest] = []
        self._sealed = False
        self._waiting: deque[_Finished | JobFailure] = deque()
        self._succeeded = 0
        self._ended = 0
        self._ended_at = self._started_at
        self._without_image: list[JobFailure] = []
        self._tasks: list[TaskSummary] = []
        self._running: tuple[RunningTask, ...] = ()
        self._lost: Exception | None = None

    def images(self) -> Iterator[ImageResult]:
        """The images as they finish, each once: a second iterator goes on where the first one stopped.

        Jobs without an image are passed over; see `failures`, and `results` for submissions that make videos too.
        Raises PoolLost when no more can come.
        """
        return self._made(ImageResult)

    def videos(self) -> Iterator[VideoResult]:
        """As `images`, for videos."""
        return self._made(VideoResult)

    def audios(self) -> Iterator[AudioResult]:
        """As `images`, for audio clips."""
        return self._made(AudioResult)

    def results(self) -> Iterator[MadeResult | JobFailure]:
        """All that was made as it finishes, each once, with the jobs that failed or were cancelled."""
        while (waiting := self._take()) is not None:
            try:
                result = waiting if isinstance(waiting, JobFailure) else self._handed_out(waiting)
            except BaseException:
                self._put_back(waiting)
                raise
            yield result

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until every job ended; images stay to be iterated. Raises TimeoutError, or PoolLost."""
        with self._changed:
            if not self._settled(lambda: self._over or self._lost is not None, timeout):
                raise TimeoutError(f"{len(self._requests) - self._ended} of {len(self._requests)} jobs have not ended")
            if not self._over and self._lost is not None:
                raise self._lost
            return self._summary()

    def cancel(self) -> None:
        """End all that has not ended; what runs stops at its next step. Returns at once. Idempotent."""
        if not self._over and self._lost is None:
            self._line.ask(Controller.cancel, self._client_id, self._submission_id)

    def progress(self) -> Progress:
        """How far it is."""
        with self._changed:
            cancelled = sum(f.cancelled for f in self._without_image)
            return Progress(
                total=len(self._requests),
                done=self._succeeded,
                failed=len(self._without_image) - cancelled,
                cancelled=cancelled,
                running=tuple(self._running_job(task) for task in self._running),
            )

    def _made(self, kind: type[Kind]) -> Iterator[Kind]:
        for result in self.results():
            if isinstance(result, kind):
                yield result

    @property
    def failures(self) -> tuple[JobFailure, ...]:
        """The jobs that failed so far. Cancelled ones are not among them."""
        with self._changed:
            return tuple(f for f in self._without_image if not f.cancelled)

    def summary(self) -> Summary:
        """The numbers so far."""
        with self._changed:
            return self._summary()

    def add(self, requests: Sequence[GenerateRequest]) -> None:
        """These are about to be submitted. For `ModelPool.submit`."""
        with self._changed:
            self._requests.extend(requests)

    def seal(self) -> None:
        """No more will be added. For `ModelPool.submit`."""
        with self._changed:
            self._sealed = True
            self._note_over()

    def heard_end(self, job: JobEnded) -> None:
        """See `Listener`."""
        if job.outcome is not Outcome.SUCCEEDED:
            self._finish(job, self._failure(job))
        elif self._writer is None:
            self._finish(job, _Finished(job, None))
        else:
            self._writer.write(job, lambda path: self._finish(job, self._written(job, path)))

    def heard_running(self, running: tuple[RunningTask, ...]) -> None:
        """See `Listener`."""
        with self._changed:
            self._running = running

    def heard_loss(self, reason: Exception) -> None:
        """See `Listener`."""
        with self._changed:
            self._lost = reason
            self._running = ()
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._sealed and self._ended == len(self._requests)

    def _finish(self, job: JobEnded, end: _Finished | JobFailure) -> None:
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

    def _take(self) -> _Finished | JobFailure | None:
        """The next end, waited for; None when there are no more. Raises when the news stopped before that."""
        with self._changed:
            self._settled(lambda: self._waiting or self._over or self._lost is not None)
            if self._waiting:
                return self._waiting.popleft()
            if not self._over and self._lost is not None:
                raise self._lost
            return None

    def _settled(self, is_settled: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until it is, `_changed` held; whether it is. In short pieces: a signal that comes just before a thread
        falls asleep does not wake it, and Ctrl-C would be heard at the next change only, which may be hours away."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_settled():
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, _SIGNAL_SECONDS))
        return True

    def _put_back(self, waiting: _Finished | JobFailure) -> None:
        with self._changed:
            self._waiting.appendleft(waiting)

    def _handed_out(self, finished: _Finished) -> MadeResult | JobFailure:
        job = finished.job
        try:
            made = self._line.fetch(job.result)
        except ResultGone as gone:
            failure = self._no_image(job, RunErrorKind.INPUT_LOST, str(gone))
            with self._changed:
                self._succeeded -= 1
                self._without_image.append(failure)
            return failure
        assert job.recipe is not None, f"job {job.job_id} is a request's and has a recipe"
        about: dict[str, Any] = {
            "index": job.index,
            "job_id": job.job_id,
            "request": self._requests[job.index],
            "recipe": job.recipe,
            "path": finished.path,
            "worker": sampled_by(job.tasks),
            "seconds": own_seconds(job.tasks),
            "tasks": job.tasks,
        }
        match made:
            case ImagePixels():
                return ImageResult(pixels=made.pixels_HWC, **about)
            case VideoFrames():
                return VideoResult(frames=made.frames_THWC, frame_rate=made.frame_rate, **about)
            case AudioSamples():
                return AudioResult(samples=made.samples_SC, samples_per_second=made.samples_per_second, **about)
        raise AssertionError(f"job {job.job_id} was a request's and made {type(made).__name__}")

    def _written(self, job: JobEnded, path: Path | Exception) -> _Finished | JobFailure:
        if isinstance(path, Exception):
            return self._no_image(job, RunErrorKind.INTERNAL, f"the image could not be written: {path}")
        return _Finished(job, path)

    def _failure(self, job: JobEnded) -> JobFailure:
        if job.error is None:
            return self._no_image(job, RunErrorKind.CANCELLED, "it was cancelled")
        return self._no_image(job, job.error.kind, job.error.message, job.error.traceback_text)

    def _no_image(self, job: JobEnded, kind: RunErrorKind, message: str, traceback_text: str = "") -> JobFailure:
        return JobFailure(job.index, job.job_id, self._requests[job.index], kind, message, traceback_text)

    def _running_job(self, task: RunningTask) -> RunningJob:
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
