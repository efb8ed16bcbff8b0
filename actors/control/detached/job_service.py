"""`JobService`: runs the submissions of the journal on a pool, and commits their outputs. A driver of the pool that
outlives the drivers of its users.

Life of a request: journaled, sent to the controller when its turn is near, its output written to the output folder
(a file under its final name is complete; one file per recipe), committed in the journal.

Rules
1. The journal is the only state. A new service continues from it: what has no outcome runs again, unless its output is
   in the folder already.
2. At most `WINDOW` requests of a submission and `TOTAL_WINDOW` of all are in the pool. The others are on disk only. The
   window is small until the pool is faster than it, and again while outputs wait for a slow disk: until they are
   written, they occupy the object store.
3. A lost controller loses nothing: its unfinished requests are sent to the next one.
4. While the journal takes no writes, nothing is sent, jobs in the pool run, and outcomes wait in memory, at most a
   window of each submission. A probe of the journal ends that: nothing is cancelled, and nothing runs twice.
5. An output folder that cannot be written holds its submission: nothing more of it is sent until it can be. It is
   opened by a thread of its own, since a store that does not answer must not hold up the others.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from modelpool.actors.config.output_address import file_of, output_address
from modelpool.actors.control.connection import CONTROLLER, Connection, ResultGone, UnknownDriver
from modelpool.actors.control.detached.handover import Handover
from modelpool.actors.control.detached.job_previews import DetachedPreviews
from modelpool.actors.control.detached.left_memory import stored_memory
from modelpool.actors.control.detached.records import (
    NewSubmission,
    PendingRequest,
    RequestOutcome,
    SubmissionRecord,
    SubmissionState,
    labels_in_text,
    name_of,
    restored_request,
    with_deadline,
)
from modelpool.actors.control.detached.submission_age import SubmissionAges
from modelpool.actors.control.detached.submission_journal import Fenced, Journal, JournalFailed
from modelpool.actors.control.event_reader import EventReader
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.control.operator_orders import OperatorOrder, OrderTaken
from modelpool.actors.control.output_commit import WRITE_THREADS, NodeWriters, OutputCommitter
from modelpool.actors.control.past_jobs import unpacked_history
from modelpool.actors.control.status import PinnedModel
from modelpool.actors.graph.features.recorded_batches import SubmittedBatches, output_keys
from modelpool.actors.outputs.entries import parse_entry
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.layout import declare_layout
from modelpool.actors.outputs.open_outputs import open_outputs
from modelpool.actors.outputs.place import KeptImage, OutputPlace, name_values
from modelpool.actors.outputs.results.job_follower import JobFollower
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.sharded import ShardedOutputs
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels, labels_of
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import (
    ClientId,
    JobEnded,
    JobPreview,
    NodesEnded,
    Submission,
    SubmissionId,
    TaskProgress,
    journaled_id,
)
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.specs.spec import RunErrorKind
from modelpool.scheduler.core.history import JobHistory
from modelpool.scheduler.model.messages import Outcome

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: a method of JobService, such as JobService.progress
ServiceMethod: TypeAlias = Callable[Concatenate["JobService", P], T]

#: the name under which the service is a driver of its pool
CLIENT = ClientId("detached jobs")
#: the id of a listener for the end of all events
_NO_SUBMISSION = SubmissionId("")
#: requests that travel together
CHUNK = 64
#: requests of a submission in the pool: at first, and at most, which is enough for 256 GPUs to have their next four
LEAST_WINDOW = 128
WINDOW = 1024
TOTAL_WINDOW = 4096
#: threads that open the places of outputs, one for each submission that begins: a store may not answer for minutes
OPENERS = 16
#: interval of looking for a controller, and of trying a folder again that could not be written
RETRY_SECONDS = 1.0
FOLDER_RETRY_SECONDS = 10.0
#: interval of looking for work that nobody announced
IDLE_SECONDS = 5.0
#: interval of asking the controller what a journal keeps for the next one
MEMORY_SECONDS = 2.0
#: interval of asking whether a journal that could not be written can be written again
PROBE_SECONDS = 5.0
#: troubles that the status of the pool names
MOST_TROUBLES = 4
#: longest wait of one call
LONGEST_WAIT_SECONDS = 10.0


class JobsConnection(Protocol):
    """Calls of a driver to the job service of a pool. Blocks the calling thread; raises what the method raises, and
    PoolLost if the service is gone.
    """

    def call(self, question: ServiceMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the service and return its result."""


@dataclass(frozen=True, slots=True)
class JobsProgress:
    """The progress of a submission.

    running      its running tasks
    in_pool      requests that are queued or run in the pool; other pending ones are in the journal only
    waiting_for  why nothing of it runs; "" if something does
    """

    record: SubmissionRecord
    running: tuple[TaskProgress, ...]
    in_pool: int
    waiting_for: str


