"""`DetachedJobs`: a submission that runs without its driver, and `submit_detached`, which hands one over."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

from modelpool.actors.config.output_address import OutputAddress, absolute_address
from modelpool.actors.control.detached.job_service import LONGEST_WAIT_SECONDS, JobsConnection, JobService, JobsProgress
from modelpool.actors.control.detached.records import (
    NewSubmission,
    RequestOutcome,
    SubmissionRecord,
    SubmissionState,
    kind_of,
    request_text,
)
from modelpool.actors.control.detached.submission_journal import BeingReceived, require_same
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.layout import OutputLayout
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnknownName, UserError, counted, unusable_field

#: requests in one call, and in the first one, after which the place of the outputs is checked
CHUNK, FIRST_CHUNK = 1000, 64
#: how often a submission is handed over if the job service is restarted meanwhile
MOST_TRIES = 5
#: interval of asking whether another driver has handed over a submission
FOLLOW_SECONDS = 0.5

Check: TypeAlias = Callable[[Sequence[GenerateRequest]], Sequence[Recipe | UserError]]


class DetachedJobs:
    """The jobs of one submission. They run, and their outputs are written, whether or not this object exists."""

    def __init__(self, connection: JobsConnection, submission_id: str) -> None:
        self._connection = connection
        self.id = submission_id

    def progress(self) -> JobsProgress:
        """Return the current progress. Raises UnknownName if the submission was removed."""
        return self._connection.call(JobService.progress, self.id)

    def wait(self, timeout: float | None = None) -> SubmissionRecord:
        """Wait until every job has ended, or for `timeout` seconds; return the counts. Raises TimeoutError."""
        left_seconds = float("inf") if timeout is None else timeout
        while True:
            record = self._connection.call(JobService.wait, self.id, min(left_seconds, LONGEST_WAIT_SECONDS))
            if record.state is SubmissionState.ENDED:
                return record
            left_seconds -= LONGEST_WAIT_SECONDS
            if left_seconds <= 0:
                raise TimeoutError(
                    f"submission {self.id}: {record.pending} of {counted(record.request_count, 'job')} pending"
                )

    def previews(self) -> tuple[ImagePreview, ...]:
        """Return the newest preview of each job that is being sampled, the latest last, and have some made for the next
        10 s: call it repeatedly. Raises UnknownName if the submission was removed.
        """
        return self._connection.call(JobService.previews, self.id)

    def outcomes(self) -> Iterator[RequestOutcome]:
        """Yield the outcomes so far, in order of submission: the file of each output, or why there is none."""
        after_place = -1
        while found := self._connection.call(JobService.outcomes, self.id, after_place):
            yield from found
            after_place = found[-1].place

    def cancel(self) -> SubmissionRecord:
        """Cancel what has no outcome. Outputs that exist stay."""
        return self._connection.call(JobService.cancel, self.id)

    def remove(self) -> None:
        """Have the pool forget the submission, which must have ended. Outputs stay."""
        self._connection.call(JobService.remove, self.id)

    def __len__(self) -> int:
        return self.progress().record.request_count

    def __repr__(self) -> str:
        return f"DetachedJobs({self.id!r})"


def submit_detached(
    connection: JobsConnection,
    requests: Callable[[], Iterable[GenerateRequest]],
    output: OutputAddress,
    user: str,
    submission_id: str | None,
    check: Check,
    file_name: str = "",
    layout: OutputLayout | None = None,
    most_tries: int = MOST_TRIES,
) -> DetachedJobs:
    """Hand requests with seeds over to the pool's job service, as they are read. When this returns, they are on its
    disk.

    requests       returns them; called again, up to `most_tries` times, if the service is restarted meanwhile, or
                   another driver has taken over
    submission_id  chosen by the caller: handing over again under the same id returns the same jobs; while another
                   driver hands it over, this one waits until it has done so, or has sent nothing for some time
    check          returns the recipe or the error of requests; called with one request of each kind
    file_name, layout  see `NewSubmission`

    Raises UserError for the first kind that the pool cannot run, for requests with images in memory, if the id belongs
    to another submission, and what `requests` raises. Then nothing runs.
    """
    name, address = submission_id or uuid.uuid4().hex[:10], str(absolute_address(output))
    new = NewSubmission(name, address, user, 0, file_name, layout)
    reason = ""
    for _ in range(most_tries):
        try:
            _hand_over(connection, new, _checked_texts(requests(), check))
        except _Forgotten as forgotten:
            reason = str(forgotten)
        else:
            return DetachedJobs(connection, new.submission_id)
    raise UserError(reason)


class _Forgotten(Exception):
    """Raised if the service has forgotten what it had not acknowledged: it was restarted, or another driver hands over
    the submission by now. The message says so."""


def _hand_over(connection: JobsConnection, new: NewSubmission, parts: Iterator[tuple[str, ...]]) -> None:
    """Hand over the texts of requests. Raises _Forgotten, and what `parts` raises; nothing is left of it then."""
    first = next(parts, ())  # before the submission begins: an error in it leaves no trace
    if not first:
        raise unusable_field("requests", 0, "at least one request")
    driver = uuid.uuid4().hex
    begun = _begun(connection, new, driver)
    name, is_new, count = new.submission_id, begun.state is SubmissionState.RECEIVING, 0
    try:
        for part in chain((first,), parts):
            if is_new:
                with _known_to_the_service():
                    connection.call(JobService.append, name, count, part, driver)
            count += len(part)
    except _Forgotten:
        raise
    except BaseException:
        if is_new:
            with suppress(UserError, PoolLost):
                connection.call(JobService.abandon, name, driver)
        raise
    if is_new:
        with _known_to_the_service():  # another driver may have handed it over meanwhile
            begun = connection.call(JobService.seal, name, count, driver)
    require_same(begun, replace(new, request_count=count))


def _begun(connection: JobsConnection, new: NewSubmission, driver: str) -> SubmissionRecord:
    """Start a submission, once no other driver is handing it over."""
    while True:
        try:
            return connection.call(JobService.begin, new, driver)
        except BeingReceived:
            time.sleep(FOLLOW_SECONDS)


@contextmanager
def _known_to_the_service() -> Iterator[None]:
    """Raise _Forgotten where the service does not know a submission that was begun, or receives it from another driver,
    which may have begun first after a restart."""
    try:
        yield
    except UnknownName:
        raise _Forgotten("the job service of the pool was restarted meanwhile; submit again") from None
    except BeingReceived as taken_over:
        raise _Forgotten(str(taken_over)) from None


def _checked_texts(requests: Iterable[GenerateRequest], check: Check) -> Iterator[tuple[str, ...]]:
    """Yield the texts of requests in parts, the first of which is small. Raises the error of the first kind that the
    pool cannot run."""
    folder, known = Path.cwd(), set[str]()
    left, size = iter(requests), FIRST_CHUNK
    while part := tuple(islice(left, size)):
        size = CHUNK
        kinds = {kind_of(request): request for request in reversed(part)}
        for answer in check(tuple(request for kind, request in kinds.items() if kind not in known)):
            if isinstance(answer, UserError):
                raise answer
        known |= kinds.keys()
        yield tuple(request_text(request, folder) for request in part)
