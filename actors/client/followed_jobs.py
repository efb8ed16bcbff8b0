"""`FollowedJobs`: what a driver knows of one submission, as events arrive. `Jobs` is what programs see of it.

Results stay references until they are returned, and each is returned once: a batch of any size takes only the memory
of the images that the program keeps. The object store keeps an image until it is written, or returned if it is not.
While the output folder cannot be written, nothing more of the submission starts: what waits is withdrawn from the
pool, and submitted again when the folder is usable.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from modelpool.actors.client.output_writer import ImageWriter
from modelpool.actors.config.output_address import file_of
from modelpool.actors.control.connection import CONTROLLER, Connection, ResultGone, UnknownDriver
from modelpool.actors.control.detached.records import with_deadline
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.file_content import is_lossless, read_content, read_sound, samples_per_second
from modelpool.actors.outputs.place import OutputPlace, WrittenOutput, name_values
from modelpool.actors.outputs.results.job_follower import JobFollower
from modelpool.actors.outputs.results.job_ledger import EndState, JobLedger
from modelpool.actors.outputs.results.outcomes import (
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
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.results.progress import Progress, RunningJob
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels, labels_of
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import ClientId, JobEnded, JobPreview, SubmissionId, TaskProgress
from modelpool.pool.values.core.errors import UserError, counted
from modelpool.pool.values.core.previews import INTERVAL_SECONDS, PreviewWish
from modelpool.pool.values.core.stage_params import AudioSamples, ImagePixels, VideoFrames
from modelpool.pool.values.specs.spec import RunErrorKind
from modelpool.scheduler.model.messages import Outcome

#: ends of written outputs and failures that can be returned again
MOST_RETURNED = 1000
#: maximum delay of Ctrl-C, see `FollowedJobs._settled`
_SIGNAL_SECONDS = 0.5


#: submits requests again, by index, as a submission with that id
SubmitAgain: TypeAlias = Callable[[Sequence[tuple[int, GenerateRequest]], SubmissionId], None]

#: written videos and audio clips that the object store keeps until they are returned: files do not keep them exactly
MOST_KEPT_BYTES = 1 << 30
#: previews of one job, some KiB each, and jobs that have some: the oldest are dropped
PREVIEWS_KEPT = 16
MOST_PREVIEWED_JOBS = 256


@dataclass(slots=True)
class _ReadyOutput:
    """An output that is ready to be returned. The `result` of `job` is None once its file is enough."""

    job: JobEnded
    written: WrittenOutput | None


#: an end that waits for the program; an output if it was on its way there
_End: TypeAlias = _ReadyOutput | JobFailure | OutputResult


class FollowedJobs:
    """The jobs of one `ModelPool.submit` call; a `Listener` and a `WriteListener`. Thread-safe.

    An index is the position of a request among all that the caller gave, from 0, also those that were not queued.
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
        """`submit_again` submits requests whose output was lost, or that were withdrawn; None if it cannot. `name` is
        of the written files. `on_preview` is called with each preview that arrives; it must not block.
        """
        self._on_preview = on_preview
        #: the previews that were wanted when it was submitted
        self.wish = wish
        self._connection = connection
        self._client_id = client_id
        self._submission_id = submission_id
        self._writer: ImageWriter | None = None
        self._on_over = on_over
        self._submit_again = submit_again
        self._name = name
        self._started_at = time.monotonic()
        #: guards everything below; notified when a job ends or no more events will come
        self._changed = threading.Condition()
        self._requests: list[GenerateRequest] = []
        #: which jobs have ended, and how; and where the others are
        self._ledger: JobLedger[EndState] = JobLedger(_itself)
        self._follower = JobFollower(self._ledger)
        self._waiting: deque[_End] = deque()
        #: jobs whose ends are on their way from there to the program
        self._taking: set[int] = set()
        self._ended_at = self._started_at
        self._without_image: list[JobFailure] = []
        self._tasks: list[TaskSummary] = []
        self._running: tuple[TaskProgress, ...] = ()
        self._lost: Exception | None = None
        #: why the requests could not be taken to their end
        self._stream_problem: Exception | None = None
        #: submissions of jobs that were sent again
        self._repeated: list[SubmissionId] = []
        #: written outputs that the object store still keeps, oldest first, and their size
        self._kept: deque[_ReadyOutput] = deque()
        self._kept_bytes = 0
        #: ends that were returned and can be returned again, the latest `MOST_RETURNED`; and results that the program
        #: still has
        self._returned: OrderedDict[int, _End] = OrderedDict()
        self._in_use: WeakValueDictionary[int, OutputResult] = WeakValueDictionary()
        #: why the output folder cannot be written, while that is tried again; and why it was given up
        self._held = ""
        self._given_up = ""
        #: the last previews of jobs that have not been returned, by index, oldest job first
        self._previews: dict[int, deque[ImagePreview]] = {}
        #: called after every change
        self._watchers: list[Callable[[], None]] = []
        #: the ends of withdrawn jobs until they are submitted again, by index
        self._withdrawn: dict[int, JobEnded] = {}
        self.write_with(writer)

    def results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over all outputs as they finish, each once, including jobs that failed or were cancelled."""
        while (waiting := self._take()) is not None:
            if (result := self._result_of(waiting)) is not None:
                yield result

    def ready_results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over the results that exist now, each once, as `results` does; never waits for a job to end."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                waiting = self._first_waiting()
            if (result := self._result_of(waiting)) is not None:
                yield result

    def return_result(self, result: OutputResult | JobFailure) -> None:
        """Take back a result that did not reach the program: it is the next one."""
        self._put_back(result)

    def next_result(self) -> OutputResult | JobFailure | None:
        """Return the next result that exists now, as `ready_results`; None if there is none."""
        return next(self.ready_results(), None)

    @property
    def is_exhausted(self) -> bool:
        """Whether every job has ended and was returned, and nothing went wrong."""
        with self._changed:
            return self._over and not self._waiting and self._problem is None

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        with self._changed:
            return self._over

    def result_at(self, index: int, timeout: float | None = None) -> OutputResult | JobFailure:
        """Wait for the end of one job and return it; iterators do not return it any more. Raises TimeoutError,
        PoolLost, and UserError if it was returned before, is not written and was not kept.
        """
        return self.take_at(index, timeout)[0]

    def take_at(self, index: int, timeout: float | None = None) -> tuple[OutputResult | JobFailure, bool]:
        """As `result_at`; also return whether it was not returned before, and so can be taken back."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._settled(
                    lambda: index not in self._taking and (self._ledger.has_ended(index) or self._stopped), left
                ):
                    raise TimeoutError(f"job {index} has not ended after {timeout} s")
                if not self._ledger.has_ended(index):
                    raise self._stream_problem or self._lost or UserError(f"request {index} was not queued")
                if (known := self._in_use.get(index)) is not None:
                    return known, False
                waiting = next((end for end in self._waiting if _index_of(end) == index), None)
                is_new = waiting is not None
                if waiting is not None:
                    self._waiting.remove(waiting)
                    self._taking.add(index)
                else:
                    waiting = self._returned.get(index)
            if waiting is None:
                raise UserError(
                    f"the output of job {index} was returned before: keep it, or have outputs written to a folder"
                )
            if (result := self._result_of(waiting, is_new)) is not None:
                return result, is_new

    def state_at(self, index: int) -> tuple[str, TaskProgress | None]:
        """Return the state of a job, and the task that runs for it: "waiting", "running", or how it ended."""
        with self._changed:
            running = next((task for task in self._running if task.index == index), None)
            state = self._ledger.end_of(index)
        return ("running" if running else "waiting") if state is None else state, running

    @property
    def request_count(self) -> int:
        """Number of requests so far."""
        with self._changed:
            return len(self._requests)

    def request_at(self, index: int) -> GenerateRequest:
        """Return a request as submitted, with its seed."""
        with self._changed:
            return self._requests[index]

    def labels_of(self, job: JobEnded) -> Labels:
        """See `WriteListener`."""
        request = self._requests[job.index]
        stem = ""
        if self._name is not None and job.recipe is not None and not self._name.missing(request):
            stem = self._name.stem(name_values(request, job.recipe, job.index))
        return labels_of(request, stem)

    def _result_of(self, waiting: _End, is_new: bool = True) -> OutputResult | JobFailure | None:
        """Return an end that was taken to the program; None if its output was lost and is generated again. One that
        `is_new` is put back if it cannot be returned.
        """
        try:
            result = self._delivered(waiting) if isinstance(waiting, _ReadyOutput) else waiting
        except BaseException:
            if is_new:
                self._put_back(waiting)
            raise
        with self._changed:
            index = _index_of(waiting)
            if isinstance(result, OutputResult):
                self._in_use[index] = result
            if isinstance(waiting, JobFailure):
                self._returned[index] = waiting
            elif isinstance(waiting, _ReadyOutput) and waiting.written is not None:
                self._returned[index] = _ReadyOutput(replace(waiting.job, result=None), waiting.written)
            while len(self._returned) > MOST_RETURNED:
                self._returned.popitem(last=False)
            if is_new:
                self._taking.discard(index)
                self._changed.notify_all()
        return result

    @property
    def id(self) -> SubmissionId:
        """The id of the submission."""
        return self._submission_id

    def lost(self) -> Exception | None:
        """Return why no more jobs will end, although some have not, or why not all requests could be taken; None
        while they do.
        """
        with self._changed:
            return self._problem

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of the progress, in a thread of the pool. It must not block, nor call
        methods of this object.
        """
        with self._changed:
            self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Call `changed` no longer. Idempotent."""
        with self._changed:
            self._watchers = [known for known in self._watchers if known != changed]

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until every job has ended; results can still be iterated. Raises TimeoutError, PoolLost, or why not all
        requests could be taken.
        """
        with self._changed:
            if not self._settled(lambda: self._stopped, timeout):
                raise TimeoutError(
                    f"{self._ledger.unended} of {counted(self._ledger.expected, 'job has', 'jobs have')} not ended"
                )
            if self._problem is not None:
                raise self._problem
            return self._summary()

    def cancel(self) -> None:
        """Cancel all unfinished jobs; running ones stop at their next step. Returns at once. Idempotent."""
        with self._changed:
            if self._over or self._lost is not None:
                return
            withdrawn = self._take_withdrawn(self._follower.cancel())  # no more requests are accepted
        for job in withdrawn:
            self._finish(self._failure(job), job.tasks)
        if self._writer is not None:
            self._writer.wake()
        self._cancel(withdraw=False)

    def cancel_job(self, index: int) -> None:
        """Cancel one job, as `cancel`."""
        with self._changed:
            if self._ledger.has_ended(index) or self._lost is not None:
                return
            withdrawn = self._take_withdrawn([index] if self._follower.cancel_job(index) else [])
            submissions = self._submission_ids
        for job in withdrawn:
            self._finish(self._failure(job), job.tasks)
        for submission_id in submissions:
            self._connection.call(CONTROLLER.cancel_jobs, self._client_id, submission_id, (index,))

    def progress(self) -> Progress:
        """Return the current progress."""
        with self._changed:
            return Progress(
                total=self._ledger.expected,
                done=self._ledger.count("succeeded"),
                failed=self._ledger.count("failed"),
                cancelled=self._ledger.count("cancelled"),
                running=tuple(_running_job(task, self._requests[task.index]) for task in self._running),
                held=self._held,
            )

    def want_previews(self, interval_seconds: float | None = INTERVAL_SECONDS) -> None:
        """Have previews made of the images that are sampled from now on, at most one of each image in this time; None:
        no more. The first preview of an image that is being sampled already may need another image first. Returns at
        once. Raises PoolLost.
        """
        wish = None if interval_seconds is None else PreviewWish(interval_seconds=interval_seconds)
        with self._changed:
            submissions = () if self._over else self._submission_ids
        for submission_id in submissions:
            self._connection.call(CONTROLLER.want_previews, self._client_id, submission_id, wish)

    def preview(self, index: int) -> ImagePreview | None:
        """Return the newest preview of the output at `index`; None if there is none, or if that was returned."""
        with self._changed:
            found = self._previews.get(index)
            return found[-1] if found else None

    def wait_while_held(self) -> None:
        """Wait until the output folder is usable. Called by `ModelPool.submit` before it submits more. Raises
        FolderFailed if it was given up.
        """
        with self._changed:
            self._settled(lambda: not self._held or self._lost is not None)
            if self._given_up:
                raise FolderFailed(self._given_up)

    @property
    def wants_no_outputs(self) -> bool:
        """See `WriteListener`."""
        return self._follower.is_cancelled or self._lost is not None

    def on_written(self, job: JobEnded, outcome: WrittenOutput | Exception) -> None:
        """See `WriteListener`."""
        if isinstance(outcome, WrittenOutput):
            self._finish(self._ready(job, outcome), job.tasks)
        elif not (isinstance(outcome, ResultGone) and self._repeat(job)):
            failure = _not_written(job, self._requests[job.index], outcome)
            if not isinstance(outcome, FolderFailed):
                self._note_failure(job, failure)
            self._finish(failure, job.tasks)

    def on_folder_failed(self, problem: FolderFailed) -> None:
        """See `WriteListener`: withdraw what has not started."""
        with self._changed:
            if self._over or not self._follower.hold(self._submission_ids):
                return
            self._held = str(problem)
            self._notify()
        self._cancel(withdraw=True)

    def on_folder_usable(self) -> None:
        """See `WriteListener`: submit again what was withdrawn."""
        with self._changed:
            self._follower.release()
            self._held = self._given_up = ""
            self._notify()
        self._submit_withdrawn()

    def on_folder_given_up(self, problem: FolderFailed) -> None:
        """See `WriteListener`: cancel what is left."""
        with self._changed:
            self._held, self._given_up = "", str(problem)
            withdrawn = self._take_withdrawn(self._follower.give_up())
            self._notify()
        for job in withdrawn:
            self._finish(self._failure(job), job.tasks)
        self._cancel(withdraw=False)

    @property
    def failures(self) -> tuple[JobFailure, ...]:
        """The jobs that failed so far, without cancelled ones."""
        with self._changed:
            return tuple(f for f in self._without_image if not f.cancelled)

    def summary(self) -> Summary:
        """Return the totals so far."""
        with self._changed:
            return self._summary()

    def add(self, requests: Sequence[GenerateRequest]) -> bool:
        """Register requests that are about to be submitted; False, and no effect, after `cancel`. Called by
        `ModelPool.submit`.
        """
        with self._changed:
            if self._follower.is_cancelled:
                return False
            self._requests.extend(requests)
            self._follower.sent(self._follower.submit(len(requests), time.monotonic()), self._submission_id)
            return True

    def leave_out(self, count: int) -> None:
        """Note that `count` of the registered requests are not queued. Called by `RequestStream`."""
        with self._changed:
            self._ledger.leave_out(count)
            self._note_over()

    def fail(self, problem: Exception) -> None:
        """Cancel all jobs, since no more requests can be taken; `results` raises `problem`."""
        with self._changed:
            self._stream_problem = self._stream_problem or problem
            self._follower.cancel()
            self._notify()
        with contextlib.suppress(PoolLost):
            self._cancel(withdraw=False)

    def write_with(self, writer: ImageWriter | None) -> None:
        """Write outputs with `writer` from now on. Called by `RequestStream` before it queues the first request."""
        self._writer = writer
        if writer is not None:
            writer.add(self)

    def abandon(self) -> None:
        """Cancel everything, since the call that submits it raises. Called by `ModelPool.submit`."""
        self._release()
        self._cancel(withdraw=False)

    @property
    def unended_count(self) -> int:
        """Number of requests so far whose jobs have not ended."""
        with self._changed:
            return self._ledger.unended

    @property
    def is_sealed(self) -> bool:
        """Whether no requests will be added."""
        return self._ledger.sealed

    def seal(self) -> None:
        """Note that no requests will be added. Called by `ModelPool.submit`."""
        with self._changed:
            self._ledger.seal()
            self._note_over()

    def on_job_ended(self, job: JobEnded) -> None:
        """See `Listener`."""
        with self._changed:
            if not self._follower.arrived(job.index, job.submission_id):
                return
        if job.outcome is Outcome.CANCELLED and self._keep_withdrawn(job):
            return
        if job.outcome is not Outcome.SUCCEEDED:
            failure = self._failure(job)
            self._note_failure(job, failure)
            self._finish(failure, job.tasks)
        elif self._writer is None:
            self._finish(_ReadyOutput(job, None), job.tasks)
        else:
            self._writer.write(job, self)

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """See `Listener`."""
        with self._changed:
            if running != self._running:
                self._running = running
                self._notify()

    def on_preview(self, made: JobPreview) -> None:
        """See `Listener`."""
        preview = ImagePreview(
            made.preview.step, made.preview.steps, made.preview.content, index=made.index, job_id=made.job_id
        )
        with self._changed:
            kept = self._previews.setdefault(made.index, deque(maxlen=PREVIEWS_KEPT))
            kept.append(preview)
            while len(self._previews) > MOST_PREVIEWED_JOBS:
                del self._previews[next(iter(self._previews))]
            self._notify()
        self._on_preview(preview)

    def on_lost(self, reason: Exception) -> None:
        """See `Listener`."""
        with self._changed:
            self._lost = reason
            self._running = ()
            self._notify()

    @property
    def _over(self) -> bool:
        return self._ledger.over

    @property
    def _problem(self) -> Exception | None:
        """What ended the submission early."""
        return self._stream_problem or (None if self._over else self._lost)

    @property
    def _stopped(self) -> bool:
        """Whether every job has ended, or why the others will not is known."""
        return self._over or self._problem is not None

    def _finish(self, end: _ReadyOutput | JobFailure, tasks: Sequence[TaskSummary]) -> None:
        with self._changed:
            if not self._follower.end(_index_of(end), _state_of(end)):
                return
            self._tasks.extend(task for task in tasks if not task.shared)
            if isinstance(end, JobFailure):
                self._without_image.append(end)
            self._ended_at = time.monotonic()
            self._waiting.append(end)
            self._note_over()

    def _ready(self, job: JobEnded, written: WrittenOutput) -> _ReadyOutput:
        """Return a written output. Releases its result: at once if the file has the same pixels, otherwise when there
        are too many of them.
        """
        if is_lossless(Path(file_of(written.path))):
            return _ReadyOutput(replace(job, result=None), written)
        ready = _ReadyOutput(job, written)
        with self._changed:
            self._kept.append(ready)
            self._kept_bytes += written.array_bytes
            while self._kept_bytes > MOST_KEPT_BYTES:
                oldest = self._kept.popleft()
                assert oldest.written is not None, "only written outputs are kept"
                oldest.job = replace(oldest.job, result=None)
                self._kept_bytes -= oldest.written.array_bytes
        return ready

    def _keep_withdrawn(self, job: JobEnded) -> bool:
        """Keep the end of a job that was withdrawn, until it is submitted again; False if it was cancelled."""
        with self._changed:
            if not self._follower.withdrawn(job.index, job.submission_id):
                return False
            self._withdrawn[job.index] = job
            late = not self._follower.is_held
        if late and self._writer is not None:
            self._writer.run(self._submit_late)
        return True

    def _submit_late(self) -> None:
        """Submit again what was withdrawn late, unless the folder has failed again: then it waits for that, too."""
        with self._changed:
            if self._follower.is_held:
                return
        self._submit_withdrawn()

    def _submit_withdrawn(self) -> None:
        with self._changed:
            jobs = self._take_withdrawn(sorted(self._follower.take_again()))
            if not jobs:
                return
            indexes = [job.index for job in jobs]
            submission_id = self._new_submission_id(indexes)
        problem = self._submitted_again(indexes, submission_id)
        if problem:
            for job in jobs:
                failure = _no_image(
                    job, self._requests[job.index], RunErrorKind.CANCELLED, f"not started again: {problem}"
                )
                self._finish(failure, job.tasks)

    @property
    def _submission_ids(self) -> tuple[SubmissionId, ...]:
        """The ids under which the pool knows its jobs. Requires the lock."""
        return (self._submission_id, *self._repeated)

    def _take_withdrawn(self, indexes: Sequence[int]) -> list[JobEnded]:
        """Forget the ends of withdrawn jobs, and return them. Requires the lock."""
        return [self._withdrawn.pop(index) for index in indexes]

    def _new_submission_id(self, indexes: Sequence[int]) -> SubmissionId:
        """Return the id of another submission of some of the requests, which is about to be sent. Requires the lock."""
        submission_id = SubmissionId(f"{self._submission_id}r{len(self._repeated) + 1}")
        self._repeated.append(submission_id)
        self._follower.sent(indexes, submission_id)
        return submission_id

    def _submitted_again(self, indexes: Sequence[int], submission_id: SubmissionId) -> str:
        """Submit requests again, with what is left of their deadlines; return why that is impossible, or ""."""
        if self._submit_again is None:
            return "it cannot be submitted again"
        with self._changed:
            now = time.monotonic()
            requests = [
                (index, with_deadline(self._requests[index], self._follower.passed_seconds(index, now)))
                for index in indexes
            ]
        try:
            self._submit_again(requests, submission_id)
            with self._changed:
                unwanted = tuple(self._follower.unwanted(indexes))
            if unwanted:  # cancelled meanwhile
                self._connection.call(CONTROLLER.cancel_jobs, self._client_id, submission_id, unwanted)
        except (PoolLost, UserError, UnknownDriver) as problem:
            return str(problem)
        return ""

    def _cancel(self, withdraw: bool) -> None:
        """Cancel the jobs of every submission; only those that have not started to `withdraw` them."""
        with self._changed:
            submissions = self._submission_ids
        for submission_id in submissions:
            try:
                self._connection.call(CONTROLLER.cancel, self._client_id, submission_id, withdraw)
            except PoolLost:
                if not withdraw:
                    raise

    def _notify(self) -> None:
        """Wake the threads that wait, and call the watchers. Requires the lock."""
        self._changed.notify_all()
        for changed in self._watchers:
            changed()

    def _note_over(self) -> None:
        self._notify()
        if self._over:
            self._running = ()
            self._release()

    def _release(self) -> None:
        """Stop listening to the pool and to the writer."""
        if self._writer is not None:
            self._writer.remove(self)
        self._on_over()

    def _take(self) -> _End | None:
        """Wait for the next end and return it; None if there are no more. Raises if the event stream ended before."""
        with self._changed:
            self._settled(lambda: self._waiting or self._stopped)
            if self._waiting:
                return self._first_waiting()
            if self._problem is not None:
                raise self._problem
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

    def _first_waiting(self) -> _End:
        """Take the next end. Requires the lock."""
        waiting = self._waiting.popleft()
        self._taking.add(_index_of(waiting))
        return waiting

    def _put_back(self, waiting: _End) -> None:
        with self._changed:
            self._in_use.pop(_index_of(waiting), None)
            self._waiting.appendleft(waiting)
            self._taking.discard(_index_of(waiting))
            self._notify()

    def _delivered(self, finished: _ReadyOutput) -> OutputResult | JobFailure | None:
        """Return the output; None if it was lost and is generated again."""
        job, written = finished.job, finished.written
        assert job.recipe is not None, f"job {job.job_id} of a request has a recipe"
        about: dict[str, Any] = {
            "index": job.index,
            "job_id": job.job_id,
            "request": self._requests[job.index],
            "recipe": job.recipe,
            "path": written.path if written is not None and isinstance(written.path, Path) else None,
            "url": written.path if written is not None and isinstance(written.path, str) else "",
            "worker": sampled_by(job.tasks),
            "seconds": unshared_seconds(job.tasks),
            "tasks": job.tasks,
            "pixels_sha256": "" if written is None else written.pixels_sha256,
            "previews": self._taken_previews(job.index),
        }
        output: Any = None
        if job.result is not None:
            self._forget_kept(finished)
            try:
                output = self._connection.fetch(job.result)
            except ResultGone as gone:
                if written is None:
                    return self._lost_output(job, gone)
        if output is None:
            assert written is not None, "an output that is not written is fetched"
            assert self._writer is not None, "what is written has a writer"
            return _result_in_file(job.recipe, self._writer.place, file_of(written.path), about)
        match output:
            case ImagePixels():
                return ImageResult(content=partial(_itself, output.pixels_HWC), **about)
            case VideoFrames():
                content = partial(_itself, output.frames_THWC)
                track = partial(_itself, output.sound)
                return VideoResult(content=content, frame_rate=output.frame_rate, track=track, **about)
            case AudioSamples():
                content = partial(_itself, output.samples_SC)
                return AudioResult(content=content, samples_per_second=output.samples_per_second, **about)
        raise AssertionError(f"job {job.job_id} returned {type(output).__name__}")

    def _taken_previews(self, index: int) -> tuple[ImagePreview, ...]:
        with self._changed:
            return tuple(self._previews.pop(index, ()))

    def _forget_kept(self, finished: _ReadyOutput) -> None:
        with self._changed:
            if finished.written is not None and any(ready is finished for ready in self._kept):
                self._kept = deque(ready for ready in self._kept if ready is not finished)
                self._kept_bytes -= finished.written.array_bytes

    def _lost_output(self, job: JobEnded, gone: ResultGone) -> JobFailure | None:
        """Generate an output again that was lost with its node; return its failure if that is impossible."""
        if self._repeat(job):
            return None
        failure = _no_image(job, self._requests[job.index], RunErrorKind.INPUT_LOST, str(gone))
        with self._changed:
            self._without_image.append(failure)
            if self._ledger.has_ended(job.index):
                self._ledger.replace(job.index, "failed")
            else:
                self._follower.end(job.index, "failed")
            self._note_over()
        return failure

    def _repeat(self, job: JobEnded) -> bool:
        """Submit a job again whose output was lost with the node that stored it. False if it was lost too often, or if
        the pool is gone.
        """
        with self._changed:
            if self._submit_again is None or self._lost is not None or not self._follower.output_lost(job.index):
                return False
            submission_id = self._new_submission_id([job.index])
        try:
            self._connection.call(CONTROLLER.result_lost, job.wanted)
            problem = self._submitted_again([job.index], submission_id)
        except PoolLost as lost:
            problem = str(lost)
        return not problem

    def _failure(self, job: JobEnded) -> JobFailure:
        if job.error is None:
            message = f"not started: {self._given_up}" if self._given_up else "cancelled"
            return _no_image(job, self._requests[job.index], RunErrorKind.CANCELLED, message)
        return _no_image(job, self._requests[job.index], job.error.kind, job.error.message, job.error.traceback_text)

    def _note_failure(self, job: JobEnded, failure: JobFailure) -> None:
        """Remember a failure where the output would have been written. A cancelled job has not failed."""
        if self._writer is None or failure.cancelled or job.recipe is None:
            return
        labels = labels_of(self._requests[job.index])
        about = job.index, job.job_id, failure.kind.value, failure.message
        self._writer.note_failure(FailedOutput.of(job.recipe, labels, *about, at=time.time()))

    def _summary(self) -> Summary:
        until = self._ended_at if self._over else time.monotonic()
        return Summary(
            jobs=self._ledger.expected,
            succeeded=self._ledger.count("succeeded"),
            failed=self._ledger.count("failed"),
            cancelled=self._ledger.count("cancelled"),
            seconds=until - self._started_at,
            tasks=tuple(self._tasks),
        )


def _index_of(end: _End) -> int:
    """Return the index of a job."""
    return end.job.index if isinstance(end, _ReadyOutput) else end.index


def _state_of(end: _ReadyOutput | JobFailure) -> EndState:
    if isinstance(end, JobFailure):
        return "cancelled" if end.cancelled else "failed"
    return "succeeded"


def _no_image(
    job: JobEnded, request: GenerateRequest, kind: RunErrorKind, message: str, traceback_text: str = ""
) -> JobFailure:
    return JobFailure(job.index, job.job_id, request, kind, message, traceback_text)


def _not_written(job: JobEnded, request: GenerateRequest, problem: Exception) -> JobFailure:
    message = f"the output could not be written: {problem}"
    if isinstance(problem, UserError):
        return _no_image(job, request, RunErrorKind.OUTPUT, message)
    if isinstance(problem, (ResultGone, PoolLost)):
        return _no_image(job, request, RunErrorKind.INPUT_LOST, message)
    return _no_image(job, request, RunErrorKind.INTERNAL, message, "".join(traceback.format_exception(problem)))


def _running_job(task: TaskProgress, request: GenerateRequest) -> RunningJob:
    return RunningJob(task.job_id, task.index, request.prompt, task.worker, task.stage, task.step, task.steps)


def _itself(value: Any) -> Any:
    return value


def _content_of(place: OutputPlace, file: str) -> Any:
    with place.local_file(file) as path:
        return read_content(path)


def _sound_of(place: OutputPlace, file: str) -> AudioSamples | None:
    with place.local_file(file) as path:
        return read_sound(path)


def _result_in_file(recipe: Recipe, place: OutputPlace, file: str, about: dict[str, Any]) -> OutputResult:
    """Return a written result whose pixels are read from its file."""
    content = partial(_content_of, place, file)
    if recipe.frames:
        track = partial(_sound_of, place, file)
        return VideoResult(content=content, frame_rate=recipe.frame_rate, track=track, **about)
    if recipe.seconds:
        with place.local_file(file) as path:
            return AudioResult(content=content, samples_per_second=samples_per_second(path), **about)
    return ImageResult(content=content, **about)
