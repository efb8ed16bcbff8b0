"""Runs an operation of a task, and finds operations by name. Torch-free until an operation runs."""

from __future__ import annotations

from modelpool.pool.inference.operations.first_operations import FIRST_OPERATIONS
from modelpool.pool.inference.operations.operation import Operation
from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.core.stage_params import OperationParams, Result
from modelpool.pool.values.core.task_inputs import TaskInputs


def operation_named(name: str) -> Operation:
    """Return an operation. Raises UnknownName."""
    found = FIRST_OPERATIONS.get(name)
    if found is None:
        raise unknown_name("operation", name, FIRST_OPERATIONS)
    return found


def operate(work: OperationParams, inputs: TaskInputs) -> Result:
    """Return the result of `work`: of equal work on equal inputs, equal bytes. Raises UnusableField."""
    operation = operation_named(work.name)
    return operation(operation.params_of(dict(work.settings)), dict(inputs))