@dataclass(slots=True)
class _Feed:
    """A submission of which requests are in the pool.

    window      requests that may be in the pool
    was_full    whether so many were in the pool since the window changed
    last_place  everything up to it was sent or has an outcome
    jobs        which places are in the pool or have to be sent again; outcomes are in the journal
    unwritten   places in the pool that have ended and wait for a thread that writes
    uncommitted outcomes for which the journal had no room
    place        of its outputs
    kept         what that had when this feed began, by key (`output_key`)
    gone         keys of outputs among these that have been removed or damaged since
    committer    writes outputs there
    batches      the batch sizes of what was there when this feed began
    name         template of the names of its outputs; None for the usual ones
    committing   held while outcomes are committed that may be the last ones
    """

    record: SubmissionRecord
    place: OutputPlace
    kept: Mapping[str, KeptImage]
    window: int
    committer: OutputCommitter
    jobs: JobFollower[RequestOutcome]
    batches: SubmittedBatches
    name: NameTemplate | None = None
    committing: threading.Lock = field(default_factory=threading.Lock)
    was_full: bool = False
    last_place: int = -1
    unwritten: int = 0
    uncommitted: list[RequestOutcome] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)


class JobService:
    """The detached jobs of one pool. Thread-safe: drivers call it from several threads."""

    def __init__(
        self, journal: Journal, connect: Callable[[], Connection], node_writers: NodeWriters | None = None
    ) -> None:
        """`connect` returns a connection to the controller. It raises PoolLost or UserError while there is none.
        `node_writers` write on the nodes of the outputs; without them, the service writes all."""
        self._node_writers = node_writers
        self._journal = journal
        self._connect = connect
        #: what a controller leaves to the next one
        self.handover = Handover(journal, connect)
        self._changed = threading.Condition()
        self._stopping = False
        #: why no request is sent, while none can be
        self._trouble = "the pool is starting"
        self._feeds: dict[str, _Feed] = {}
        #: submissions with jobs in the pool that have to be cancelled
        self._to_cancel: set[str] = set()
        #: submissions with a folder that cannot be written, when to try again, on the monotonic clock, and why
        self._held: dict[str, tuple[float, str]] = {}
        #: when to probe a journal that could not be written, on the monotonic clock
        self._probe_at = 0.0
        #: submissions with a place of outputs that is being opened
        self._opening: dict[str, Future[_Feed]] = {}
        #: of active submissions; only the service's thread uses it
        self._ages = SubmissionAges()
        self._running: dict[SubmissionId, tuple[TaskProgress, ...]] = {}
        self._previews = DetachedPreviews()
        #: of the journal, as this service has opened it
        self.epoch = journal.epoch
        self.id_numbers = itertools.count(1)
        self._wake = threading.Event()
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="modelpool detached outputs")
        self._openers: Executor = ThreadPoolExecutor(OPENERS, thread_name_prefix="modelpool detached openers")
        self._thread = threading.Thread(target=self._run, name="modelpool detached jobs", daemon=True)
        self._thread.start()

    # ---- for drivers ----------------------------------------------------------------------------------------------

    def begin(self, new: NewSubmission, driver: str = "") -> SubmissionRecord:
        """Start a submission; see `Journal.begin`. Raises OutputFailed if its outputs cannot be written, and
        UnusableField if their place has another layout: then nothing has changed in the journal."""
        address = output_address(new.output)
        self._journal.require_free(new, driver)  # an id that is refused leaves no layout in a place of others
        if new.layout is not None:
            declare_layout(address, new.layout)
        open_outputs(address)
        return self._journal.begin(new, driver)  # last: it drops what an earlier call has begun and appended

    def append(self, submission_id: str, first_place: int, texts: Sequence[str], driver: str = "") -> None:
        """Add requests to it; see `Journal.append`."""
        self._journal.append(submission_id, first_place, texts, driver)

    def seal(self, submission_id: str, request_count: int | None = None, driver: str = "") -> SubmissionRecord:
        """Acknowledge it: from now on it runs, whatever happens to its driver. See `Journal.seal`."""
        record = self._journal.seal(submission_id, request_count, driver)
        self._wake.set()
        return record

    def abandon(self, submission_id: str, driver: str = "") -> None:
        """Forget a submission that was not acknowledged; see `Journal.abandon`."""
        self._journal.abandon(submission_id, driver)

    def submissions(self) -> tuple[SubmissionRecord, ...]:
        """Return all submissions, oldest first."""
        with self._changed:
            held = dict(self._held)
        return tuple(_with_trouble(record, self._journal.trouble, held) for record in self._journal.submissions())

    def progress(self, submission_id: str) -> JobsProgress:
        """Return the progress of a submission, by its id or the start of it. Raises UnknownName."""
        record = self._journal.find(submission_id)
        broken = self._journal.trouble if record.pending else ""
        with self._changed:
            record = _with_trouble(record, broken, self._held)
            feed = self._feeds.get(record.submission_id)
            running = tuple(
                task
                for submission_id, tasks in self._running.items()
                for task in tasks
                if name_of(submission_id) == record.submission_id
            )
            opening = f"{record.output} is being opened" if record.submission_id in self._opening else ""
            return JobsProgress(
                record=record,
                running=running if record.pending else (),
                in_pool=0 if feed is None else feed.jobs.in_pool,
                waiting_for=broken
                or ("" if running or not record.pending else record.trouble or self._trouble or opening),
            )

    def history(self, job: str) -> JobHistory | None:
        """Return the history of a job that has ended, of this controller of the pool or an earlier one, by its id or a
        unique part of it. None if the journal has none that this version reads."""
        content = self._journal.history(job)
        return None if content is None else unpacked_history(content)

    def previews(self, submission_id: str) -> tuple[ImagePreview, ...]:
        """Return the newest previews of running jobs of a submission, and have some made for the next seconds. Raises
        UnknownName.
        """
        name = self._journal.find(submission_id).submission_id
        if self._previews.ask(name):
            self._wake.set()
        running = {task.index for task in self.progress(name).running}
        return tuple(preview for preview in self._previews.newest(name) if preview.index in running)

    def wait(self, submission_id: str, timeout_seconds: float) -> SubmissionRecord:
        """Return the submission once it has ended, or after `timeout_seconds`, at most 10. Raises UnknownName."""
        until = time.monotonic() + min(timeout_seconds, LONGEST_WAIT_SECONDS)
        while True:
            record = self._journal.find(submission_id)
            left_seconds = until - time.monotonic()
            if record.state is SubmissionState.ENDED or left_seconds <= 0 or self._stopping:
                return record
            with self._changed:
                self._changed.wait(min(left_seconds, RETRY_SECONDS))

    def outcomes(self, submission_id: str, after_place: int = -1) -> tuple[RequestOutcome, ...]:
        """Return some outcomes of a submission, the first ones after `after_place`. Raises UnknownName."""
        return self._journal.outcomes(self._journal.find(submission_id).submission_id, after_place)

    def cancel(self, submission_id: str) -> SubmissionRecord:
        """Cancel what has no outcome; runs stop at their next step. Raises UnknownName."""
        known = self._journal.find(submission_id).submission_id
        with self._changed:
            feed = self._feeds.get(known)
        self._journal.cancel(known)
        self._drop(known)
        if feed is not None:  # its outputs so far are packed, too
            with suppress(RuntimeError):  # the service stops
                self._writers.submit(self._commit_or_hold, feed, ())
        return self._journal.find(known)

    def remove(self, submission_id: str) -> None:
        """Forget a submission that has ended; see `Journal.remove`."""
        self._journal.remove(self._journal.find(submission_id).submission_id)

    def pin(self, models: Sequence[str], replicas: int) -> tuple[PinnedModel, ...]:
        """See `Handover.pin`."""
        return self.handover.pin(models, replicas)

    def operate(self, order: OperatorOrder) -> OrderTaken:
        """See `Handover.operate`."""
        return self.handover.operate(order)

    def close(self) -> None:
        """Stop sending, write outputs that have arrived, and disconnect: the pool ends, and with it its pins. What has
        no outcome runs when the journal is opened next. Idempotent.
        """
        if not self._stopping:
            self.handover.drop()
        self._stopping = True
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=True)
        if self._node_writers is not None:
            self._node_writers.close()
        self._journal.close()

    # ---- the service's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                link = _Link(self._connect(), self)
                self._serve(link)
            except (PoolLost, UserError, UnknownDriver) as problem:
                self._lose(str(problem))
            except Fenced as fenced:
                self._lose(str(fenced))
                return
            except Exception as mistake:  # a broken controller, or a bug: it must not end all detached jobs
                logger.exception("the job service starts again")
                self._lose(f"{type(mistake).__name__}: {mistake}")
            self._wake.clear()  # the loss has set it
            if not self._stopping:
                self._wake.wait(RETRY_SECONDS)

    def _lose(self, trouble: str) -> None:
        """Forget what was in the pool: it has no outcome, so it is sent again. Drivers read `trouble` meanwhile."""
        with self._changed:
            self._trouble = trouble
            self._feeds.clear()
            self._to_cancel.clear()
            self._running.clear()

    def _serve(self, link: _Link) -> None:
        """Send requests until the service stops or the controller is lost."""
        link.enter()
        with self._changed:
            self._trouble = ""
        try:
            while True:
                self._wake.clear()  # first: an announcement after the questions ends the wait below
                if self._stopping or link.lost:
                    break
                self._cancel_in_pool(link)
                link.want_previews(self._previews.wanted())
                takes_writes = self._takes_writes()
                with self._changed:
                    held = dict(self._held)
                link.tell(_troubles(self._journal.trouble, held))
                if takes_writes:
                    link.keep_memory(self._journal)
                if not (takes_writes and self._send_some(link)):
                    self._wake.wait(IDLE_SECONDS)
        finally:
            if self._stopping:  # outputs that have arrived are written before the pool may release them
                self._writers.shutdown(wait=True)
            link.leave()
        self._lose(link.lost or "the pool is stopping")

    def _drop(self, name: str) -> None:
        """Forget the jobs in the pool of a submission, and have them cancelled there."""
        with self._changed:
            if self._feeds.pop(name, None) is not None:
                self._to_cancel.add(name)
        self._wake.set()

    def _takes_writes(self) -> bool:
        """Whether the journal takes writes, as far as is known. One that did not is probed at intervals; once it does,
        outcomes that wait are committed."""
        if self._journal.trouble:
            if time.monotonic() < self._probe_at:
                return False
            self._probe_at = time.monotonic() + PROBE_SECONDS
            if not self._journal.probe():
                return False
        with self._changed:
            kept = [(feed, outcomes) for feed in self._feeds.values() if (outcomes := feed.uncommitted)]
            for feed, _ in kept:
                feed.uncommitted = []
        for feed, outcomes in kept:
            self._commit_or_hold(feed, outcomes)
            with self._changed:
                waiting = {each.place for each in feed.uncommitted}
                for each in outcomes:
                    if each.place not in waiting:
                        feed.jobs.end(each.place, each)
        return not self._journal.trouble

    def _cancel_in_pool(self, link: _Link) -> None:
        with self._changed:
            names, self._to_cancel = self._to_cancel, set()
        for name in names:
            link.cancel(name)

    def _send_some(self, link: _Link) -> bool:
        """Send a chunk of each submission that has requests and room for them. False if nothing was sent."""
        sent = False
        active = self._journal.active()
        self._forget_ended(link, {record.submission_id for record in active})
        for record in active:
            # also while its feed is opened: the wall clock may be set back meanwhile
            self._ages.seconds(record.submission_id, record.created_at, time.time(), time.monotonic())
            feed = self._feed_of(record)
            if feed is None:
                continue
            for is_again, chunk in self._next_chunks(feed):
                sent = True
                self._send(link, feed, chunk, is_again)
        return sent

    def _forget_ended(self, link: _Link, active: Container[str]) -> None:
        self._ages.keep(active)
        with self._changed:
            ended = {name: self._feeds.pop(name) for name in tuple(self._feeds) if name not in active}
            self._held = {name: held for name, held in self._held.items() if name in active}
            for name in [name for name in self._opening if name not in active]:
                self._opening.pop(name).cancel()
        for name, feed in ended.items():
            if feed.jobs.in_pool:  # it was cancelled in the journal a moment ago
                link.cancel(name)
            else:
                link.forget(name)

    def _feed_of(self, record: SubmissionRecord) -> _Feed | None:
        """Return the feed of a submission; None while its folder is being opened or cannot be written."""
        name = record.submission_id
        with self._changed:
            if name in self._feeds:
                return self._feeds[name]
            if name in self._held and time.monotonic() < self._held[name][0]:
                return None
            opening = self._opening.get(name)
        if opening is None:
            opening = self._openers.submit(_opened_feed, record, self._node_writers)
            with self._changed:
                self._opening[name] = opening
            opening.add_done_callback(lambda _: self._wake.set())
        if not opening.done():
            return None
        with self._changed:
            del self._opening[name]
        try:
            feed = opening.result()
        except Exception as problem:  # also a damaged layout or a bug: it must not hold up the other submissions
            self._hold_for(name, problem)
            return None
        if record.trouble:
            self._journal.note_trouble(name, "")
        with self._changed:
            self._held.pop(name, None)
            self._feeds[name] = feed
        return feed

    def _hold_for(self, name: str, problem: Exception) -> None:
        """Hold a submission with outputs that cannot be opened or completed: take it from the pool, and retry later."""
        if not isinstance(problem, (UserError, JournalFailed)):
            logger.error("the outputs of submission %s cannot be written", name, exc_info=problem)
        trouble = str(problem) or type(problem).__name__
        with self._changed:
            self._held[name] = time.monotonic() + FOLDER_RETRY_SECONDS, trouble
        self._drop(name)
        with suppress(JournalFailed):  # of the same full disk
            self._journal.note_trouble(name, trouble)

    def _next_chunks(self, feed: _Feed) -> Iterator[tuple[bool, list[PendingRequest]]]:
        """The next requests of `feed`, in runs of consecutive places, and whether they were sent before. Empty if the
        pool has enough.
        """
        with self._changed:
            total = sum(each.jobs.in_pool for each in self._feeds.values())
            if (window := window_after(feed.window, feed.was_full, feed.jobs.in_pool, feed.unwritten)) != feed.window:
                feed.window, feed.was_full = window, False
            room = min(feed.window - feed.jobs.in_pool, TOTAL_WINDOW - total)
            feed.was_full = feed.was_full or room < CHUNK
            again = feed.jobs.take_again(CHUNK)
        if room < CHUNK and not again:
            return
        for place in again:
            found = self._journal.pending(feed.record.submission_id, place - 1, 1)
            yield True, [each for each in found if each.place == place]
        if room < CHUNK:
            return
        found = self._journal.pending(feed.record.submission_id, feed.last_place, CHUNK)
        if found:
            feed.last_place = found[-1].place
        run: list[PendingRequest] = []
        for each in found:
            if run and each.place != run[-1].place + 1:
                yield False, run
                run = []
            run.append(each)
        if run:
            yield False, run

    def _send(self, link: _Link, feed: _Feed, chunk: Sequence[PendingRequest], is_again: bool) -> None:
        """Send consecutive requests; end requests that cannot run, or have their output already."""
        name = feed.record.submission_id
        age_seconds = self._ages.seconds(name, feed.record.created_at, time.time(), time.monotonic())
        usable: list[tuple[int, GenerateRequest]] = []
        ended: list[RequestOutcome] = []
        for each in chunk:
            try:
                passed_seconds = feed.jobs.passed_seconds(each.place, age_seconds)
                usable.append((each.place, with_deadline(restored_request(each.text), passed_seconds)))
            except ValueError as problem:
                ended.append(_failed(name, each.place, RunErrorKind.BAD_INPUT, str(problem)))
        if feed.kept:
            usable, kept = _without_finished(link, feed, usable)
            if kept:
                with suppress(RuntimeError):  # the service stops: they are found again
                    self._writers.submit(self._commit_kept, feed, kept)
        for part in _runs(usable):
            ended += self._send_run(link, feed, part, is_again)
        if ended:
            with suppress(RuntimeError):  # the service stops: they are found again
                self._writers.submit(self._commit_or_hold, feed, ended)

    def _send_run(
        self, link: _Link, feed: _Feed, part: Sequence[tuple[int, GenerateRequest]], is_again: bool
    ) -> list[RequestOutcome]:
        """Send requests at consecutive places; return the outcomes of those that are refused."""
        places = [place for place, _ in part]
        submission_id = link.id_for(feed.record.submission_id, is_again)
        with self._changed:
            feed.jobs.sent(places, submission_id)
        try:
            link.submit(submission_id, feed.record.user, part, feed.batches)
        except UserError as problem:
            with self._changed:
                feed.jobs.refused(places)
            if len(part) == 1:
                return [_failed(feed.record.submission_id, part[0][0], RunErrorKind.BAD_INPUT, str(problem))]
            return [ended for one in part for ended in self._send_run(link, feed, [one], is_again)]
        return []

    # ---- ends of jobs -------------------------------------------------------------------------------------------

    def note_running(self, submission_id: SubmissionId, running: tuple[TaskProgress, ...]) -> None:
        """Exactly these tasks are running."""
        with self._changed:
            if running:
                self._running[submission_id] = running
            else:
                self._running.pop(submission_id, None)

    def note_ended(self, link: _Link, job: JobEnded) -> None:
        """A job ended; called by the reader's thread, which must not wait."""
        with self._changed:
            feed = self._feeds.get(name_of(job.submission_id))
            if feed is None or not feed.jobs.arrived(job.index, job.submission_id):
                return  # cancelled, or from before the controller was lost
            feed.unwritten += 1
        with suppress(RuntimeError):  # the service stops: the request runs again
            self._writers.submit(self._finish, link, feed, job)

    def note_preview(self, made: JobPreview) -> None:
        """There is a new preview of a job."""
        preview = made.preview
        found = ImagePreview(preview.step, preview.steps, preview.content, index=made.index, job_id=made.job_id)
        self._previews.note(name_of(made.submission_id), found)

    def note_lost(self) -> None:
        """The controller is gone."""
        self._wake.set()

    def _finish(self, link: _Link, feed: _Feed, job: JobEnded) -> None:
        """Write the output of a job that ended, and commit it."""
        with self._changed:
            feed.unwritten -= 1
            if self._feeds.get(feed.record.submission_id) is not feed:
                return  # cancelled meanwhile, or the controller was lost
        self._write_and_commit(link, feed, job)

    def _write_and_commit(self, link: _Link, feed: _Feed, job: JobEnded) -> None:
        name = feed.record.submission_id
        try:
            try:
                outcome = self._outcome_of(link, feed, job)
            except (FolderFailed, JournalFailed, PoolLost, UnknownDriver, Fenced):
                raise
            except UserError as problem:  # of this file, such as a format that cannot hold the output
                outcome = _failed(name, job.index, RunErrorKind.BAD_INPUT, str(problem))
            except Exception as mistake:  # a bug must not hold up the other requests
                logger.exception("the output of %s could not be written", job.job_id)
                text = f"the output could not be written: {type(mistake).__name__}: {mistake}"
                outcome = _failed(name, job.index, RunErrorKind.INTERNAL, text)
            if outcome is not None and not self._commit_or_keep(feed, [outcome]):
                return
            if outcome is not None:
                with self._changed:
                    feed.jobs.end(job.index, outcome)
            self._wake.set()
        except (PoolLost, UnknownDriver, Fenced):
            return  # the service's thread notices, too; the request has no outcome
        except Exception as problem:  # nobody else reads it, and the request would be in the pool for ever
            self._hold_for(name, problem)

    def _outcome_of(self, link: _Link, feed: _Feed, job: JobEnded) -> RequestOutcome | None:
        """Write the output of a job and return its outcome; None if the request has to run again. Raises
        FolderFailed.
        """
        name = feed.record.submission_id
        if job.outcome is Outcome.CANCELLED:
            with self._changed:  # not by the submission's driver, since it is still known here
                feed.jobs.withdrawn(job.index, job.submission_id)
            return None
        if job.outcome is Outcome.FAILED:
            kind = RunErrorKind.INTERNAL if job.error is None else job.error.kind
            message = "" if job.error is None else job.error.message
            _note_failure(feed, job, kind, message, self._journal.request_text(name, job.index))
            return _failed(name, job.index, kind, message)

        def labels_of_request(job: JobEnded) -> Labels:
            text = self._journal.request_text(name, job.index)
            if feed.name is not None and job.recipe is not None:
                request = restored_request(text)
                if not feed.name.missing(request):
                    return labels_of(request, feed.name.stem(name_values(request, job.recipe, job.index)))
            return labels_in_text(text)

        try:
            written = feed.committer.write(link.connection, job, labels_of_request)
        except ResultGone as gone:
            link.connection.call(CONTROLLER.result_lost, job.wanted)  # first: it may be sent again at once
            with self._changed:
                runs_again = feed.jobs.output_lost(job.index)
            if not runs_again:
                return _failed(name, job.index, RunErrorKind.INPUT_LOST, str(gone))
            return None
        file, sha256 = file_of(written.path), written.pixels_sha256
        return RequestOutcome(name, job.index, Outcome.SUCCEEDED, file, written.file_bytes, sha256)

    def _commit_kept(self, feed: _Feed, found: Sequence[tuple[RequestOutcome, KeptImage]]) -> None:
        """Commit outputs that were there when the feed began, maybe days ago. Requests with a file that is gone or
        damaged since are sent."""
        there: list[RequestOutcome] = []
        gone: list[int] = []
        try:
            for outcome, kept in found:
                entry = parse_entry(kept.entry)
                if feed.place.problem(entry, quick=True):
                    feed.gone.add(entry.key)
                    gone.append(outcome.place)
                else:
                    there.append(outcome)
        except Exception as problem:  # a store that does not answer, say
            self._hold_for(feed.record.submission_id, problem)
            return
        if gone:
            with self._changed:
                feed.jobs.want(gone)
            self._wake.set()
        if there:
            self._commit_or_hold(feed, there)

    def _commit_or_hold(self, feed: _Feed, outcomes: Sequence[RequestOutcome]) -> None:
        """Commit outcomes, or keep them until the journal takes them."""
        try:
            self._commit_or_keep(feed, outcomes)
        except Fenced:
            return  # the service's thread notices, too
        except Exception as problem:
            self._hold_for(feed.record.submission_id, problem)

    def _commit_or_keep(self, feed: _Feed, outcomes: Sequence[RequestOutcome]) -> bool:
        """As `_commit`. If the journal takes no writes, keep the outcomes until it does, and return False."""
        try:
            self._commit(feed, outcomes)
        except JournalFailed:
            if not self._journal.trouble:
                raise
            with self._changed:
                feed.uncommitted += outcomes
            self._wake.set()
            return False
        return True

    def _commit(self, feed: _Feed, outcomes: Sequence[RequestOutcome]) -> None:
        """Commit outcomes. Before the last one, complete what the place writes in parts: a submission that has ended
        has all its shards. Raises OutputFailed if that is impossible; then nothing is committed.
        """
        if isinstance(feed.place, ShardedOutputs):
            with feed.committing:
                if self._journal.find(feed.record.submission_id).pending <= len(outcomes):
                    feed.place.finish()
                self._journal.end(outcomes)
        else:  # nothing is pending there, and commits of several threads share a transaction
            self._journal.end(outcomes)
        with self._changed:
            self._changed.notify_all()


