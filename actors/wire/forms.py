"""`forms_of`: which fields the messages of two processes have, to tell whether one reads what the other sends."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints


def forms_of(*messages: Any) -> str:
    """Return a text with the fields of these classes and of all that their fields have, in their order: pickles of
    most contain values only, which an earlier version would read as those of other fields."""
    forms: dict[type, str] = {}
    left = list(messages)
    while left:
        found = left.pop()
        if inner := get_args(found):
            left += inner
        elif isinstance(found, type) and hasattr(found, "__match_args__") and found not in forms:
            forms[found] = f"{found.__module__}.{found.__qualname__}({', '.join(found.__match_args__)})"
            left += get_type_hints(found).values()
    return "\n".join(sorted(forms.values()))
