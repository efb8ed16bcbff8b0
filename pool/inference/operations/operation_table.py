"""The table of all operations by name. To add an operation, add a row to the table of its module."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.inference.operations.audio_edits import AUDIO_EDITS
from modelpool.pool.inference.operations.encoded_edits import ENCODED_EDITS
from modelpool.pool.inference.operations.image_edits import IMAGE_EDITS
from modelpool.pool.inference.operations.image_filters import IMAGE_FILTERS
from modelpool.pool.inference.operations.image_scaling import IMAGE_SCALING
from modelpool.pool.inference.operations.latent_edits import LATENT_EDITS, NOT_LATENT_EDITS
from modelpool.pool.inference.operations.mask_edits import MASK_EDITS
from modelpool.pool.inference.operations.operation import Operation
from modelpool.pool.values.core.errors import UnknownName

_ROWS = (
    *IMAGE_SCALING,
    *IMAGE_EDITS,
    *IMAGE_FILTERS,
    *MASK_EDITS,
    *LATENT_EDITS,
    *ENCODED_EDITS,
    *AUDIO_EDITS,
)
OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in _ROWS})


def operation(name: str) -> Operation:
    """Return an operation. Raises UnknownName, with the reason for what is no operation on one result."""
    found = OPERATIONS.get(name)
    if found is None:
        reason = NOT_LATENT_EDITS.get(name)
        raise UnknownName(
            f"operation: found {name[:100]!r}, which is none on one result: {reason}"
            if reason
            else f"unknown operation {name[:100]!r}; expected one of {', '.join(OPERATIONS)}"
        )
    return found
