"""Explains why a task fits on no worker of the pool, by sizes. Pure."""

from __future__ import annotations

from modelpool.pool.values.core.errors import does_not_fit
from modelpool.pool.values.specs.spec import RunError, RunErrorKind, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes


def why_unfit(spec: TaskSpec, largest: tuple[int, str] | None) -> RunError | None:
    """Return why the task does not fit on the worker with most memory, `largest` (bytes and name), fully streamed and
    at the finest division; None if it fits, or if that worker is unknown."""
    if largest is None:
        return None
    least_bytes = needed_bytes(spec.uses, spec.least_activation_bytes)
    capacity_bytes, worker_id = largest
    if least_bytes <= capacity_bytes:
        return None
    what = f"{spec.stage.value} task {spec.task_id} of {', '.join(use.component for use in spec.uses)}"
    divided = f"at the finest division ({spec.activation_bytes} B undivided), " if spec.divisions else ""
    detail = (
        f"activations {spec.least_activation_bytes} B, {divided}working set of the largest layer "
        f"{least_bytes - spec.least_activation_bytes} B; {worker_id} has most"
    )
    return RunError(RunErrorKind.BAD_INPUT, str(does_not_fit(what, least_bytes, capacity_bytes, detail)))
