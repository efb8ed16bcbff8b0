"""Applies the priority, user and deadline of a request to its job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import UserId

if TYPE_CHECKING:
    from modelpool.actors.graph.common.task_collector import JobGraph
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.worker.wire.messages import Submission


def with_qos(graph: JobGraph, batch: str, user: str, priority: int = 0, deadline: float | None = None) -> JobGraph:
    """Return `graph` with these scheduling terms. `deadline` is on the scheduler's clock; jobs of one `batch` were
    submitted together.
    """
    job = replace(graph.job, priority=priority, user=UserId(user), deadline=deadline, batch=batch)
    return replace(graph, job=job)


def with_request_qos(request: GenerateRequest, graph: JobGraph, submission: Submission, began_at: float) -> JobGraph:
    """Return `graph` with the terms of its request; `began_at` is the start of its submission on the scheduler's
    clock.
    """
    user = submission.user if request.user is None else request.user
    deadline = None if request.deadline is None else began_at + request.deadline
    return with_qos(graph, submission.submission_id, user, request.priority, deadline)
