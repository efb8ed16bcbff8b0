"""Runs an operation of a task, and finds operations by name. To add an operation, add a row to the table of its module.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.inference.operations.audio_edits import AUDIO_EDITS
from modelpool.pool.inference.operations.encoded_edits import ENCODED_EDITS
from modelpool.pool.inference.operations.image_colours import IMAGE_COLOURS
from modelpool.pool.inference.operations.image_detail import IMAGE_DETAIL
from modelpool.pool.inference.operations.image_edits import IMAGE_EDITS
from modelpool.pool.inference.operations.image_filters import IMAGE_FILTERS
from modelpool.pool.inference.operations.image_scaling import IMAGE_SCALING
from modelpool.pool.inference.operations.latent_edits import LATENT_EDITS, NOT_LATENT_EDITS
from modelpool.pool.inference.operations.mask_edits import MASK_EDITS
from modelpool.pool.inference.operations.operation import Operation
from modelpool.pool.inference.operations.pack_edits import PACK_EDITS
from modelpool.pool.values.core.errors import UnknownName, unknown_name
from modelpool.pool.values.core.stage_params import OperationParams, Result
from modelpool.pool.values.core.task_inputs import TaskInputs

_ROWS = (
    *IMAGE_SCALING,
    *IMAGE_EDITS,
    *IMAGE_FILTERS,
    *IMAGE_DETAIL,
    *IMAGE_COLOURS,
    *MASK_EDITS,
    *LATENT_EDITS,
    *ENCODED_EDITS,
    *AUDIO_EDITS,
    *PACK_EDITS,
)
#: operations by name
OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in _ROWS})


def operation_named(name: str) -> Operation:
    """Return an operation. Raises UnknownName, with the reason for names that are no operation on one result."""
    if name in NOT_LATENT_EDITS:
        raise UnknownName(f"operation: found {name!r}, which is none on one result: {NOT_LATENT_EDITS[name]}")
    found = OPERATIONS.get(name)
    if found is None:
        raise unknown_name("operation", name, OPERATIONS)
    return found


def operate(work: OperationParams, inputs: TaskInputs) -> Result:
    """Return the result of `work`: of equal work on equal inputs, equal bytes. Raises UnusableField."""
    operation = operation_named(work.name)
    return operation(operation.params_of(dict(work.settings)), dict(inputs))
