"""Checks numbers and texts that users pass to functions.

Torch-free. Requests are checked by pydantic instead (`actors.request.strict`).
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from numbers import Real
from typing import Any

from modelpool.pool.values.core.errors import UnusableField, parse_bytes, unusable_field


def whole_number(field: str, found: Any, expected: str, least: int = 0, most: float = math.inf) -> int:
    """Return `found` as an int from `least` to `most`. Accepts numpy integers; rejects floats, texts and bools.

    Raises UnusableField naming `field` and `expected`.
    """
    number = None
    if not isinstance(found, bool):
        with suppress(TypeError):
            number = int(operator.index(found))
    if number is None or not least <= number <= most:
        raise unusable_field(field, found, expected)
    return number


def real_number(field: str, found: Any, expected: str, least: float = -math.inf, most: float = math.inf) -> float:
    """Return `found` as a finite float from `least` to `most`; rejects texts and bools. Raises UnusableField."""
    number = math.nan
    if not isinstance(found, bool) and isinstance(found, Real):
        with suppress(OverflowError):  # a whole number may be too large for a float
            number = float(found)
    if not (math.isfinite(number) and least <= number <= most):
        raise unusable_field(field, found, expected)
    return number


def size_in_bytes(field: str, found: Any, least: int = 0) -> int:
    """Return `found` in bytes: an integer from `least`, or a text such as '512MiB'. Raises UnusableField."""
    expected = f"a whole number of bytes, {least} or more, or a text such as '512MiB'"
    if not isinstance(found, str):
        return whole_number(field, found, expected, least)
    try:
        return parse_bytes(found)
    except UnusableField:
        raise unusable_field(field, found, expected) from None


def checked_text(field: str, found: Any, expected: str) -> str:
    """Return `found`, which must be a text. Raises UnusableField."""
    if not isinstance(found, str):
        raise unusable_field(field, found, expected)
    return found
