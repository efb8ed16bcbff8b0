"""`Submissions`: the submissions that came over HTTP, their progress and their ends, for any number of readers.

All state belongs to the event loop; threads of the pool only wake it. A reader is a position in the list of ends: a
slow one keeps nothing, and sees the latest progress and every end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import re
import shutil
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.actors.config.output_address import OutputAddress, output_address
from modelpool.actors.control.detached.records import name_of
from modelpool.actors.graph.features.vision_graph import UNGUIDED
from modelpool.actors.http.service.held_shares import HeldShare, of_the_largest
from modelpool.actors.http.service.node_outlines import NodeOutline, outlines_of
from modelpool.actors.http.service.node_states import NodeState, NodeStates
from modelpool.actors.http.service.ports import HttpDetachedJobs, HttpJobs, HttpPool
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.submission_inputs import INPUTS_FOLDER
from modelpool.actors.outputs.atomic_write import make_private_folder
from modelpool.actors.outputs.results.job_follower import JobFollower
from modelpool.actors.outputs.results.job_ledger import JobLedger
from modelpool.actors.outputs.results.outcomes import JobFailure, OutputResult, PoolLost
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.audio_fields import Sound
from modelpool.actors.request.control_video_fields import Frames
from modelpool.actors.request.image_fields import Pixels
from modelpool.actors.request.labels import NO_LABELS, Labels, labels_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.control.detached.job_service import JobsProgress
    from modelpool.actors.control.detached.records import RequestOutcome
    from modelpool.actors.outputs.results.progress import RunningJob
    from modelpool.actors.worker.wire.messages import NodesEnded, TaskProgress

#: ended jobs that are remembered, over all submissions
MOST_KEPT_JOBS = 200_000
#: ends of tasks of workflows that wait for the readers of a submission
MOST_NODE_ENDS = 4096
#: nodes of forgotten requests that are remembered of a submission
MOST_OUTLINES = 2000
#: how long previews are made for a caller who asked for one, and may ask again
PREVIEW_LEASE_SECONDS = 10.0
#: interval of asking whether previews are still wanted
_PREVIEW_CHECK_SECONDS = 0.5
#: interval of asking for the progress of detached submissions
DETACHED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task of a submission on a worker; steps are 0 before the first one is done. `nodes` are those that it serves,
    see `JobGraph.nodes_of`."""

    index: int
    job_id: str
    stage: str
    worker: str
    step: int
    steps: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    state    "succeeded", "failed" or "cancelled"
    path     of its output; None if it has none, or none that this server can read
    address  URL of an output in a store, which this server does not read; "" otherwise
    kind, message  of its failure
    facts    further JSON values: worker, seconds, hash of the pixels, warnings
    labels   of its request
    """

    index: int
    job_id: str
    state: str
    path: Path | None = None
    address: str = ""
    seed: int | None = None
    kind: str = ""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    labels: Labels = NO_LABELS


def warnings_of(ends: Iterable[JobEnd], tells_unguided: bool = True) -> list[str]:
    """Return the warnings about the outputs of jobs, each once; with `tells_unguided`, also about a negative prompt
    without guidance."""
    found = {text for end in ends for text in end.facts.get("warnings", ())}
    return sorted(text for text in found if tells_unguided or not text.startswith(UNGUIDED))


@dataclass(frozen=True, slots=True)
class Change:
    """What a reader has not seen: ends, in the order in which they came, and the latest progress. `nodes` are ends of
    tasks of workflows, the latest ones if a reader is slow, and only for readers that read before the end."""

    ends: tuple[JobEnd, ...]
    running: tuple[RunningTask, ...]
    held: str
    nodes: tuple[NodesEnded, ...] = ()


class HttpSubmission:
    """One submission. Everything but `cancel` belongs to the event loop."""

    def __init__(
        self,
        submission_id: str,
        owner: str,
        interface: str,
        total: int,
        cancel: Callable[[], object],
        detached: bool,
        want_previews: Callable[[bool], None] | None = None,
        requests: Sequence[GenerateRequest] = (),
        numbers: Iterator[int] | None = None,
        nodes: NodeStates | None = None,
    ) -> None:
        """`want_previews` has previews made from now on, or no more; it may block. None: its follower asks for them, as
        long as `wants_previews`. `requests` is empty if another server took them. `numbers` gives each end one, in the
        order of all ends. `nodes` remembers the states of the nodes of workflows.
        """
        self.id = submission_id
        self.requests = tuple(requests)
        #: prompt and model of requests that are forgotten
        self._texts: tuple[tuple[str, str], ...] = ()
        #: nodes of such requests that have no output
        self._outlines: dict[int, tuple[NodeOutline, ...]] = {}
        self.owner = owner
        self.interface = interface
        self.total = total
        self.detached = detached
        self.created_at = time.time()
        #: the same moment, in monotonic seconds
        self.began_at = time.monotonic()
        self.ends: list[JobEnd] = []
        #: of each of `ends`: its number, and when this server saw it, in seconds since 1970
        self.end_marks: list[tuple[int, float]] = []
        self.running: tuple[RunningTask, ...] = ()
        #: why no more jobs start, or ""
        self.held = ""
        #: why the rest will never end, or ""
        self.lost = ""
        #: the newest previews of running jobs, by index, the latest last
        self.previews: dict[int, ImagePreview] = {}
        #: readers that want previews, and the time of the event loop until when callers do
        self._preview_readers = 0
        self._previews_until = 0.0
        self._wanting: asyncio.Task[None] | None = None
        self._want_previews = want_previews
        #: called after `note` with the number of jobs that have ended since
        self.on_ended: Callable[[HttpSubmission, int], None] = lambda submission, count: None
        self._pixels: HeldShare | None = None
        self._ledger: JobLedger[JobEnd] = JobLedger(_state_of)
        self._follower = JobFollower(self._ledger)
        self._follower.submit(total)
        self._ledger.seal()
        self._by_file: dict[str, JobEnd] = {}
        self._nodes = nodes or NodeStates()
        #: ends of tasks that some reader may not have seen, and how many there were before
        self._node_ends: deque[NodesEnded] = deque(maxlen=MOST_NODE_ENDS)
        self._node_ends_before = 0
        self._readers = 0
        self._numbers = itertools.count() if numbers is None else numbers
        self._cancel = cancel
        self._changed = asyncio.Event()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._follower.is_cancelled

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self._ledger.over or bool(self.lost)

    @property
    def unfinished(self) -> int:
        """Jobs that have not ended."""
        return 0 if self.lost else self._ledger.unended

    @property
    def counts(self) -> Counter[str]:
        """Ended jobs by state."""
        return self._ledger.counts

    def request_of(self, index: int) -> GenerateRequest | None:
        """Return the request of a job; None if it is not known."""
        return self.requests[index] if 0 <= index < len(self.requests) else None

    def texts_of(self, index: int) -> tuple[str, str]:
        """Return prompt and model of a job; "" for both if they are not known."""
        request = self.request_of(index)
        if request is not None:
            return request.prompt, request.model
        return self._texts[index] if 0 <= index < len(self._texts) else ("", "")

    def end_of(self, index: int) -> JobEnd | None:
        """Return the end of a job; None if it has not ended."""
        return self._ledger.end_of(index)

    def end_of_file(self, name: str) -> JobEnd | None:
        """Return the end of the job that has an output with this file name; None if there is none."""
        return self._by_file.get(name)

    def nodes_of(self, index: int) -> Mapping[str, NodeState]:
        """Return the states of the nodes of a job that is a workflow, in the order in which tasks of them ended.
        Nodes of a job without a workflow are here if they failed."""
        return self._nodes.of(self.id, index)

    def outlines_of(self, index: int) -> tuple[NodeOutline, ...]:
        """Return the nodes of a job that is a workflow, as far as they are known without its output; () for others."""
        request = self.request_of(index)
        return self._outlines.get(index, ()) if request is None else outlines_of(request)

    @property
    def titles(self) -> Mapping[str, str]:
        """The titles of nodes that have one."""
        return self._nodes.titles(self.id)

    def name_nodes(self, titles: Mapping[str, str]) -> None:
        """Have titles of nodes remembered."""
        self._nodes.name(self.id, titles)

    def note_nodes(self, ended: Iterable[NodesEnded]) -> None:
        """Take ends of nodes. Call before `note`."""
        for one in ended:
            self._nodes.note(self.id, (one,))
            self._node_ends_before += len(self._node_ends) == MOST_NODE_ENDS
            self._node_ends.append(one)

    def note(self, ends: Sequence[JobEnd], running: tuple[RunningTask, ...], held: str = "", lost: str = "") -> None:
        """Take what happened, and wake the readers."""
        before = self.unfinished
        new = [end for end in ends if self._follower.end(end.index, end)]
        self.ends += new
        at = time.time()
        self.end_marks += ((next(self._numbers), at) for _ in new)
        self._by_file.update((end.path.name, end) for end in new if end.path is not None)
        self.lost = self.lost or shown_message(lost)
        self.running, self.held = (() if self.over else running), shown_message(held)
        if self.over:
            self._release()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.unfinished < before:
            self.on_ended(self, before - self.unfinished)

    def _release(self) -> None:
        """Forget values that are not read any more: requests with decoded images can take much memory."""
        self._cancel = _nothing
        self._want_previews = None
        self._drop_node_ends()
        self.hold(None)
        if any(map(_holds_pixels, self.requests)):
            self._texts = tuple((request.prompt, request.model) for request in self.requests)
            self._outlines = self._outlines_without_output()
            self.requests = ()

    def hold(self, pixels: HeldShare | None) -> None:
        """Keep the decoded pixels of the requests until the submission is over; they take memory, or space on disk."""
        if self._pixels is not None:
            self._pixels.free()
        self._pixels = pixels
        if self.over and pixels is not None:
            pixels.free()

    def _outlines_without_output(self) -> dict[int, tuple[NodeOutline, ...]]:
        """Return the nodes of jobs without an output, which would have them in its recipe: of the first of them."""
        found: dict[int, tuple[NodeOutline, ...]] = {}
        left = MOST_OUTLINES
        for end in self.ends:
            if end.state != "succeeded" and left > 0 and (request := self.request_of(end.index)) is not None:
                found[end.index] = outlines_of(request)
                left -= len(found[end.index]) + 1
        return found

    def note_previews(self, found: Mapping[int, ImagePreview]) -> None:
        """Take the newest previews of the running jobs, and forget all others. Call before `note`."""
        before = self.previews
        # previews of detached jobs are copies at every question; readers recognize a new one by its identity
        old = {index: preview for index, preview in before.items() if found.get(index) == preview}
        self.previews = {**old, **{index: preview for index, preview in found.items() if index not in old}}

    def ask_for_previews(self) -> None:
        """Have previews made for the next seconds. Returns at once."""
        self._previews_until = asyncio.get_running_loop().time() + PREVIEW_LEASE_SECONDS
        if self._want_previews is not None and self._wanting is None and not self.over:
            self._wanting = asyncio.create_task(self._keep_wanting(self._want_previews))

    def wants_previews(self) -> bool:
        """Whether somebody wants previews, and there may be some."""
        now = asyncio.get_running_loop().time()
        return not self.over and (self._preview_readers > 0 or now < self._previews_until)

    @contextlib.contextmanager
    def previews_wanted(self) -> Iterator[None]:
        """Have previews made inside the block."""
        self._preview_readers += 1
        self.ask_for_previews()
        try:
            yield
        finally:
            self._preview_readers -= 1

    async def _keep_wanting(self, want_previews: Callable[[bool], None]) -> None:
        try:
            while self.wants_previews():
                await asyncio.to_thread(want_previews, True)
                while self.wants_previews():
                    await asyncio.sleep(_PREVIEW_CHECK_SECONDS)
                if not self.over:
                    await asyncio.to_thread(want_previews, False)
        except PoolLost:
            return  # the follower tells the readers
        finally:
            self._wanting = None

    async def close(self) -> None:
        """Ask for nothing more."""
        if (wanting := self._wanting) is not None:
            wanting.cancel()
            await asyncio.gather(wanting, return_exceptions=True)

    async def changes(self, after: int = 0) -> AsyncIterator[Change]:
        """Yield what comes after the first `after` ends, until the submission is over."""
        nodes_after = self._node_ends_before
        self._readers += 1
        try:
            while True:
                changed = self._changed
                ends = tuple(self.ends[after:])
                after += len(ends)
                nodes = tuple(itertools.islice(self._node_ends, max(0, nodes_after - self._node_ends_before), None))
                nodes_after = self._node_ends_before + len(self._node_ends)
                yield Change(ends, self.running, self.held, nodes)
                if self.over and after >= len(self.ends):
                    return
                await changed.wait()
        finally:
            self._readers -= 1
            self._drop_node_ends()

    def _drop_node_ends(self) -> None:
        """Forget ends of tasks that nobody will read."""
        if self.over and not self._readers:
            self._node_ends_before += len(self._node_ends)
            self._node_ends.clear()

    async def ended(self) -> None:
        """Wait until the submission is over. Raises HttpProblem (503) if the pool ends first."""
        while not self.over:
            await self._changed.wait()
        if self.lost:
            raise HttpProblem(503, self.lost)

    async def cancel(self) -> None:
        """Cancel what has not ended."""
        self._follower.cancel()
        await asyncio.to_thread(self._cancel)


def _state_of(end: JobEnd) -> str:
    return end.state


def _nothing() -> None:
    """Cancel a submission that is over."""


def _holds_pixels(value: object) -> bool:
    """Whether a request, or a part of one, has a decoded image or video in any field."""
    match value:
        case Pixels() | Frames() | Sound():
            return True
        case Strict():
            return any(map(_holds_pixels, vars(value).values()))
        case tuple() | list():
            return any(map(_holds_pixels, value))
        case dict():
            return any(map(_holds_pixels, value.values()))
    return False


class Submissions:
    """The submissions of one server. Belongs to one event loop."""

    def __init__(self, pool: HttpPool, folder: Path, kept: int) -> None:
        """Outputs are written to `folder`; `kept` ended submissions are remembered."""
        self._pool = pool
        self._folder = folder
        self._kept = kept
        #: oldest first
        self._known: OrderedDict[str, HttpSubmission] = OrderedDict()
        #: submissions that are over, by owner, in the order in which they ended, with their numbers
        self._ended: dict[str, deque[HttpSubmission]] = {}
        self._ended_submissions: Counter[str] = Counter()
        self._ended_jobs: Counter[str] = Counter()
        #: jobs that have not ended, by owner
        self._unfinished: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._end_numbers = itertools.count()
        self._nodes = NodeStates()

    async def submit(self, requests: Sequence[GenerateRequest], owner: str, interface: str) -> HttpSubmission:
        """Queue requests in the pool. Raises UserError, and PoolLost."""
        user = owner or None
        folder = owner_folder(self._folder, owner)

        def submitted() -> HttpJobs:
            with contextlib.suppress(OSError):  # the pool names the problem with the folder
                make_private_folder(folder)
            return self._pool.submit(list(requests), output=folder, user=user)

        jobs = await asyncio.to_thread(submitted)
        submission = HttpSubmission(
            jobs.id,
            owner,
            interface,
            len(requests),
            jobs.cancel,
            False,
            partial(_want_previews, jobs),
            requests=requests,
            numbers=self._end_numbers,
            nodes=self._nodes,
        )
        reader = _Reader(submission, jobs, asyncio.get_running_loop(), self._start)
        self._add(submission)
        jobs.watch(reader.wake)
        reader.read()
        return submission

    async def submit_detached(
        self, requests: Sequence[GenerateRequest], owner: str, interface: str, submission_id: str
    ) -> HttpSubmission:
        """Hand requests over to the pool's journal, under an id: again under the same id returns the same submission.
        Raises UserError, and PoolLost.
        """
        folder = owner_folder(self._folder, owner)

        def submitted() -> HttpDetachedJobs:
            with contextlib.suppress(OSError):  # the pool names the problem with the folder
                make_private_folder(folder)
            return self._pool.submit_detached(list(requests), output=folder, jobs_id=submission_id, user=owner or None)

        jobs = await asyncio.to_thread(submitted)
        submission = await self._adopt(jobs, owner, interface, requests)
        if submission.over and submission.counts["succeeded"] == submission.total:
            self._remove_inputs(submission)  # it was sent again
        return submission

    async def find(self, submission_id: str, owner: str) -> HttpSubmission:
        """Return a submission of `owner`, also a detached one of an earlier server. Raises HttpProblem (404), and
        PoolLost where only the pool can tell."""
        known = self._known.get(submission_id)
        if known is not None and known.owner == owner:
            return known
        if known is None:
            try:
                jobs = await asyncio.to_thread(self._pool.attach, submission_id)
                record = (await asyncio.to_thread(jobs.progress)).record
            except UserError:
                pass
            else:
                if record.submission_id == submission_id and (not owner or record.user == owner):
                    return await self._adopt(jobs, owner, "native")
        raise HttpProblem(404, f"submission {submission_id!r} is unknown")

    def of(self, owner: str, interface: str | None = None) -> list[HttpSubmission]:
        """Return the submissions of `owner`, of one interface or all, oldest first."""
        return [each for each in self._known.values() if each.owner == owner and interface in (None, each.interface)]

    def has_job(self, owner: str, job_id: str) -> bool:
        """Whether a job, by its id in the pool, is of a submission of `owner` that is remembered."""
        submission_id = job_id.rpartition("-")[0]
        known = self._known.get(submission_id) or self._known.get(name_of(submission_id))
        return known is not None and known.owner == owner

    def unfinished(self, owner: str) -> int:
        """Return how many jobs of `owner` have not ended."""
        return self._unfinished[owner]

    async def close(self) -> None:
        """Stop following. The pool's owner decides what becomes of the jobs."""
        for submission in tuple(self._known.values()):
            await submission.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _adopt(
        self, jobs: HttpDetachedJobs, owner: str, interface: str, requests: Sequence[GenerateRequest] = ()
    ) -> HttpSubmission:
        if (known := self._known.get(jobs.id)) is not None:
            return known
        progress = await asyncio.to_thread(jobs.progress)
        total = progress.record.request_count
        submission = HttpSubmission(
            jobs.id,
            owner,
            interface,
            total,
            jobs.cancel,
            True,
            requests=requests,
            numbers=self._end_numbers,
            nodes=self._nodes,
        )
        submission.created_at = progress.record.created_at
        if (known := self._known.get(jobs.id)) is not None:  # another call was faster
            return known
        self._add(submission)
        if progress.record.pending < total:
            with contextlib.suppress(UserError, PoolLost):  # followed below
                _note_outcomes(submission, progress, await asyncio.to_thread(lambda: list(jobs.outcomes())))
        self._start(_follow_detached(submission, jobs))
        return submission

    def _add(self, submission: HttpSubmission) -> None:
        submission.on_ended = self._note_ended
        self._known[submission.id] = submission
        self._unfinished[submission.owner] += submission.unfinished

    def _note_ended(self, submission: HttpSubmission, count: int) -> None:
        """Count ended jobs, and forget submissions: the first that ended, of the owner who has most. Images that nobody
        retries are removed."""
        self._unfinished[submission.owner] -= count
        if not self._unfinished[submission.owner]:
            del self._unfinished[submission.owner]
        if not submission.over:
            return
        if submission.counts["succeeded"] == submission.total:
            self._remove_inputs(submission)
        self._ended.setdefault(submission.owner, deque()).append(submission)
        self._ended_submissions[submission.owner] += 1
        self._ended_jobs[submission.owner] += len(submission.ends)
        while self._ended_submissions.total() > self._kept:
            self._forget_oldest(of_the_largest(self._ended_submissions))
        while self._ended_jobs.total() > MOST_KEPT_JOBS:
            self._forget_oldest(of_the_largest(self._ended_jobs))

    def _forget_oldest(self, owner: str) -> None:
        oldest = self._ended[owner].popleft()
        self._ended_submissions[owner] -= 1
        self._ended_jobs[owner] -= len(oldest.ends)
        del self._known[oldest.id]
        if not self._ended[owner]:
            del self._ended[owner], self._ended_submissions[owner], self._ended_jobs[owner]
        self._remove_inputs(oldest)

    def _remove_inputs(self, submission: HttpSubmission) -> None:
        """Remove the images that the requests of a detached submission have on disk."""
        if submission.detached and Path(submission.id).name == submission.id:
            self._start(_removed(self._folder / INPUTS_FOLDER / submission.id))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def owner_folder(folder: Path, owner: str) -> Path:
    """Return the folder of an owner's outputs: equal work of two users has a file each, with the metadata of its own
    request. `folder` itself without keys."""
    if not owner:
        return folder
    name = re.sub(r"[^A-Za-z0-9_-]", "_", owner)[:40]
    return folder / "users" / f"{name}-{hashlib.sha256(owner.encode()).hexdigest()[:8]}"


