"""`PoolSubmission`: a submission as the pool knows it: under its id, and under others for jobs that were sent again.

Jobs are sent again if they were withdrawn from the pool, since their outputs could not be written, and if their output
was lost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from modelpool.actors.client.job_ends import JobEnds
from modelpool.actors.client.monitor import Monitor
from modelpool.actors.control.connection import CONTROLLER, Connection, UnknownDriver
from modelpool.actors.control.detached.records import with_deadline
from modelpool.actors.outputs.results.job_follower import JobFollower
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import ClientId, JobEnded, SubmissionId
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.previews import PreviewWish

#: submits requests again, by index, as a submission with that id
SubmitAgain: TypeAlias = Callable[[Sequence[tuple[int, GenerateRequest]], SubmissionId], None]


class PoolSubmission:
    """The jobs in the pool. `submit_again` is None if it cannot submit requests again."""

    def __init__(
        self,
        monitor: Monitor,
        ends: JobEnds,
        requests: Sequence[GenerateRequest],
        connection: Connection,
        client_id: ClientId,
        submission_id: SubmissionId,
        submit_again: SubmitAgain | None,
    ) -> None:
        self.id = submission_id
        #: where the jobs are that have not ended
        self.follower = JobFollower(ends.ledger)
        self._monitor = monitor
        self._ends = ends
        self._requests = requests
        self._connection = connection
        self._client_id = client_id
        self._submit_again = submit_again
        #: ids of jobs that were sent again, without those under which none is in the pool any more
        self._repeated: list[SubmissionId] = []
        self._numbers = itertools.count(1)
        #: the ends of withdrawn jobs until they are submitted again, by index
        self._withdrawn: dict[int, JobEnded] = {}

    @property
    def ids(self) -> tuple[SubmissionId, ...]:
        """The ids under which the pool knows the jobs: the first one, and each under which some were sent again."""
        with self._monitor:
            self._repeated = [each for each in self._repeated if self.follower.is_in_use(each)]
            return (self.id, *self._repeated)

    def cancel(self, withdraw: bool = False) -> None:
        """Cancel the jobs of every id; only those that have not started to `withdraw` them. Raises PoolLost, unless to
        `withdraw`."""
        for submission_id in self.ids:
            try:
                self._connection.call(CONTROLLER.cancel, self._client_id, submission_id, withdraw)
            except PoolLost:
                if not withdraw:
                    raise

    def cancel_job(self, index: int) -> None:
        """Cancel one job. Raises PoolLost."""
        for submission_id in self.ids:
            self._connection.call(CONTROLLER.cancel_jobs, self._client_id, submission_id, (index,))

    def want_previews(self, wish: PreviewWish | None) -> None:
        """Have previews made as `wish` says from now on. Raises PoolLost."""
        for submission_id in () if self._ends.is_over else self.ids:
            self._connection.call(CONTROLLER.want_previews, self._client_id, submission_id, wish)

    def keep_withdrawn(self, job: JobEnded) -> bool:
        """Keep the end of a job that was withdrawn, until it is submitted again; False if it was cancelled."""
        with self._monitor:
            if not self.follower.withdrawn(job.index, job.submission_id):
                return False
            self._withdrawn[job.index] = job
            return True

    def take_withdrawn(self, indexes: Sequence[int]) -> list[JobEnded]:
        """Forget the ends of withdrawn jobs that are not submitted again, and return them."""
        with self._monitor:
            return [self._withdrawn.pop(index) for index in indexes]

    def submit_withdrawn(self) -> tuple[list[JobEnded], str]:
        """Submit again what was withdrawn. Return the ends of the jobs for which that is impossible, and why."""
        with self._monitor:
            jobs = self.take_withdrawn(sorted(self.follower.take_again()))
            if not jobs:
                return [], ""
            indexes = [job.index for job in jobs]
            submission_id = self._new_id(indexes)
        problem = self._send(indexes, submission_id)
        return (jobs, problem) if problem else ([], "")

    def repeat(self, job: JobEnded) -> bool:
        """Submit a job again after its output was lost with a node. False if it was lost too often, or if the pool is
        gone.
        """
        with self._monitor:
            is_possible = self._submit_again is not None and self._ends.lost is None
            if not is_possible or not self.follower.output_lost(job.index):
                return False
            submission_id = self._new_id([job.index])
        try:
            self._connection.call(CONTROLLER.result_lost, job.wanted)
        except PoolLost:
            return False
        return not self._send([job.index], submission_id)

    def _new_id(self, indexes: Sequence[int]) -> SubmissionId:
        """Return the id of another submission of some of the requests, which is about to be sent. Requires the lock."""
        submission_id = SubmissionId(f"{self.id}r{next(self._numbers)}")
        self._repeated = [*filter(self.follower.is_in_use, self._repeated), submission_id]
        self.follower.sent(indexes, submission_id)
        return submission_id

    def _send(self, indexes: Sequence[int], submission_id: SubmissionId) -> str:
        """Submit requests again, with the rest of their deadlines; return why that is impossible, or ""."""
        if self._submit_again is None:
            return "it cannot be submitted again"
        with self._monitor:
            now = time.monotonic()
            requests = [
                (index, with_deadline(self._requests[index], self.follower.passed_seconds(index, now)))
                for index in indexes
            ]
        try:
            self._submit_again(requests, submission_id)
            with self._monitor:
                unwanted = tuple(self.follower.unwanted(indexes))
            if unwanted:  # cancelled meanwhile
                self._connection.call(CONTROLLER.cancel_jobs, self._client_id, submission_id, unwanted)
        except (PoolLost, UserError, UnknownDriver) as problem:
            return str(problem)
        return ""
