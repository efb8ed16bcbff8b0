"""The ids under which the pool knows the jobs of a submission."""

from __future__ import annotations

from typing import Any

from modelpool import GenerateRequest
from modelpool.actors.client.job_ends import JobEnds
from modelpool.actors.client.monitor import Monitor
from modelpool.actors.client.pool_submission import PoolSubmission
from modelpool.actors.outputs.results.job_ledger import MOST_REPEATS
from modelpool.actors.worker.wire.messages import ClientId, JobEnded, SubmissionId
from modelpool.pool.values.specs.spec import JobId, TaskId
from modelpool.scheduler.model.messages import Outcome


class Line:
    """A connection that takes everything."""

    def call(self, *_: object) -> None:
        return None


def test_an_id_is_forgotten_once_nothing_is_in_the_pool_under_it() -> None:
    """There was one more for each job that was sent again, and each was asked about for ever."""
    monitor, sent = Monitor(), list[str]()
    line: Any = Line()
    pool = PoolSubmission(
        *(monitor, JobEnds(monitor), [GenerateRequest(model="shapes", prompt="a", seed=1)], line, ClientId("me")),
        *(SubmissionId("a"), lambda requests, submission_id: sent.append(submission_id)),
    )
    pool.follower.sent(pool.follower.submit(1), "a")
    ended = JobEnded(SubmissionId("a"), 0, JobId("a-0"), TaskId("t"), Outcome.SUCCEEDED, None, None, None, ())
    for number in range(1, MOST_REPEATS + 1):
        assert pool.repeat(ended)
        assert pool.ids == ("a", f"ar{number}")
    assert sent == [f"ar{number}" for number in range(1, MOST_REPEATS + 1)]
    pool.follower.end(0, "failed")
    assert pool.ids == ("a",)