def new_id(name: str, epoch: int, number: int) -> SubmissionId:
    """Return a new id for a submission; see `name_of`. A controller ignores jobs with known ids, so ids differ from ids
    of earlier services, by the epoch, and of earlier connections, by the number."""
    return SubmissionId(f"{name}.{epoch}.{number}")


class _Link:
    """The connection of the service to one controller, until that is lost. A listener of all its submissions."""

    def __init__(self, connection: Connection, service: JobService) -> None:
        self.connection = connection
        #: why there will be no more events; "" while there are
        self.lost = ""
        self._service = service
        self._reader = EventReader(connection, CLIENT)
        self._images = InputImages(connection.give)
        #: the ids under which the controller knows a submission; requests sent again have a new one
        self._ids: dict[str, list[SubmissionId]] = {}
        #: ids for which the controller has previews made
        self._previewed: set[SubmissionId] = set()
        #: the troubles that the controller knows; None before the first: it may know troubles of an earlier service
        self._told: tuple[str, ...] | None = None
        #: number of ended jobs that the controller had at the last `keep_memory`, and when the next one is due
        self._ended, self._memory_at = 0, 0.0
        #: the memory that was stored last
        self._stored = ""

    def enter(self) -> None:
        """Register with the controller, in place of an earlier service. Raises PoolLost."""
        self.connection.call(CONTROLLER.leave, CLIENT)
        # first: it may take long, and a driver that has entered must poll
        self._service.handover.hand_over(self.connection)
        self.connection.call(CONTROLLER.enter, CLIENT)
        # the loss of the controller is noticed without submissions, too
        self._reader.listen(_NO_SUBMISSION, _Listener(self, _NO_SUBMISSION, self._service))
        self._reader.start()

    def leave(self) -> None:
        """Disconnect; the controller cancels remaining jobs."""

        def wake() -> None:
            with suppress(PoolLost):
                self.connection.call(CONTROLLER.leave, CLIENT)

        self._reader.stop(wake)

    def id_for(self, name: str, is_again: bool) -> SubmissionId:
        """Return the id under which the next requests of a submission are sent, and listen to it."""
        ids = self._ids.setdefault(name, [])
        if is_again or not ids:
            ids.append(new_id(name, self._service.epoch, next(self._service.id_numbers)))
            self._reader.listen(ids[-1], _Listener(self, ids[-1], self._service))
        return ids[-1]

    def submit(
        self,
        submission_id: SubmissionId,
        user: str,
        part: Sequence[tuple[int, GenerateRequest]],
        batches: SubmittedBatches,
    ) -> None:
        """Send requests at consecutive places. Raises UserError if one of them cannot run: then none was sent."""
        requests, given = self._images.bring_all([request for _, request in part])
        who = CLIENT, submission_id, part[0][0]
        sent = Submission(*who, tuple(requests), False, user, given, batches=batches)
        self.connection.call(CONTROLLER.submit, sent)
        self._previewed.discard(submission_id)  # the controller forgets it whenever all jobs of an id have ended

    def want_previews(self, names: Container[str]) -> None:
        """Have previews made of these submissions, and of no others."""
        wanted = {each for name, ids in self._ids.items() if name in names for each in ids}
        for submission_id in wanted - self._previewed:
            self.connection.call(CONTROLLER.want_previews, CLIENT, submission_id, PreviewWish())
        for submission_id in self._previewed - wanted:
            self.connection.call(CONTROLLER.want_previews, CLIENT, submission_id, None)
        self._previewed = wanted

    def keep_memory(self, journal: Journal) -> None:
        """Store at intervals what the controller hands to the next one. Raises JournalFailed."""
        if time.monotonic() < self._memory_at:
            return
        self._memory_at = time.monotonic() + MEMORY_SECONDS
        with self._service.handover.keeping:
            found = self.connection.call(CONTROLLER.memory, self._ended)
            if self._service.handover.has_dropped or (not found.past_jobs and found.memory == self._stored):
                return
            past = [(journaled_id(each.job_id), str(each.job_id), each.history) for each in found.past_jobs]
            journal.keep_memory(stored_memory(found.memory, found.controllers), past)
        self._ended, self._stored = found.ended, found.memory

    def tell(self, troubles: tuple[str, ...]) -> None:
        """Have the status of the pool show these troubles of detached jobs."""
        if troubles != self._told:
            self.connection.call(CONTROLLER.jobs_troubled, troubles)
            self._told = troubles

    def cancel(self, name: str) -> None:
        """Cancel the jobs in the pool of a submission."""
        for submission_id in self.forget(name):
            self.connection.call(CONTROLLER.cancel, CLIENT, submission_id)

    def forget(self, name: str) -> list[SubmissionId]:
        """Listen to a submission no longer; return its ids."""
        ids = self._ids.pop(name, [])
        for submission_id in ids:
            self._reader.forget(submission_id)
            self._service.note_running(submission_id, ())
        return ids


