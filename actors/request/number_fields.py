"""Parses numbers in request fields, written as numbers or text, and validates those that several fields share.

Errors name the field passed to the function. Torch-free, ray-free.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from modelpool.pool.inference.sampling.sampler_names import MAX_CFG, MAX_STEPS, MIN_CFG
from modelpool.pool.values.core.errors import unusable_field


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers from `least` to `most`, in multiples of `step`; `expected` describes them."""

    least: int
    most: int
    expected: str = ""
    step: int = 1

    def __post_init__(self) -> None:
        kind = "a whole number" if self.step == 1 else f"a multiple of {self.step}"
        object.__setattr__(self, "expected", self.expected or f"{kind} from {self.least} to {self.most}")

    def parse(self, field: str, value: Any) -> int:
        """Return `value`, a whole number or the text of one. Raises UnusableField."""
        found = whole_number(field, value, self.expected)
        if not self.least <= found <= self.most or found % self.step:
            raise unusable_field(field, value, self.expected)
        return found


@dataclass(frozen=True, slots=True)
class WholeOrWord:
    """Whole numbers, and some words."""

    whole: Whole
    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """Description of both."""
        return ", or ".join((self.whole.expected, *(f'"{word}"' for word in self.words)))

    def parse(self, field: str, value: Any) -> int | str:
        """Return `value`, a whole number, the text of one, or a word. Raises UnusableField."""
        if isinstance(value, str) and (word := value.strip().lower()) in self.words:
            return word
        found = whole_number(field, value, self.expected)
        if not self.whole.least <= found <= self.whole.most or found % self.whole.step:
            raise unusable_field(field, value, self.expected)
        return found


@dataclass(frozen=True, slots=True)
class Number:
    """Finite numbers from `least` (with `above`, greater ones) to `most`; `expected` describes them."""

    least: float
    most: float
    expected: str = ""
    above: bool = False

    def __post_init__(self) -> None:
        bounds = f"above {self.least:g} up to {self.most:g}" if self.above else f"from {self.least:g} to {self.most:g}"
        object.__setattr__(self, "expected", self.expected or f"a number {bounds}")

    def parse(self, field: str, value: Any) -> float:
        """Return `value`, a number or the text of one. Raises UnusableField."""
        found = finite_number(value)
        if found is None or not self.least <= found <= self.most or (self.above and found == self.least):
            raise unusable_field(field, value, self.expected)
        return found


#: largest whole number that no other one becomes as a float, and most digits of a whole number
_LAST_EXACT, _MOST_DIGITS = 2**53 - 1, 30
#: steps and guidance scale, of a request and of its parts
STEPS = Whole(1, MAX_STEPS)
CFG = Number(MIN_CFG, MAX_CFG, f"a number from {MIN_CFG:g} (no guidance) to {MAX_CFG:g}")


def noise_levels(value: Any) -> tuple[float, ...]:
    """Return the levels of a run without the final 0, from numbers or from text with commas. Raises UnusableField."""
    listed = value.split(",") if isinstance(value, str) else value
    if value is None or value == "":
        return ()
    if not isinstance(listed, list | tuple):
        raise unusable_field("sigmas", value, _LEVELS)
    found = [finite_number(each) for each in listed]
    if found and found[-1] == 0.0:
        found = found[:-1]
    levels = tuple(level for level in found if level is not None and level > 0.0)
    falls = all(one > next_one for one, next_one in pairwise(levels))
    if len(levels) < len(found) or not falls or not 1 <= len(levels) <= MAX_STEPS:
        if not listed:
            return ()
        raise unusable_field("sigmas", value, _LEVELS)
    return levels


_LEVELS = f"1 to {MAX_STEPS} falling positive numbers, such as [14.6, 4.1, 1.2, 0.3]"


def finite_number(value: Any) -> float | None:
    """Return `value` as a finite float if it is a number or the text of one, else None. Booleans give None."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def number_text(value: float) -> str:
    """Return the text of a number with as few digits as it can be read back from: up to six where they are exact."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def whole_number(field: str, value: Any, expected: str) -> int:
    """Return `value` as a whole number if it is one, or the text of one; booleans are refused. Raises UnusableField."""
    # digits are read exactly: seeds exceed the whole numbers that floats have
    is_written = isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,30}", value.strip(), re.ASCII)
    is_truth_value = isinstance(value, bool)
    if is_written or (not is_truth_value and isinstance(value, Integral)):
        return int(value)
    if isinstance(value, Decimal) and value.is_finite() and value.adjusted() <= _MOST_DIGITS and value == int(value):
        return int(value)
    found = None if isinstance(value, str) else finite_number(value)
    if found is None or not found.is_integer():
        raise unusable_field(field, value, expected)
    if abs(found) > _LAST_EXACT:  # of a column of floats, say: the number that was meant may be another one
        exact = f"a whole number beyond {_LAST_EXACT} without a decimal point, since floats round it"
        raise unusable_field(field, repr(found), exact)
    return int(found)
