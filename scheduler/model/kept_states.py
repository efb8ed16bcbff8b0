"""States of sampling runs that stopped between two steps: their ids, and what the core knows of each.

A task has at most one state, which a newer one replaces. Every state of a task leads to the same result, so it is
never wrong to resume from another one than expected; it only takes more or fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.specs.spec import NO_NODE, NodeId, TaskId, TaskReport, TaskSpec
from modelpool.pool.values.specs.wire_value import WireValue

_SUFFIX = "~state"


def state_id(task_id: TaskId) -> TaskId:
    """Return the id under which the shell holds the state of a task."""
    return TaskId(task_id + _SUFFIX)


def task_of_state(result_id: TaskId) -> TaskId | None:
    """Invert `state_id`; None for the id of another result."""
    return TaskId(result_id[: -len(_SUFFIX)]) if result_id.endswith(_SUFFIX) else None


@dataclass(frozen=True, slots=True)
class KeptState(WireValue):
    """A state that the shell holds: after `step` of `steps`.

    node  the machine that has it, and with which it would be lost; "" for the controller's
    """

    step: int
    steps: int
    state_bytes: int = 0
    node: NodeId = NO_NODE

    @property
    def remaining(self) -> float:
        """Fraction of the steps that are left."""
        return (self.steps - self.step) / self.steps

    def moved(self) -> KeptState:
        """Return the same, on the controller's machine."""
        return KeptState(self.step, self.steps, self.state_bytes)


def kept_state(report: TaskReport, node: NodeId = NO_NODE) -> KeptState | None:
    """Return the state that a run on `node` ended with; None if it has none."""
    if not report.has_state or not 0 < report.step < report.steps:
        return None
    return KeptState(report.step, report.steps, report.result_bytes, node)


def step_seconds(spec: TaskSpec, run_seconds: float, remaining: float = 1.0) -> float:
    """Return the expected seconds of one step of a run of `run_seconds`, which computes the fraction `remaining` of all
    steps: a sampling run calls its first component once in each step (`ComponentUse.passes`)."""
    return run_seconds / max(1.0, spec.uses[0].passes * remaining) if spec.uses else run_seconds