class _Listener:
    """See `event_reader.Listener`."""

    def __init__(self, link: _Link, submission_id: SubmissionId, service: JobService) -> None:
        self._link, self._submission_id, self._service = link, submission_id, service

    def on_job_ended(self, job: JobEnded) -> None:
        """See `Listener`."""
        self._service.note_ended(self._link, job)

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """See `Listener`."""
        self._service.note_running(self._submission_id, running)

    def on_preview(self, made: JobPreview) -> None:
        """See `Listener`."""
        self._service.note_preview(made)

    def on_nodes_ended(self, nodes: tuple[NodesEnded, ...]) -> None:
        """See `Listener`. The nodes that run are part of the progress of a submission, and those before them have
        ended."""

    def on_lost(self, reason: Exception) -> None:
        """See `Listener`."""
        self._link.lost = str(reason)
        self._service.note_lost()


def _note_failure(feed: _Feed, job: JobEnded, kind: RunErrorKind, message: str, text: str) -> None:
    """Remember a failure of the request in `text` where its output would have been written, for reports about the
    place."""
    if job.recipe is None:
        return
    labels = labels_in_text(text)
    failure = FailedOutput.of(job.recipe, labels, job.index, job.job_id, kind.value, message, time.time())
    with suppress(OutputFailed):  # the journal has it, too
        feed.place.note_failures([failure])


