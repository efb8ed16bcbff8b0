"""Whether the tasks of a job fit device memory, and which of them needs most. Pure functions of a job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.core.errors import DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.plan.residency import needed_bytes
from modelpool.pool.specs.spec import ComponentKey, JobSpec, TaskSpec

#: all weights may stream
NOTHING_KEPT: Mapping[ComponentKey, int] = MappingProxyType({})


def check_fits(job: JobSpec, capacity_bytes: int) -> None:
    """Raise DoesNotFit when a task of `job` cannot run with `capacity_bytes` of device memory, all streamed and divided
    as far as it can be. Of several such tasks the message names the one that needs most: a budget of that fits all.

    By what was counted: no correction refuses work that was possible before.
    """
    task, least_bytes = hungriest(job)
    if least_bytes > capacity_bytes:
        raise too_small(task, least_bytes, capacity_bytes)


def hungriest(job: JobSpec, kept_bytes: Mapping[ComponentKey, int] = NOTHING_KEPT) -> tuple[TaskSpec, int]:
    """The task of `job` that needs most when all streams and is divided as far as it can be, and the least memory that
    it runs in. Of the components in `kept_bytes` so many bytes are resident all the same."""

    def least_bytes(task: TaskSpec) -> int:
        staying_bytes = sum(kept_bytes.get(use.component, 0) for use in task.uses)
        return needed_bytes(task.uses, task.least_estimated_bytes) + staying_bytes

    task = max(job.tasks, key=least_bytes)
    return task, least_bytes(task)


def too_small(task: TaskSpec, least_bytes: int, given_bytes: int, beside: str = "") -> DoesNotFit:
    """What to say where `task`, the hungriest, does not fit. `beside` names what takes memory beside the run."""
    names = " with ".join(use.component for use in task.uses)
    activations = format_bytes(task.least_estimated_bytes)
    detail = f"of these {activations} activations, the rest for the largest layer{beside}"
    return does_not_fit(f"to {task.stage.value} with {names}", least_bytes, given_bytes, detail)
