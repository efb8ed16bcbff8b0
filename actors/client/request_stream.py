"""`RequestStream`: submits requests while they are still being read, each checked once.

A thread takes chunks of requests, has the pool check them, and queues those that the caller accepts, while earlier ones
run. Knows neither files nor terminals.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from modelpool.actors.client.followed_jobs import FollowedJobs
from modelpool.actors.client.output_writer import ImageWriter
from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, SubmittedBatches
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import ClientId, ResultRef, Submission
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import TaskId

#: decides whether to queue a request, by its index among all and its recipe, or its error. Called in the stream's
#: thread, in order. It may raise: then the whole submission is cancelled
Decide: TypeAlias = Callable[[int, Recipe | UserError], bool]


#: once so many jobs wait or run, checks take half of the pool's time at most: it also has to start tasks
AHEAD_JOBS = 512
MOST_PAUSE_SECONDS = 1.0
#: longest wait for a call of the pool when it is closed
STOP_SECONDS = 10.0


class RequestStream:
    """Feeds one submission from an iterable of chunks, in its own thread."""

    def __init__(
        self,
        connection: Connection,
        jobs: FollowedJobs,
        client_id: ClientId,
        decide: Decide,
        open_writer: Callable[[], ImageWriter | None],
        warn: Callable[[Iterable[str]], None],
        user: str,
        hold: bool,
        batches: SubmittedBatches = NO_BATCHES,
    ) -> None:
        """`open_writer` is called once, before the first request is queued. `warn` issues warnings of the pool. `user`
        is for requests that set none. `hold`: queue nothing before all are checked. `batches` as in `Submission`.
        """
        self._connection = connection
        self._jobs = jobs
        self._client_id = client_id
        self._decide = decide
        self._open_writer = open_writer
        self._warn = warn
        self._user = user
        self._hold = hold
        self._batches = batches
        self._images = InputImages(connection.give)
        self._has_writer = False
        #: number of requests that were taken
        self._taken = 0
        #: held while the pool is called
        self._calling = threading.Lock()

    def start(self, chunks: Iterable[Sequence[GenerateRequest]]) -> None:
        """Begin to take `chunks`, of requests with seeds. If taking them or deciding raises, the submission is
        cancelled, and iterating over its results raises the same.
        """
        threading.Thread(target=self._feed, args=(chunks,), name="modelpool requests", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether more chunks may be taken."""
        return not self._jobs.ends.is_sealed

    def stop(self) -> None:
        """Cancel the submission unless all of it has ended, and wait for the call of the pool in progress, for
        `STOP_SECONDS` at most. Later ones are not made. Idempotent.
        """
        with contextlib.suppress(PoolLost):
            self._jobs.cancel()
        if self._calling.acquire(timeout=STOP_SECONDS):
            self._calling.release()

    def _feed(self, chunks: Iterable[Sequence[GenerateRequest]]) -> None:
        try:
            for chunk in chunks:
                self._jobs.writing.wait_while_held()
                began = time.monotonic()
                with self._calling:
                    if not self._jobs.add(chunk):
                        return
                    self._submit(chunk)
                if self._jobs.ends.unended_count > AHEAD_JOBS and not self._hold:
                    time.sleep(min(time.monotonic() - began, MOST_PAUSE_SECONDS))
            if self._hold:
                with self._calling:
                    self._queue(frozenset(), hold=False)
        except Exception as problem:  # anything: whoever waits for the results must learn of it
            self._jobs.fail(problem)
        finally:
            self._jobs.seal()

    def _submit(self, chunk: Sequence[GenerateRequest]) -> None:
        """Check a chunk, and queue its accepted requests."""
        first, self._taken = self._taken, self._taken + len(chunk)
        answers = self._checked(first, chunk)
        impossible = sum(isinstance(answer, UserError) for answer in answers.values())
        if self._jobs.writing.wants_no_outputs:  # cancelled before the pool knew the submission
            self._connection.call(CONTROLLER.cancel, self._client_id, self._jobs.id)
            self._jobs.leave_out(impossible)
            return
        left_out = impossible
        try:
            accepted = [index for index, answer in answers.items() if self._decide(index, answer)]
            recipes = [answer for index in accepted if isinstance(answer := answers[index], Recipe)]
            assert len(recipes) == len(accepted), "only possible requests are accepted"
            self._warn(text for recipe in recipes for text in recipe.warnings)
            if accepted and not self._has_writer:
                self._has_writer = True
                self._jobs.writing.write_with(self._open_writer())
            left_out += self._queue(frozenset(answers).difference(accepted), self._hold)
        finally:  # the impossible ones never end, also if this raises; the pool cancels the others
            self._jobs.leave_out(left_out)

    def _checked(self, first: int, chunk: Sequence[GenerateRequest]) -> dict[int, Recipe | UserError]:
        """Return the recipe or the error of each request, by index."""
        answers: dict[int, Recipe | UserError] = {}
        sent: list[GenerateRequest] = []
        given: dict[TaskId, ResultRef] = {}
        for index, request in enumerate(chunk, start=first):
            try:
                brought, refs = self._images.bring(request)
            except UserError as problem:  # the indexes in one message are consecutive
                self._check(index - len(sent), sent, given, answers)
                sent, given = [], {}
                answers[index] = problem
            else:
                sent.append(brought)
                given |= refs
        self._check(first + len(chunk) - len(sent), sent, given, answers)
        return answers

    def _check(
        self,
        first: int,
        requests: Sequence[GenerateRequest],
        given: dict[TaskId, ResultRef],
        answers: dict[int, Recipe | UserError],
    ) -> None:
        """Have the pool check `requests` with consecutive indexes from `first`, and add its answers."""
        if requests:
            who = self._client_id, self._jobs.id, first
            part = Submission(*who, tuple(requests), True, self._user, given, self._jobs.wish, self._batches)
            answers |= enumerate(self._connection.call(CONTROLLER.check_each, part), start=first)

    def _queue(self, left_out: frozenset[int], hold: bool) -> int:
        """Queue what was checked, without `left_out`; return how many of these were left out."""
        count, warnings = self._connection.call(
            CONTROLLER.queue_checked, self._client_id, self._jobs.id, left_out, hold
        )
        self._warn(warnings)
        return count
