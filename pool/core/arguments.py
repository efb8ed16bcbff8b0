"""Numbers and texts that people hand to functions, checked where they come in.

Torch-free. What comes in as a whole request is checked by pydantic instead (`actors.request.strict`).
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from numbers import Real
from typing import Any

from modelpool.pool.core.errors import UnusableField, parse_bytes, unusable_field


def whole_number(field: str, found: Any, expected: str, least: int = 0, most: float = math.inf) -> int:
    """`found` as a plain int from `least` to `most`. numpy's whole numbers are such; floats, texts and bools are not.

    Raises UnusableField, which names `field`, says that `expected` was expected.
    """
    number = None
    if not isinstance(found, bool):
        with suppress(TypeError):
            number = int(operator.index(found))
    if number is None or not least <= number <= most:
        raise unusable_field(field, found, expected)
    return number


def real_number(field: str, found: Any, expected: str, least: float = -math.inf, most: float = math.inf) -> float:
    """`found` as a finite float from `least` to `most`; no text and no bool. Raises UnusableField."""
    number = math.nan
    if not isinstance(found, bool) and isinstance(found, Real):
        with suppress(OverflowError):  # a whole number may be too large for a float
            number = float(found)
    if not (math.isfinite(number) and least <= number <= most):
        raise unusable_field(field, found, expected)
    return number


def size_in_bytes(field: str, found: Any, least: int = 0) -> int:
    """`found` as bytes: a whole number from `least`, or a text such as '512MiB'. Raises UnusableField."""
    expected = f"a whole number of bytes, {least} or more, or a text such as '512MiB'"
    if not isinstance(found, str):
        return whole_number(field, found, expected, least)
    try:
        return parse_bytes(found)
    except UnusableField:
        raise unusable_field(field, found, expected) from None


def given_text(field: str, found: Any, expected: str) -> str:
    """`found`, which must be a text. Raises UnusableField."""
    if not isinstance(found, str):
        raise unusable_field(field, found, expected)
    return found
