"""JSON of unknown origin is a value or one typed error."""

from __future__ import annotations

import pytest

from modelpool.actors.request.json_text import MAX_BYTES, MAX_DEPTH, NotJson, parse_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "lists or objects in each other"),
        (b'{"a":' * 100_000, "lists or objects in each other"),
        (b"[" * 400 + b"]" * 400, "lists or objects in each other"),
        (b"1" * 5000, "too many digits"),
        (b'{"steps": NaN}', "steps: found nan, expected a finite number"),
        (b"[1e999]", "out of range"),
        (b'"\\ud800"', "half a character"),
        (b'{"a": 1, "a": 2}', "field 'a' occurs twice"),
        (b"\xff", "not UTF-8"),
        (b"\0" * 10, "not JSON"),
        (b"", "not JSON"),
        (b" " * (MAX_BYTES + 1), "expected up to"),
    ],
)
def test_what_cannot_be_used_is_one_typed_error(text: bytes, message: str) -> None:
    with pytest.raises(NotJson, match=message):
        parse_json(text)


def test_values_as_deep_as_allowed_are_parsed() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
