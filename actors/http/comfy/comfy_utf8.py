"""Repairs texts of a workflow that are UTF-8, read as Latin-1: what Python reads from PNG files of the editor. Pure."""

from __future__ import annotations

import json
from typing import Any

#: of a workflow: texts that are looked at
_MOST_TEXTS = 1_000_000


def with_utf8(workflow: Any) -> Any:
    """Return a workflow with its texts as UTF-8, if all of them that are not ASCII are UTF-8 that was read as Latin-1;
    else as it is."""
    if _is_ascii(workflow):
        return workflow
    found = False
    waiting, count = [workflow], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and not each.isascii():
            if _as_utf8(each) is None:
                return workflow
            found = True
        count += 1
        if count > _MOST_TEXTS:
            return workflow
    return _repaired(workflow) if found else workflow


def _is_ascii(workflow: Any) -> bool:
    """Return whether all texts of a workflow are ASCII, by one call of C, so that the check of a large workflow is
    fast. True for a value that is not JSON: it does not come from a file."""
    try:
        return json.dumps(workflow, ensure_ascii=False, check_circular=False, default=id).isascii()
    except (TypeError, ValueError, RecursionError):  # a key of another type, a number of thousands of digits
        return True


def _as_utf8(text: str) -> str | None:
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return None


def _repaired(value: Any) -> Any:
    """Return a value with all texts repaired; JSON of a request is nested to a bounded depth."""
    if isinstance(value, dict):
        return {_as_utf8(key) or key: _repaired(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_repaired(each) for each in value]
    return (_as_utf8(value) or value) if isinstance(value, str) else value
