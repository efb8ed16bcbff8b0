"""`ResultQueue`: outputs and failures on their way to the program: each is returned once, and some can be read again.

Results stay references until they are returned, but for small ones, some KiB each: a batch of any size takes little
more than the memory of the images that the program keeps. The object store keeps an image until it is written, or
returned if it is not.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from modelpool.actors.client.job_ends import JobEnds
from modelpool.actors.client.kept_previews import KeptPreviews
from modelpool.actors.client.monitor import Monitor
from modelpool.actors.config.output_address import file_of
from modelpool.actors.control.connection import Connection, ResultGone
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.file_content import is_lossless, read_content, read_sound, samples_per_second
from modelpool.actors.outputs.place import OutputPlace, WrittenOutput
from modelpool.actors.outputs.results.job_ledger import EndState
from modelpool.actors.outputs.results.outcomes import (
    AudioResult,
    ImageResult,
    JobFailure,
    OutputResult,
    VideoResult,
    sampled_by,
    unshared_seconds,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import JobEnded
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import AudioSamples, ImagePixels, VideoFrames

#: ends of written outputs and failures that can be returned again
MOST_RETURNED = 1000
#: written videos and audio clips that the object store keeps until they are returned: files do not keep them exactly
MOST_KEPT_BYTES = 1 << 30


@dataclass(slots=True)
class ReadyOutput:
    """An output that is ready to be returned. The `result` of `job` is None once its file is enough."""

    job: JobEnded
    written: WrittenOutput | None
    #: where it was written
    place: OutputPlace | None = None


#: an end that waits for the program; an output if it was on its way there
End: TypeAlias = ReadyOutput | JobFailure | OutputResult


class ResultQueue:
    """The ends of the jobs of one submission that the program has not got, in the order in which they came."""

    def __init__(
        self,
        monitor: Monitor,
        ends: JobEnds,
        previews: KeptPreviews,
        requests: Sequence[GenerateRequest],
        connection: Connection,
        on_lost: Callable[[JobEnded, ResultGone], JobFailure | None],
    ) -> None:
        """`on_lost` has an output generated again that was lost with its node, or returns its failure."""
        self._monitor = monitor
        self._ends = ends
        self._previews = previews
        self._requests = requests
        self._connection = connection
        self._on_lost = on_lost
        self._waiting: deque[End] = deque()
        #: jobs with ends on their way from there to the program
        self._taking: set[int] = set()
        #: written outputs that the object store still keeps, oldest first, and their size
        self._kept: deque[ReadyOutput] = deque()
        self._kept_bytes = 0
        #: ends that were returned and can be returned again, the latest `MOST_RETURNED`; and results that the program
        #: still has
        self._returned: OrderedDict[int, End] = OrderedDict()
        self._in_use: WeakValueDictionary[int, OutputResult] = WeakValueDictionary()

    def put(self, end: ReadyOutput | JobFailure) -> None:
        """Add an end. Requires the lock."""
        self._waiting.append(end)

    def written(self, job: JobEnded, written: WrittenOutput, place: OutputPlace) -> ReadyOutput:
        """Return a written output. Releases its result: at once if the file has the same pixels, otherwise when there
        are too many of them.
        """
        if is_lossless(Path(file_of(written.path))):
            return ReadyOutput(replace(job, result=None), written, place)
        ready = ReadyOutput(job, written, place)
        with self._monitor:
            self._kept.append(ready)
            self._kept_bytes += written.array_bytes
            while self._kept_bytes > MOST_KEPT_BYTES:
                oldest = self._kept.popleft()
                assert oldest.written is not None, "only written outputs are kept"
                oldest.job = replace(oldest.job, result=None)
                self._kept_bytes -= oldest.written.array_bytes
        return ready

    def results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over all outputs as they finish, each once, including jobs that failed or were cancelled."""
        while (waiting := self._take()) is not None:
            if (result := self._result_of(waiting)) is not None:
                yield result

    def ready_results(self) -> Iterator[OutputResult | JobFailure]:
        """Iterate over the results that exist now, each once, as `results` does; never waits for a job to end."""
        while (waiting := self._take_ready()) is not None:
            if (result := self._result_of(waiting)) is not None:
                yield result

    def next_result(self) -> OutputResult | JobFailure | None:
        """Return the next result that exists now, as `ready_results`; None if there is none."""
        return next(self.ready_results(), None)

    @property
    def is_exhausted(self) -> bool:
        """Whether every job has ended and was returned, and nothing went wrong."""
        with self._monitor:
            return self._ends.is_over and not self._waiting and self._ends.problem is None

    def put_back(self, end: End) -> None:
        """Take back a result that did not reach the program: it is the next one."""
        with self._monitor:
            self._in_use.pop(index_of(end), None)
            self._waiting.appendleft(end)
            self._taking.discard(index_of(end))
            self._monitor.notify()

    def result_at(self, index: int, timeout: float | None = None) -> OutputResult | JobFailure:
        """Wait for the end of one job and return it; iterators do not return it any more. Raises TimeoutError,
        PoolLost, and UserError if it was returned before, is not written and was not kept.
        """
        return self.take_at(index, timeout)[0]

    def take_at(self, index: int, timeout: float | None = None) -> tuple[OutputResult | JobFailure, bool]:
        """As `result_at`; also return whether it was not returned before, and so can be taken back."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ends = self._ends
        while True:
            with self._monitor:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._monitor.wait_until(
                    lambda: index not in self._taking and (ends.ledger.has_ended(index) or ends.stopped), left
                ):
                    raise TimeoutError(f"job {index} has not ended after {timeout} s")
                if not ends.ledger.has_ended(index):
                    raise ends.stream_problem or ends.lost or UserError(f"request {index} was not queued")
                if (known := self._in_use.get(index)) is not None:
                    return known, False
                waiting = next((end for end in self._waiting if index_of(end) == index), None)
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

    def _take(self) -> End | None:
        """Wait for the next end and return it; None if there are no more. Raises if the event stream ended before."""
        with self._monitor:
            self._monitor.wait_until(lambda: self._waiting or self._ends.stopped)
            if not self._waiting and self._ends.problem is not None:
                raise self._ends.problem
            return self._take_ready()

    def _take_ready(self) -> End | None:
        """Take the next end that exists now; None if there is none."""
        with self._monitor:
            if not self._waiting:
                return None
            waiting = self._waiting.popleft()
            self._taking.add(index_of(waiting))
            return waiting

    def _result_of(self, waiting: End, is_new: bool = True) -> OutputResult | JobFailure | None:
        """Return an end that was taken to the program; None if its output was lost and is generated again. One that
        `is_new` is put back if it cannot be returned.
        """
        try:
            result = self._delivered(waiting) if isinstance(waiting, ReadyOutput) else waiting
        except BaseException:
            if is_new:
                self.put_back(waiting)
            raise
        with self._monitor:
            index = index_of(waiting)
            if isinstance(result, OutputResult):
                self._in_use[index] = result
            if isinstance(waiting, JobFailure):
                self._returned[index] = waiting
            elif isinstance(waiting, ReadyOutput) and waiting.written is not None:
                self._returned[index] = replace(waiting, job=replace(waiting.job, result=None))
            while len(self._returned) > MOST_RETURNED:
                self._returned.popitem(last=False)
            if is_new:
                self._taking.discard(index)
                self._monitor.wake()
        return result

    def _delivered(self, finished: ReadyOutput) -> OutputResult | JobFailure | None:
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
            "previews": self._previews.take(job.index),
        }
        output: Any = None
        if job.result is not None:
            self._forget_kept(finished)
            try:
                output = self._connection.fetch(job.result)
            except ResultGone as gone:
                if written is None:
                    return self._on_lost(job, gone)
        if output is None:
            assert written is not None, "an output that is not written is fetched"
            assert finished.place is not None, "an output that is written has a place"
            return _result_in_file(job.recipe, finished.place, file_of(written.path), about)
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

    def _forget_kept(self, finished: ReadyOutput) -> None:
        with self._monitor:
            if finished.written is not None and any(ready is finished for ready in self._kept):
                self._kept = deque(ready for ready in self._kept if ready is not finished)
                self._kept_bytes -= finished.written.array_bytes


def index_of(end: End) -> int:
    """Return the index of a job."""
    return end.job.index if isinstance(end, ReadyOutput) else end.index


def state_of(end: ReadyOutput | JobFailure) -> EndState:
    """Return how a job has ended."""
    if isinstance(end, JobFailure):
        return "cancelled" if end.cancelled else "failed"
    return "succeeded"


def _itself(value: Any) -> Any:
    return value


def _content_of(place: OutputPlace, file: str) -> Any:
    with place.local_file(file) as path:
        return read_content(path)


def _sound_of(place: OutputPlace, file: str) -> AudioSamples | None:
    with place.local_file(file) as path:
        return read_sound(path)


def _result_in_file(recipe: Recipe, place: OutputPlace, file: str, about: dict[str, Any]) -> OutputResult:
    """Return a written result that reads its pixels from its file."""
    content = partial(_content_of, place, file)
    if recipe.frames:
        track = partial(_sound_of, place, file)
        return VideoResult(content=content, frame_rate=recipe.frame_rate, track=track, **about)
    if recipe.seconds:
        with place.local_file(file) as path:
            return AudioResult(content=content, samples_per_second=samples_per_second(path), **about)
    return ImageResult(content=content, **about)
