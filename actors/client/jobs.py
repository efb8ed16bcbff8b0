"""`Jobs` and `JobHandle`: one submission and one of its jobs. Iterate over the outputs, wait, watch, and cancel, from
any thread or from asyncio.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from html import escape
from typing import Any, TypeVar, overload

from modelpool.actors.client.followed_jobs import FollowedJobs
from modelpool.actors.outputs.results.outcomes import (
    AudioResult,
    ImageResult,
    JobFailed,
    JobFailure,
    OutputResult,
    Summary,
    VideoResult,
)
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.results.progress import Progress
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import NodesEnded, SubmissionId, job_id_for
from modelpool.pool.values.core.errors import UserError, counted, unusable_field
from modelpool.pool.values.core.previews import INTERVAL_SECONDS
from modelpool.pool.values.specs.spec import JobId

Kind = TypeVar("Kind", bound=OutputResult)
Fetched = TypeVar("Fetched")

#: interval of drawing in a notebook
_DRAW_SECONDS = 0.5


class JobHandle:
    """One job of a submission: `jobs[3]`. `await job` returns its output, as `result`."""

    def __init__(self, followed: FollowedJobs, position: int) -> None:
        self._followed = followed
        self._position = position

    @property
    def index(self) -> int:
        """The position of its request in the call of `submit`, from 0."""
        return self._position

    @property
    def id(self) -> JobId:
        """The id of the job, which `ModelPool.history` accepts."""
        return job_id_for(self._followed.id, self._position)

    @property
    def request(self) -> GenerateRequest:
        """As submitted, with the seed that is used."""
        return self._followed.request_at(self._position)

    @property
    def state(self) -> str:
        """One of waiting, running, succeeded, failed and cancelled."""
        return self._followed.state_at(self._position)[0]

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self.state not in ("waiting", "running")

    def cancel(self) -> None:
        """Cancel the job, unless it has ended; other jobs go on. If it runs, it stops at its next step, unless other
        jobs need the same task. Returns at once. Idempotent.
        """
        self._followed.cancel_job(self._position)

    def result(self, timeout: float | None = None) -> OutputResult:
        """Wait for the output and return it. The iterators of `Jobs` do not return it any more.

        Raises JobFailed if there is none, TimeoutError, PoolLost, and UserError if it was returned before, is not
        written and was not kept.
        """
        _check_timeout(timeout)
        return _output(self._followed.outputs.result_at(self._position, timeout))

    def __await__(self) -> Generator[Any, None, OutputResult]:
        return self._awaited().__await__()

    def __repr__(self) -> str:
        state, running = self._followed.state_at(self._position)
        if running is not None:
            state = f"{running.stage.value} on {running.worker}, step {running.step} of {running.steps}"
        return f"<Job {self.id}: {state}>"

    async def _awaited(self) -> OutputResult:
        async with _Changes(self._followed) as changes:
            while not (self.done() or self._followed.ends.is_over or self._followed.lost() is not None):
                await changes.next()
        taken = await _in_thread(partial(self._followed.outputs.take_at, self._position), self._give_back)
        return _output(taken[0])

    def _give_back(self, taken: tuple[OutputResult | JobFailure, bool]) -> None:
        result, is_new = taken
        if is_new:
            self._followed.outputs.put_back(result)


class Jobs:
    """The jobs of one `ModelPool.submit` call.

    for image in jobs         the images as they finish, each once; `async for` does the same in asyncio
    await jobs                all images that were not returned before, in the order of the requests
    jobs[3]                   one job, by the position of its request; a slice is a tuple of jobs
    len(jobs)                 the number of jobs submitted so far

    After the last image, the first two raise JobFailed if a job failed, and so does the third; `images` does not.
    """

    def __init__(self, followed: FollowedJobs) -> None:
        """Called by `ModelPool.submit`."""
        self._followed = followed

    @property
    def id(self) -> SubmissionId:
        """The id of the submission."""
        return self._followed.id

    def __len__(self) -> int:
        return self._followed.request_count

    def __bool__(self) -> bool:
        """Whether there is a submission: always, also without jobs."""
        return True

    @overload
    def __getitem__(self, position: int) -> JobHandle: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[JobHandle, ...]: ...
    def __getitem__(self, position: int | slice) -> JobHandle | tuple[JobHandle, ...]:
        count = len(self)
        if not isinstance(position, (int, slice)):
            raise TypeError(f"jobs[{position!r}]: expected a position, or a slice of positions")
        if isinstance(position, slice):
            return tuple(JobHandle(self._followed, place) for place in range(*position.indices(count)))
        if not -count <= position < count:
            raise IndexError(f"jobs[{position}]: the submission has {counted(count, 'job')}")
        return JobHandle(self._followed, position % count)

    def __iter__(self) -> Iterator[ImageResult]:
        for result in self.results():
            if isinstance(result, OutputResult):
                yield image_of(result)
        _raise_failure(self.failures)

    async def __aiter__(self) -> AsyncIterator[ImageResult]:
        async for result in self._results_async():
            if isinstance(result, OutputResult):
                yield image_of(result)
        _raise_failure(self.failures)

    def __await__(self) -> Generator[Any, None, list[ImageResult]]:
        return self._awaited().__await__()

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
        return self._followed.outputs.results()

    def ready_results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over the results that exist now, each once, as `results` does; never waits for a job to end."""
        return self._followed.outputs.ready_results()

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until every job has ended; results can still be iterated. Raises TimeoutError, PoolLost, or why not all
        requests of a stream could be taken.
        """
        _check_timeout(timeout)
        return self._followed.ends.wait(timeout)

    def cancel(self) -> None:
        """Cancel all unfinished jobs; running ones stop at their next step. Returns at once. Idempotent."""
        self._followed.cancel()

    def progress(self) -> Progress:
        """Return the current progress."""
        return self._followed.progress()

    def want_previews(self, interval_seconds: float | None = INTERVAL_SECONDS) -> None:
        """Have previews made of the images that are sampled from now on, at most one of each image in this time; None:
        no more. The first preview of an image that is being sampled already may need another image first. Returns at
        once. Raises PoolLost.
        """
        self._followed.want_previews(interval_seconds)

    def preview(self, index: int) -> ImagePreview | None:
        """Return the newest preview of the output at `index`; None if there is none, or if that was returned."""
        return self._followed.previews.newest(index)

    def take_nodes(self) -> tuple[NodesEnded, ...]:
        """Return the nodes of workflows that have ended, and the failures of tasks, that were not returned before; of
        many, the latest. The end of a job ends all its nodes."""
        return self._followed.take_nodes()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of the progress, in a thread of the pool. It must not block, nor call
        methods of this object.
        """
        self._followed.monitor.watch(changed)

    def lost(self) -> Exception | None:
        """Return why no more jobs will end, although some have not, or why not all requests of a stream could be taken;
        None while they do.
        """
        return self._followed.lost()

    @property
    def failures(self) -> tuple[JobFailure, ...]:
        """The jobs that failed so far, without cancelled ones."""
        return self._followed.ends.failures

    def summary(self) -> Summary:
        """Return the totals so far."""
        return self._followed.ends.summary()

    def __repr__(self) -> str:
        return f"<Jobs {self.id}: {_counts(self.progress())}>"

    def _repr_html_(self) -> str:
        """A progress bar, for notebooks."""
        now = self.progress()
        held = f"<br>{escape(now.held)}" if now.held else ""
        return (
            f'<div><progress value="{now.ended}" max="{max(now.total, 1)}"></progress> '
            f"{escape(_counts(now))}{held}</div>"
        )

    def _ipython_display_(self) -> None:
        """Draw the progress bar in a notebook, and keep it up to date until all jobs have ended."""
        from IPython import display  # only IPython calls this

        class Bar:
            """The bar as drawn now."""

            def __init__(self, html: str, text: str) -> None:
                self._html, self._text = html, text

            def _repr_html_(self) -> str:
                return self._html

            def __repr__(self) -> str:
                return self._text

        handle = display.display(Bar(self._repr_html_(), repr(self)), display_id=True)

        def draw() -> None:
            with _Awake(self._followed) as changed:
                is_over = False
                while not is_over:
                    changed.wait(_DRAW_SECONDS)
                    changed.clear()
                    is_over = self._followed.ends.is_over or self.lost() is not None
                    handle.update(Bar(self._repr_html_(), repr(self)))

        if handle is not None and not self._followed.ends.is_over:
            threading.Thread(target=draw, name="draw progress", daemon=True).start()

    def _of_kind(self, kind: type[Kind]) -> Iterator[Kind]:
        for result in self.results():
            if isinstance(result, kind):
                yield result

    async def _awaited(self) -> list[ImageResult]:
        found: list[ImageResult] = []
        try:
            async for each in self:
                found.append(each)  # noqa: PERF401  # what was found before an exception is kept
        except BaseException:  # also a cancellation: the program has not got any of them
            for each in reversed(found):
                self._followed.outputs.put_back(each)
            raise
        return sorted(found, key=lambda image: image.index)

    async def _results_async(self) -> AsyncIterator[OutputResult | JobFailure]:
        async with _Changes(self._followed) as changes:
            while True:
                lost = self._followed.lost()  # first: what ends meanwhile is read below
                result = await _in_thread(self._followed.outputs.next_result, self._give_back)
                if result is not None:
                    yield result
                elif lost is not None:
                    raise lost
                elif self._followed.outputs.is_exhausted:  # now: a lost output may be generated again
                    return
                else:
                    await changes.next()

    def _give_back(self, result: OutputResult | JobFailure | None) -> None:
        if result is not None:
            self._followed.outputs.put_back(result)


