"""Parses JSON of unknown origin: lines of job files and manifests, and the recipes in output files.

Everything that a caller cannot use raises one error; nothing is converted and nothing is remembered.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from modelpool.pool.values.core.errors import UserError, counted

#: longest text that is parsed; a request or a manifest entry takes a few KiB
MAX_BYTES = 16 << 20
#: values in all lists and objects together, counted by the commas between them, also those in texts: a value takes some
#: hundred bytes of memory, and as few as two bytes of a text
MAX_VALUES = 1_000_000
_COUNTED_BYTES = 1 << 20
#: of a name in a message
_MOST_SHOWN = 100
#: containers within containers; requests, recipes and manifest entries use up to 6
MAX_DEPTH = 32


class NotJson(UserError):
    """A text that is not a JSON value, or one that is longer or deeper than any of ours. The message says where."""


class JsonOverBound(NotJson):
    """A text that is longer or deeper than any of ours, or has more values."""


def parse_json(
    text: bytes, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES
) -> Any:
    """Parse one JSON value in UTF-8. Numbers are finite, no object has a key twice, and all characters are complete.

    Raises NotJson.
    """
    if len(text) > max_bytes:
        raise JsonOverBound(f"found {counted(len(text), 'byte')}, expected up to {max_bytes}")
    _check_count(text, max_values)
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_checked_object)
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except NotJson:
        raise
    except ValueError:  # an integer that Python refuses to parse
        raise NotJson("found a number with too many digits") from None
    _check_values(value, max_depth, b"\\u" in text)
    return value


def _check_count(text: bytes, max_values: int) -> None:
    """Raise NotJson for a text of too many values, before they are built."""
    commas = 0
    for start in range(0, len(text), _COUNTED_BYTES):
        commas += text.count(b",", start, start + _COUNTED_BYTES)
        if commas > max_values:
            raise JsonOverBound(f"found more than {max_values} values (commas), expected up to {max_values}")


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotJson(f"field {repeated[:_MOST_SHOWN]!r} occurs twice")
    for name, value in pairs:
        if isinstance(value, float) and not math.isfinite(value):
            raise NotJson(f"{name[:_MOST_SHOWN]}: found {value}, expected a finite number")
    return fields


def _too_deep(max_depth: int) -> NotJson:
    return JsonOverBound(f"found more than {max_depth} lists or objects in each other")


def _check_values(value: object, max_depth: int, has_escapes: bool) -> None:
    """Raise NotJson for a value that recursive code could not handle, for numbers out of range, and for lone
    surrogates, which JSON can express with an escape, but UTF-8 cannot."""
    level: list[object] = [value]
    for _ in range(max_depth + 1):
        items: list[object] = []
        for each in level:
            if isinstance(each, dict):
                if has_escapes:
                    for name in each:
                        _check_characters(name)
                items += each.values()
            elif isinstance(each, list):
                items += each
            elif isinstance(each, str):
                if has_escapes:
                    _check_characters(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise NotJson("found a number that is out of range, expected a finite one")
        if not items:
            return
        level = items
    raise _too_deep(max_depth)


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        message = "found half a character (a lone surrogate such as \\ud800), expected complete ones"
        raise NotJson(message) from None
