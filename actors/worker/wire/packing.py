"""Packs requests, reports and results for transfer between the processes of a pool on Ray.

Plain pickle takes a third of the time that Ray needs for a value of any class, as Ray looks each class up every time.
Rules
1. Results up to `SMALL_BYTES` travel packed: Ray would copy them into its messages anyway.
2. Larger ones are left to Ray, which puts them into its object store once and returns views of them.
3. Readers accept both forms; a result is never bytes itself.

Knows no Ray and no worker.
"""

from __future__ import annotations

import pickle
from typing import Any

from modelpool.pool.values.core.stage_params import Result

PROTOCOL = pickle.HIGHEST_PROTOCOL
#: below the 100 KiB that Ray carries in a message, with room for everything besides the arrays
SMALL_BYTES = 96 << 10


def packed(value: object) -> bytes:
    """Pack a request or a report."""
    return pickle.dumps(value, PROTOCOL)


def unpacked(value: bytes) -> Any:
    """Invert `packed`."""
    return pickle.loads(value)


def packed_result(result: Result | None, result_bytes: int) -> bytes | Result | None:
    """Pack a result with arrays of `result_bytes`, unless it is too large."""
    return packed(result) if result is not None and result_bytes <= SMALL_BYTES else result


def result_of(value: Any) -> Any:
    """Invert `packed_result`."""
    return unpacked(value) if isinstance(value, bytes) else value
