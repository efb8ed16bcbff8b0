"""The submissions of a pool, for users: counted from queueing to the end, and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modelpool.actors.control.submission_list import MOST_LISTED, MOST_PROMPT, SubmissionList
from modelpool.scheduler.model.messages import Outcome


def jobs(submission_id: str, count: int, prompt: str = "a", user: str = "ann") -> list[Any]:
    recipe = SimpleNamespace(model="shapes", prompt=prompt)
    graph = SimpleNamespace(job=SimpleNamespace(user=user))
    return [SimpleNamespace(submission_id=submission_id, recipe=recipe, graph=graph) for _ in range(count)]


def test_jobs_are_counted_until_they_end_also_if_more_come() -> None:
    known = SubmissionList()
    known.queued(jobs("s", 3), 10.0)
    known.queued(jobs("s", 2), 20.0)
    known.queued([], 21.0)
    for outcome in (Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.FAILED):
        known.ended("s", outcome)
    (status,) = known.statuses(100.0)
    assert (status.jobs, status.succeeded, status.failed, status.cancelled, status.unfinished) == (5, 2, 1, 0, 2)
    assert (status.user, status.model, status.prompt, status.seconds) == ("ann", "shapes", "a", 90.0)
    for _ in range(2):
        known.ended("s", Outcome.CANCELLED)
    known.ended("unknown", Outcome.FAILED)
    (status,) = known.statuses(100.0)
    assert (status.cancelled, status.unfinished) == (2, 0)
    known.queued(jobs("s", 1), 200.0)
    (status,) = known.statuses(200.0)
    assert (status.jobs, status.unfinished) == (6, 1), "it is active again"


def test_active_ones_come_first_and_ended_ones_are_forgotten_when_there_are_many() -> None:
    known = SubmissionList()
    known.queued(jobs("old and active", 1, "x" * 5000), 0.0)
    for place in range(3 * MOST_LISTED):
        known.queued(jobs(f"s{place}", 1), float(place))
        known.ended(f"s{place}", Outcome.SUCCEEDED)
    found = known.statuses(1000.0)
    assert [each.id for each in found[:2]] == ["old and active", f"s{3 * MOST_LISTED - 1}"]
    assert len(found) == MOST_LISTED
    assert len(found[0].prompt) == MOST_PROMPT
    assert len(known._ended) == MOST_LISTED


def test_a_stage_without_a_request_has_no_prompt() -> None:
    known = SubmissionList()
    (job,) = jobs("s", 1)
    job.recipe = None
    known.queued([job], 0.0)
    assert [(each.model, each.prompt) for each in known.statuses(1.0)] == [("", "")]
