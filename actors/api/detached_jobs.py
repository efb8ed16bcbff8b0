"""`DetachedJobs`: a submission that runs without its driver, and `submit_detached`, which hands one over."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from modelpool.actors.detached.job_service import LONGEST_WAIT_SECONDS, JobsConnection, JobService, JobsProgress
from modelpool.actors.detached.records import (
    NewSubmission,
    RequestOutcome,
    SubmissionRecord,
    SubmissionState,
    kind_of,
    request_text,
)
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.outputs.layout import OutputLayout
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.results.previews import ImagePreview
from modelpool.actors.settings.output_address import OutputAddress, absolute_address
from modelpool.pool.core.errors import UnknownName, UserError

#: requests in one call
CHUNK = 1000
#: how often a submission is handed over if the job service is restarted meanwhile
MOST_TRIES = 5

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
                raise TimeoutError(f"submission {self.id}: {record.pending} of {record.request_count} jobs are pending")

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
    requests: Sequence[GenerateRequest],
    output: OutputAddress,
    user: str,
    submission_id: str | None,
    check: Check,
    file_name: str = "",
    layout: OutputLayout | None = None,
) -> DetachedJobs:
    """Hand requests with seeds over to the pool's job service. When this returns, they are on its disk.

    submission_id  chosen by the caller: handing over again under the same id returns the same jobs
    check          returns the recipe or the error of requests; called with one request of each kind
    file_name, layout  see `NewSubmission`

    Raises UserError for the first kind that the pool cannot run, for requests with images in memory, and if the id
    belongs to another submission. Then nothing runs.
    """
    folder = Path.cwd()
    texts = [request_text(request, folder) for request in requests]
    kinds = {kind_of(request): request for request in reversed(requests)}
    for answer in check(tuple(kinds.values())):
        if isinstance(answer, UserError):
            raise answer
    name, address = submission_id or uuid.uuid4().hex[:10], str(absolute_address(output))
    new = NewSubmission(name, address, user, len(texts), file_name, layout)
    for tries_left in reversed(range(MOST_TRIES)):
        try:
            _hand_over(connection, new, texts)
            break
        except UnknownName:  # the service was restarted, and forgot what it had not acknowledged
            if not tries_left:
                raise
    return DetachedJobs(connection, new.submission_id)


def _hand_over(connection: JobsConnection, new: NewSubmission, texts: Iterable[str]) -> None:
    if connection.call(JobService.begin, new).state is not SubmissionState.RECEIVING:
        return
    for first_place, part in _parts(texts):
        connection.call(JobService.append, new.submission_id, first_place, part)
    connection.call(JobService.seal, new.submission_id)


def _parts(texts: Iterable[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    left, place = iter(texts), 0
    while part := tuple(islice(left, CHUNK)):
        yield place, part
        place += len(part)