async def _removed(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Reader:
    """Reads the results of a submission on the loop whenever the pool has changed something."""

    def __init__(
        self,
        submission: HttpSubmission,
        jobs: HttpJobs,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._submission = submission
        self._jobs = jobs
        self._loop = loop
        self._start = start
        self._reading = False
        self._again = False

    def wake(self) -> None:
        """Have the loop read. Any thread; does not block."""
        try:
            self._loop.call_soon_threadsafe(self.read)
        except RuntimeError:
            return  # the loop has ended, and with it all readers

    def read(self) -> None:
        """Read the ready results; during a read, once more afterwards."""
        if self._reading:
            self._again = True
            return
        self._reading = True
        self._start(self._read())

    async def _read(self) -> None:
        try:
            while not self._submission.over:
                self._again = False
                ends: list[JobEnd] = []
                if self._jobs.progress().ended > len(self._submission.ends):
                    ends = await asyncio.to_thread(lambda: [_end_of(each) for each in self._jobs.ready_results()])
                # no other code of the loop runs from here on: what runs is never older than what has ended
                self._submission.note_nodes(self._jobs.take_nodes())
                progress = self._jobs.progress()
                running = tuple(map(_running_task, progress.running))
                found = {task.index: self._jobs.preview(task.index) for task in running}
                self._submission.note_previews({i: preview for i, preview in found.items() if preview is not None})
                lost = self._jobs.lost()
                self._submission.note(ends, running, progress.held, "" if lost is None else str(lost))
                if not self._again:
                    return
        except (UserError, PoolLost, OSError) as problem:  # a result that can be neither read nor generated again
            self._submission.note((), (), "", str(problem))
        finally:
            self._reading = False


def _want_previews(jobs: HttpJobs, wanted: bool) -> None:
    if wanted:
        jobs.want_previews()
    else:
        jobs.want_previews(None)


async def _follow_detached(submission: HttpSubmission, jobs: HttpDetachedJobs) -> None:
    """Ask for progress until the submission has ended. A service that restarts is asked again."""
    while True:
        began = time.monotonic()
        try:
            now = await asyncio.to_thread(jobs.progress)
            if submission.wants_previews():
                found = await asyncio.to_thread(jobs.previews)
                submission.note_previews({preview.index: preview for preview in found})
            else:
                submission.note_previews({})
            record = now.record
            outcomes: list[RequestOutcome] = []
            if record.request_count - record.pending > len(submission.ends):
                outcomes = await asyncio.to_thread(lambda: list(jobs.outcomes()))
            _note_outcomes(submission, now, outcomes)
        except PoolLost as lost:
            submission.note((), (), str(lost))
        except UserError as removed:
            submission.note((), (), "", str(removed))
        if submission.over:
            return
        # outcomes of long submissions take longer to read
        await asyncio.sleep(max(DETACHED_SECONDS, 5 * (time.monotonic() - began)))


def _note_outcomes(submission: HttpSubmission, now: JobsProgress, outcomes: Sequence[RequestOutcome]) -> None:
    place = output_address(now.record.output)
    ends = [_end_of_outcome(outcome, place) for outcome in outcomes]
    submission.note(ends, _running_tasks(now), now.waiting_for or now.record.trouble)


def _running_tasks(now: JobsProgress) -> tuple[RunningTask, ...]:
    return tuple(map(_running_task, now.running))


def _running_task(task: RunningJob | TaskProgress) -> RunningTask:
    return RunningTask(task.index, task.job_id, task.stage.value, task.worker, task.step, task.steps, task.nodes)


def _end_of(result: OutputResult | JobFailure) -> JobEnd:
    if isinstance(result, JobFailure):
        state = "cancelled" if result.cancelled else "failed"
        seed = None if result.request is None else result.request.seed
        kind, message = result.kind.value, shown_message(result.message)
        labels = NO_LABELS if result.request is None else labels_of(result.request)
        return JobEnd(result.index, result.job_id, state, seed=seed, kind=kind, message=message, labels=labels)
    facts = {
        "worker": result.worker,
        "seconds": round(result.seconds, 4),
        "sha256": result.pixels_sha256,
        "warnings": [shown_message(each) for each in result.recipe.warnings],
    }
    labels = labels_of(result.request)
    return JobEnd(result.index, result.job_id, "succeeded", result.path, seed=result.seed, facts=facts, labels=labels)


def _end_of_outcome(outcome: RequestOutcome, place: OutputAddress) -> JobEnd:
    """Return the end of a job with an output at `place`, where its submission has its outputs."""
    path = place / outcome.file if outcome.file and isinstance(place, Path) else None
    address = f"{place}/{outcome.file}" if outcome.file and not isinstance(place, Path) else ""
    facts = {"sha256": outcome.pixels_sha256} if outcome.file else {}
    job_id = f"{outcome.submission_id}-{outcome.place}"
    state = outcome.outcome.value
    kind, message = outcome.error_kind, shown_message(outcome.message)
    return JobEnd(
        outcome.place, job_id, state, path, address, kind=kind, message=message, facts=facts, labels=outcome.labels
    )