def _with_trouble(
    record: SubmissionRecord, journal_trouble: str, held: Mapping[str, tuple[float, str]]
) -> SubmissionRecord:
    """Return a submission with the present reason why nothing of it starts, which a full disk may not have taken."""
    if not record.pending:
        return record
    _, here = held.get(record.submission_id, (0.0, ""))
    return replace(record, trouble=journal_trouble or here or record.trouble)


def _troubles(journal_trouble: str, held: Mapping[str, tuple[float, str]]) -> tuple[str, ...]:
    """Return why detached jobs wait though the pool could run them: the journal, or places of outputs."""
    named = [f"submission {name}: {trouble}" for name, (_, trouble) in held.items()]
    more = [f"{len(named) - MOST_TROUBLES} more submissions wait"] if len(named) > MOST_TROUBLES else []
    return (*filter(None, (journal_trouble,)), *named[:MOST_TROUBLES], *more)


def _opened_feed(record: SubmissionRecord, node_writers: NodeWriters | None) -> _Feed:
    """Open the place of a submission's outputs, and find existing outputs. Raises OutputFailed."""
    place = open_outputs(output_address(record.output))
    name = NameTemplate.of(record.file_name) if record.file_name else None
    jobs: JobFollower[RequestOutcome] = JobFollower()
    jobs.submit(record.request_count)
    kept = place.kept()
    batches = SubmittedBatches(place.batch_sizes(), record.request_count)
    return _Feed(record, place, kept, LEAST_WINDOW, OutputCommitter(place, node_writers), jobs, batches, name)


