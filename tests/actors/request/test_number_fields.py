"""Numbers of requests, as people and programs write them."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.request.number_fields import CFG, STEPS, finite_number, number_text, whole_number
from modelpool.pool.values.core.errors import UnusableField, UserError


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (1, 1.0), (1.5, 1.5), (" 1.5 ", 1.5), ("1e2", 100.0), (Fraction(1, 2), 0.5), (np.float32(0.5), 0.5),
        (True, None), (None, None), ("", None), ("x", None), ("nan", None), (math.inf, None), (10**400, None),
        ([1], None),
    ],
)  # fmt: skip
def test_what_is_a_finite_number(value: Any, meant: float | None) -> None:
    assert finite_number(value) == meant


@pytest.mark.parametrize("value", [3, 3.0, "3", " +3 "])
def test_what_is_a_whole_number(value: Any) -> None:
    found = whole_number("steps", value, "one")
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [True, None, 3.5, "3.0", "x", "\u0663", math.nan, math.inf, "1" * 31])
def test_what_is_none_is_told_by_the_field(value: Any) -> None:
    with pytest.raises(UnusableField, match=r"seed: found .*, expected a small one"):
        whole_number("seed", value, "a small one")


def test_steps_and_cfg_are_told_by_the_field_and_with_their_ends() -> None:
    assert (STEPS.parse("steps", 1), STEPS.parse("steps", "999")) == (1, 999)
    assert (CFG.parse("cfg", 1), CFG.parse("cfg", "100")) == (1.0, 100.0)
    for steps in (0, 1000, None):
        with pytest.raises(UnusableField, match=f"hires.steps: found {steps}, expected a whole number from 1 to 999"):
            STEPS.parse("hires.steps", steps)
    for cfg in (0.99, 100.5, None):
        with pytest.raises(UnusableField, match=f"decoder.cfg: found {cfg}, expected a number from 1 "):
            CFG.parse("decoder.cfg", cfg)


def test_whole_numbers_are_never_rounded() -> None:
    """A seed of a decimal column lost its last digits, and so did the seed that somebody meant by a float."""
    assert whole_number("seed", Decimal(2**53 + 1), "") == 2**53 + 1
    assert whole_number("seed", Decimal("1E+3"), "") == 1000
    assert whole_number("seed", float(2**53 - 1), "") == 2**53 - 1
    assert whole_number("seed", 2**64 - 1, "") == 2**64 - 1
    for value in (
        float(2**53 + 1),
        1e19,
        -(2.0**60),
        Decimal("1E+40"),
        Decimal("0.5"),
        Decimal("NaN"),
        Decimal("Infinity"),
    ):
        with pytest.raises(UserError, match=r"^seed: found"):
            whole_number("seed", value, "a whole number")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_reads_back_as_the_number(value: float) -> None:
    assert float(number_text(value)) == value


def test_the_text_of_a_number_is_short_where_it_is_exact() -> None:
    assert [number_text(value) for value in (4.0, 0.8, 7, 1e-7, 1 / 3)] == ["4", "0.8", "7", "1e-07", repr(1 / 3)]
