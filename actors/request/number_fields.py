"""Parses numbers in request fields, written as numbers or text, and validates those that several fields share.

Errors name the field passed to the function. Torch-free, ray-free.
"""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Any

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.sampling.names import MAX_CFG, MAX_STEPS, MIN_CFG

_STEPS = f"a whole number from 1 to {MAX_STEPS}"
_CFG = f"a number from {MIN_CFG:g} (no guidance) to {MAX_CFG:g}"


def finite_number(value: Any) -> float | None:
    """Return `value` as a finite float if it is a number or the text of one, else None. Booleans give None."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def whole_number(field: str, value: Any, expected: str) -> int:
    """Return `value` as a whole number if it is one, or the text of one; booleans are refused. Raises UnusableField."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    is_written = isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,30}", value.strip(), re.ASCII)
    if isinstance(value, bool) or not (is_whole or is_written):
        raise unusable_field(field, value, expected)
    return int(value)


def checked_steps(field: str, value: Any) -> int:
    """Validate a number of steps. Raises UnusableField."""
    steps = whole_number(field, value, _STEPS)
    if not 1 <= steps <= MAX_STEPS:
        raise unusable_field(field, value, _STEPS)
    return steps


def checked_cfg(field: str, value: Any) -> float:
    """Validate a guidance scale. Raises UnusableField."""
    cfg = finite_number(value)
    if cfg is None or not MIN_CFG <= cfg <= MAX_CFG:
        raise unusable_field(field, value, _CFG)
    return cfg
