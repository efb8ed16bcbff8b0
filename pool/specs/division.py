"""Which way a task is run where memory is short: whole, or in parts.

Torch-free and pure. The ways themselves come with the task (`pool.specs.spec.Division`).
"""

from __future__ import annotations

from modelpool.pool.specs.spec import Division, TaskSpec


def ways(task: TaskSpec) -> tuple[Division, ...]:
    """Every way to run `task`, the undivided one first."""
    return (Division(task.activation_bytes, counted_bytes=task.counted_bytes), *task.divisions)


def choose_division(task: TaskSpec, room_bytes: int) -> Division:
    """The least divided way whose activations fit in `room_bytes`: what is left beside scratch and held weights.

    Weights give way first: they can stream, which changes no number of the result. When no way fits, the most divided
    one: its figure is what a refusal names.
    """
    offered = ways(task)
    return next((way for way in offered if way.activation_bytes <= room_bytes), offered[-1])
