"""JSON out of files of strangers holds only what JSON has, and is shown in a message in few words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.files.formats.strict_json import BadJson, brief, finite_number, read_object

_FINITE = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400 + ".0"])
@pytest.mark.parametrize("text", ['{"a": %s}', '{"a": [1, {"b": %s}]}'])
def test_what_is_no_finite_number_is_refused(text: str, number: str) -> None:
    """Readers of other languages refuse it, and comparisons with it are all false."""
    with pytest.raises(BadJson, match="holds "):
        read_object((text % number).encode())


def test_infinities_are_read_where_they_are_expected() -> None:
    """Found: multistep schedulers of diffusers have one, and a published folder with such was refused."""
    text = b'{"lambda_min_clipped": -Infinity, "most": Infinity}'
    assert read_object(text, with_infinities=True) == {"lambda_min_clipped": -math.inf, "most": math.inf}
    with pytest.raises(BadJson, match="holds NaN"):
        read_object(b'{"a": NaN}', with_infinities=True)


@given(st.dictionaries(st.text(max_size=5), _FINITE | st.lists(_FINITE, max_size=3), max_size=4))
def test_finite_numbers_are_read_as_they_were_written(value: dict[str, Any]) -> None:
    assert read_object(json.dumps(value).encode()) == value


def _deep(depth: int) -> Any:
    value: Any = "x" * 150
    for _ in range(depth):
        value = [value] * 8
    return value


@pytest.mark.parametrize(
    "value",
    [_deep(8), {"a" * 1000: _deep(3)}, "x" * 10**6, b"\0" * 10**6, ("y" * 500,) * 50, 10**10_000, {1, "z" * 500}],
    ids=["deep", "keys", "text", "bytes", "tuple", "number", "set"],
)
def test_a_value_is_shown_in_a_few_hundred_characters(value: object) -> None:
    """A list of lists of lists would otherwise be a message of 40 MB."""
    assert 0 < len(brief(value)) <= 303


@given(st.lists(st.integers(0, 999), max_size=8) | st.text(st.characters(codec="ascii"), max_size=30))
def test_a_small_value_is_shown_whole(value: object) -> None:
    assert brief(value) == repr(value)


def test_numbers_that_no_float_holds_are_none() -> None:
    assert [finite_number(value) for value in (3, -0.5, 0, 1 << 60)] == [3.0, -0.5, 0.0, float(1 << 60)]
    for value in (10**400, -(10**400), float("inf"), float("nan"), True, "3", None, [3]):
        assert finite_number(value) is None
