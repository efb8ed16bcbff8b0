"""Applies the priority, user and deadline of a request to its job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.specs.spec import UserId

if TYPE_CHECKING:
    from modelpool.actors.graph.build_graph import CutJob
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.wire.messages import Submission


def on_terms(cut: CutJob, batch: str, user: str, priority: int = 0, deadline: float | None = None) -> CutJob:
    """`cut` with these terms. `deadline` is on the scheduler's clock; jobs of one `batch` were asked for together."""
    job = replace(cut.job, priority=priority, user=UserId(user), deadline=deadline, batch=batch)
    return replace(cut, job=job)


def on_terms_of(request: GenerateRequest, cut: CutJob, submission: Submission, began_at: float) -> CutJob:
    """`cut` with the terms of its request; its submission began at that time of the scheduler's clock."""
    user = submission.user if request.user is None else request.user
    deadline = None if request.deadline is None else began_at + request.deadline
    return on_terms(cut, submission.submission_id, user, request.priority, deadline)