class _Changes:
    """Wakes a coroutine after changes of a submission, within a block."""

    def __init__(self, followed: FollowedJobs) -> None:
        self._followed = followed
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def next(self) -> None:
        """Wait for a change since the last call, or since the beginning of the block."""
        await self._changed.wait()
        self._changed.clear()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            return  # the loop has ended

    async def __aenter__(self) -> _Changes:
        self._followed.monitor.watch(self._wake)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._followed.monitor.unwatch(self._wake)


class _Awake:
    """An event that is set after changes of a submission, within a block."""

    def __init__(self, followed: FollowedJobs) -> None:
        self._followed = followed
        self._event = threading.Event()

    def __enter__(self) -> threading.Event:
        self._followed.monitor.watch(self._event.set)
        return self._event

    def __exit__(self, *error: object) -> None:
        self._followed.monitor.unwatch(self._event.set)


async def _in_thread(fetch: Callable[[], Fetched], give_back: Callable[[Fetched], None]) -> Fetched:
    """Return what `fetch` returns, called in a thread. If the caller is cancelled meanwhile, it is given back."""
    lock = threading.Lock()
    is_given_up = False
    fetched: list[Fetched] = []

    def call() -> Fetched:
        result = fetch()
        with lock:
            if not is_given_up:
                fetched.append(result)
                return result
        give_back(result)
        return result

    try:
        return await asyncio.to_thread(call)
    except BaseException:
        with lock:
            is_given_up = True
        for each in fetched:
            give_back(each)
        raise


def image_of(result: OutputResult) -> ImageResult:
    """Return an output as an image. Raises UserError for another one."""
    if isinstance(result, ImageResult):
        return result
    kind = "videos" if isinstance(result, VideoResult) else "audios"
    raise UserError(f"job {result.index} is no image; iterate over jobs.{kind}(), or over jobs.results()")


def _output(result: OutputResult | JobFailure) -> OutputResult:
    if isinstance(result, JobFailure):
        raise JobFailed(result)
    return result


def _raise_failure(failures: tuple[JobFailure, ...]) -> None:
    if failures:
        raise JobFailed(failures[0], len(failures) - 1)


def _counts(now: Progress) -> str:
    """Return '12 of 50 done, 1 failed, 4 running'."""
    parts = [f"{now.done} of {now.total} done"]
    parts += [f"{now.failed} failed"] if now.failed else []
    parts += [f"{now.cancelled} cancelled"] if now.cancelled else []
    parts += [f"{len(now.running)} running"] if now.running else []
    return ", ".join(parts)


def _check_timeout(timeout: object) -> None:
    """Raise UnusableField unless it is a time; None waits without end."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise unusable_field("timeout", timeout, "seconds, or None")
