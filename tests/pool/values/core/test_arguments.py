"""Numbers and texts from people: numbers come back as plain Python's, others are named, and nothing hangs."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.argument_checks import checked_text, real_number, size_in_bytes, whole_number
from modelpool.pool.values.core.errors import UnusableField


@given(number=st.integers(-(10**30), 10**30), least=st.integers(-10, 10), more=st.integers(0, 10**25))
def test_whole_numbers_within_their_bounds_come_back(number: int, least: int, more: int) -> None:
    if least <= number <= least + more:
        assert whole_number("steps", number, "one", least, least + more) == number
    else:
        with pytest.raises(UnusableField, match=f"steps: found {number}, expected one"):
            whole_number("steps", number, "one", least, least + more)


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.int64])
def test_whole_numbers_of_numpy_come_back_as_plain_ones(kind: type) -> None:
    found = whole_number("seed", kind(7), "one")
    assert (found, type(found)) == (7, int)


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, np.True_, [1], 1j, math.nan], ids=repr)
def test_what_is_no_whole_number_is_named(wrong: object) -> None:
    with pytest.raises(UnusableField, match=r"^steps: found .*, expected one$"):
        whole_number("steps", wrong, "one")


@pytest.mark.parametrize("right", [3, 3.0, np.float32(3), np.int64(3), Fraction(3)], ids=repr)
def test_real_numbers_come_back_as_plain_floats(right: object) -> None:
    found = real_number("cfg", right, "one", 1, 100)
    assert (found, type(found)) == (3.0, float)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.5, 101, 10**400, "3", None, True, 3j], ids=repr)
def test_what_is_no_such_real_number_is_named(wrong: object) -> None:
    with pytest.raises(UnusableField, match=r"^cfg: found .*, expected one$"):
        real_number("cfg", wrong, "one", 1, 100)


def test_sizes_are_numbers_or_texts_with_a_unit() -> None:
    assert size_in_bytes("vram", np.int64(5)) == 5
    assert size_in_bytes("vram", "1.5MiB") == 3 << 19
    for wrong in (0, -1, 1.5, True, None, "lots", "0MiB", ""):
        with pytest.raises(UnusableField, match=r"^vram: found .*, 1 or more, or a text such as"):
            size_in_bytes("vram", wrong, least=1)


def test_a_text_is_a_text() -> None:
    assert checked_text("prompt", "", "a text") == ""
    with pytest.raises(UnusableField, match="prompt: found None, expected a text"):
        checked_text("prompt", None, "a text")
