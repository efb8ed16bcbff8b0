"""How requests, reports and results are packed on their way between the processes of a pool on Ray.

Plain pickle takes a third of the time of what Ray does with a value of any class, which is to look each class up anew.
Rules
1. Results up to `SMALL_BYTES` travel packed: Ray would copy them into its messages all the same.
2. Larger ones are left to Ray, which puts them into its object store once and hands out views of them.
3. Whoever reads a result takes it either way; a result is never bytes itself.
Knows no Ray and no worker.
"""

from __future__ import annotations

import pickle
from typing import Any

from modelpool.pool.core.stage_params import Result

PROTOCOL = pickle.HIGHEST_PROTOCOL
#: below the 100 KiB that Ray carries in a message, by so much that what is packed around the arrays does not matter
SMALL_BYTES = 96 << 10


def packed(value: object) -> bytes:
    """A request or a report, to be sent."""
    return pickle.dumps(value, PROTOCOL)


def unpacked(value: bytes) -> Any:
    """The inverse of `packed`."""
    return pickle.loads(value)


def packed_result(result: Result | None, result_bytes: int) -> bytes | Result | None:
    """A result whose arrays have `result_bytes`, as it is handed to Ray."""
    return packed(result) if result is not None and result_bytes <= SMALL_BYTES else result


def result_of(value: Any) -> Any:
    """What was handed to `packed_result`, of what Ray brought."""
    return unpacked(value) if isinstance(value, bytes) else value