def window_after(window: int, was_full: bool, in_pool: int, unwritten: int) -> int:
    """Return how many requests of a submission may be in the pool, from how many are there, `unwritten` of which have
    ended: half as many if a quarter of them waits for the disk, twice as many if the pool was given its fill and takes
    more, while hardly any wait.
    """
    if unwritten > window // 4:
        return max(window // 2, LEAST_WINDOW)
    if was_full and in_pool <= window - CHUNK and unwritten <= window // 8:
        return min(2 * window, WINDOW)
    return window


def _without_finished(
    link: _Link, feed: _Feed, usable: Sequence[tuple[int, GenerateRequest]]
) -> tuple[list[tuple[int, GenerateRequest]], list[tuple[RequestOutcome, KeptImage]]]:
    """Split requests into requests to run, and outcomes of requests with a file when the feed began, with these files:
    they were written before the journal knew."""
    images = InputImages(lambda image: None)
    left: list[tuple[int, GenerateRequest]] = []
    ended: list[tuple[RequestOutcome, KeptImage]] = []
    brought = images.bring_each([request for _, request in usable])
    checked = tuple(request for request in brought if not isinstance(request, UserError))
    recipes = iter(link.connection.call(CONTROLLER.recipes, checked, feed.batches))
    for (place, request), one in zip(usable, brought, strict=True):
        recipe = one if isinstance(one, UserError) else next(recipes)
        keys = () if isinstance(recipe, UserError) else output_keys(request, recipe, feed.batches.sizes)
        kept = next((feed.kept[key] for key in keys if key in feed.kept and key not in feed.gone), None)
        if kept is None:
            left.append((place, request))
        else:
            name = feed.record.submission_id
            file, sha256 = file_of(kept.path), kept.pixels_sha256
            ended.append((RequestOutcome(name, place, Outcome.SUCCEEDED, file, kept.file_bytes, sha256), kept))
    return left, ended


def _runs(usable: Sequence[tuple[int, GenerateRequest]]) -> Iterator[list[tuple[int, GenerateRequest]]]:
    """Split by gaps between places."""
    run: list[tuple[int, GenerateRequest]] = []
    for each in usable:
        if run and each[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _failed(name: str, place: int, kind: RunErrorKind, message: str) -> RequestOutcome:
    return RequestOutcome(name, place, Outcome.FAILED, error_kind=kind.value, message=message)
