"""Checks whether the tasks of a job fit in device memory, and finds the one that needs most. Pure functions of a
job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.values.core.errors import DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.values.specs.spec import ComponentKey, JobSpec, Stage, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes

#: no weights are pinned: all may be streamed
NOTHING_PINNED: Mapping[ComponentKey, int] = MappingProxyType({})


def check_fits(job: JobSpec, capacity_bytes: int) -> None:
    """Raise DoesNotFit if a task of `job` cannot run in `capacity_bytes` of device memory even fully streamed and
    tiled. The message names the task that needs most: a budget of that size fits all of them.

    Uses the calculated activation bytes: a correction by measurements never refuses a job that fitted before.
    """
    task, least_bytes = largest_task(job)
    if least_bytes > capacity_bytes:
        instead = "a larger limit of a worker ([pool] vram, --vram)"
        instead += "" if task.stage is Stage.ENCODE else ", or a smaller size"
        instead += f", or a batch of fewer than {task.batch_size} images" if task.batch_size > 1 else ""
        raise DoesNotFit(f"{too_little_memory(task, least_bytes, capacity_bytes)}; expected {instead}")


def largest_task(job: JobSpec, pinned_bytes: Mapping[ComponentKey, int] = NOTHING_PINNED) -> tuple[TaskSpec, int]:
    """Return the task of `job` that needs most when fully streamed and tiled, and the bytes that it needs. Of the
    components in `pinned_bytes`, that many bytes are resident anyway."""

    def least_bytes(task: TaskSpec) -> int:
        resident_bytes = sum(pinned_bytes.get(use.component, 0) for use in task.uses)
        return needed_bytes(task.uses, task.least_estimated_bytes) + resident_bytes

    task = max(job.tasks, key=least_bytes)
    return task, least_bytes(task)


def too_little_memory(task: TaskSpec, least_bytes: int, available_bytes: int, other_use: str = "") -> DoesNotFit:
    """Return the error for `task`, the one that needs most. `other_use` names other users of the memory."""
    names = " with ".join(use.component for use in task.uses)
    activations = format_bytes(task.least_estimated_bytes)
    detail = f"of these {activations} activations, the rest for the largest layer{other_use}"
    return does_not_fit(f"to {task.stage.value} with {names}", least_bytes, available_bytes, detail)
