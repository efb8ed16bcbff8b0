"""Parses JSON of unknown origin: lines of job files and manifests, and the recipes in output files.

Everything that a caller cannot use raises one error; nothing is converted and nothing is remembered.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from modelpool.pool.core.errors import UserError

#: longest text that is parsed; a request or a manifest entry takes a few KiB
MAX_BYTES = 16 << 20
#: containers within containers; requests, recipes and manifest entries use up to 6
MAX_DEPTH = 32


class NotJson(UserError):
    """A text that is not a JSON value, or one that is longer or deeper than any of ours. The message says where."""


def parse_json(text: bytes, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Parse one JSON value in UTF-8. Numbers are finite, no object has a key twice, and all characters are complete.

    Raises NotJson.
    """
    if len(text) > max_bytes:
        raise NotJson(f"found {len(text)} bytes, expected up to {max_bytes}")
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
    _check_depth(value, max_depth)
    _check_characters(value)
    return value


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotJson(f"field {repeated!r} occurs twice")
    for name, value in pairs:
        if isinstance(value, float) and not math.isfinite(value):
            raise NotJson(f"{name}: found {value}, expected a finite number")
    return fields


def _too_deep(max_depth: int) -> NotJson:
    return NotJson(f"found more than {max_depth} lists or objects in each other")


def _check_depth(value: object, max_depth: int) -> None:
    """Raise NotJson for a value that recursive code could not handle."""
    level: list[object] = [value]
    for _ in range(max_depth + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _check_characters(value: object) -> None:
    """Raise NotJson for lone surrogates, which JSON can express but UTF-8 cannot, and for numbers out of range."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        message = "found half a character (a lone surrogate such as \\ud800), expected complete ones"
        raise NotJson(message) from None
    except ValueError:
        raise NotJson("found a number that is out of range, expected a finite one") from None
