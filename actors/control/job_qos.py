"""Applies the priority, user and deadline of a request to its job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.spec import TaskSpec, UserId
from modelpool.pool.values.specs.wire_value import evolve

if TYPE_CHECKING:
    from modelpool.actors.graph.common.task_collector import JobGraph
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.worker.wire.messages import Submission


def with_qos(graph: JobGraph, batch: str, user: str, priority: int = 0, deadline: float | None = None) -> JobGraph:
    """Return `graph` with these scheduling terms. `deadline` is on the scheduler's clock; jobs of one `batch` were
    submitted together.
    """
    job = evolve(graph.job, priority=priority, user=UserId(user), deadline=deadline, batch=batch)
    return evolve(graph, job=job)


def with_limited_gpus(graph: JobGraph, most: int) -> JobGraph:
    """Return `graph` with tasks that at most so many GPUs share. Raises UnusableField for a task that needs more."""
    if all(task.degrees[-1] <= most for task in graph.job.tasks):
        return graph
    tasks: list[TaskSpec] = []
    for task in graph.job.tasks:
        degrees = tuple(degree for degree in task.degrees if degree <= most)
        if not degrees:
            raise unusable_field("gpus", task.degrees[0], f"up to {most}: `most_gpus` of the pool")
        tasks.append(replace(task, degrees=degrees))
    return replace(graph, job=replace(graph.job, tasks=tuple(tasks)))


def with_request_qos(request: GenerateRequest, graph: JobGraph, submission: Submission, began_at: float) -> JobGraph:
    """Return `graph` with the terms of its request; `began_at` is the start of its submission on the scheduler's
    clock.
    """
    user = submission.user if request.user is None else request.user
    deadline = None if request.deadline is None else began_at + request.deadline
    return with_qos(graph, submission.submission_id, user, request.priority, deadline)
