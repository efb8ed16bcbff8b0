"""Parses untrusted JSON strictly: objects only, bounded work, nothing ambiguous. Torch-free.

Stricter than `json.loads`, as the parsers of other languages are: no duplicate names, no lone surrogates, no NaN or
infinity, and no more values than a real file has. Does not interpret values.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

#: Limit of the values in one text, counted as opening brackets and commas. A tensor of a header takes about seven, so
#: this is 70,000 tensors; a hostile file could otherwise take twenty times its size in memory.
MAX_VALUES = 500_000

#: not JSON, but written by Python
_INFINITIES = ("Infinity", "-Infinity")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")

#: length limit of a value in a message
_MAX_CHARACTERS = 300


class _Short(reprlib.Repr):
    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value) if len(value) <= self.maxstring else f"{value[: self.maxstring]!r}..."


_short = _Short()
_short.maxlevel = 2
_short.maxstring = _short.maxother = 160
_short.maxlist = _short.maxdict = _short.maxtuple = 8
_short.maxlong = 40


class BadJson(ValueError):
    """Text that is not valid JSON. The message states the fault and names no file."""


def read_object(text: bytes, *, with_infinities: bool = False) -> dict[str, Any]:
    """Parse the JSON object `text`; `with_infinities` also accepts the words for infinities that Python writes.

    Raises BadJson. Takes memory of a few times the length of `text`, and no deep recursion. -0 is parsed as a float, as
    readers that distinguish signed numbers from counts do.
    """
    values = text.count(b",") + text.count(b"{") + text.count(b"[")
    if values > MAX_VALUES:
        raise BadJson(f"has about {values} values, expected at most {MAX_VALUES}")
    try:
        # checking each number would take as long as all other work
        whole_number = _whole_number if b"-0" in text else None
        loaded = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_int=whole_number,
            parse_float=_finite,
            parse_constant=_infinity if with_infinities else _no_number,
        )
        if _HALF_PAIR.search(text):
            # lone surrogates, which no other program could write and no terminal could print
            json.dumps(loaded, ensure_ascii=False).encode("utf-8")
    except BadJson:
        raise
    except UnicodeError as error:
        raise BadJson(f"is damaged: {_without_object(error)}, expected UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadJson(f"is damaged: {error}, expected JSON") from None
    except ValueError:  # Python parses integers of up to 4,300 digits
        raise BadJson("holds a number of thousands of digits") from None
    if not isinstance(loaded, dict):
        raise BadJson(f"is a JSON {type(loaded).__name__}, expected an object")
    return loaded


def brief(value: object) -> str:
    """Format `value` for a message: never longer than a few lines, however large or deep it is."""
    try:
        text = _short.repr(value)
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} that is too long to show"


def finite_number(value: object) -> float | None:
    """Return `value` as a float; None if it is not a number, not finite, or an integer beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def are_texts(value: object) -> bool:
    """Whether `value` is a mapping of texts to texts."""
    return isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        duplicate, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise BadJson(f"names {brief(duplicate)} twice, expected each name once")
    return result


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise BadJson(f"holds {brief(digits)}, which is beyond the range of numbers")
    return number


def _no_number(word: str) -> float:
    raise BadJson(f"holds {word}, which is not JSON, expected a number")


def _infinity(word: str) -> float:
    return float(word) if word in _INFINITIES else _no_number(word)


def _whole_number(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _without_object(error: UnicodeError) -> str:
    """Return the fault without the text that contains it."""
    return str(getattr(error, "reason", "not text"))
