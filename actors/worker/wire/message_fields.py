"""`message_fields`: the fields of messages between processes, to compare two versions."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints


def message_fields(*messages: Any) -> str:
    """Return a text with the fields of these classes and of all that their fields have, in their order: pickles of
    most contain values only, which an earlier version would read as values of other fields."""
    fields: dict[type, str] = {}
    left = list(messages)
    while left:
        found = left.pop()
        if inner := get_args(found):
            left += inner
        elif isinstance(found, type) and hasattr(found, "__match_args__") and found not in fields:
            fields[found] = f"{found.__module__}.{found.__qualname__}({', '.join(found.__match_args__)})"
            left += get_type_hints(found).values()
    return "\n".join(sorted(fields.values()))
