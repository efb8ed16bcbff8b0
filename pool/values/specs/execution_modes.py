"""Selects how a task runs when memory is short: in full, with CFG split into single calls, or tiled.

Torch-free and pure. The modes are part of the task (`pool.values.specs.spec.ExecutionMode`).
"""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ExecutionMode, TaskSpec


def execution_modes(task: TaskSpec) -> tuple[ExecutionMode, ...]:
    """Return all execution modes of `task`, full execution first."""
    return (ExecutionMode(task.activation_bytes, counted_bytes=task.counted_bytes), *task.divisions)


def choose_mode(task: TaskSpec, room_bytes: int) -> ExecutionMode:
    """Return the least divided mode with activations that fit in `room_bytes`: the space left by scratch and pinned
    weights.

    Weights are evicted first: they can stream, which does not change the result. If no mode fits, returns the most
    divided one: a refusal reports its size.
    """
    offered = execution_modes(task)
    return next((mode for mode in offered if mode.activation_bytes <= room_bytes), offered[-1])
