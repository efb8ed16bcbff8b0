"""Words for what pydantic expected of a value, as messages to users have them. Knows no field."""

from __future__ import annotations

import re

#: by the kinds of pydantic's errors: the beginning of their types
_BY_TYPE = (
    ("int_", "a whole number"),
    ("float_", "a number"),
    ("string_type", "a text"),
    ("bool_", "true or false"),
    ("model_", "a table of its fields"),
    ("dict_type", "a table"),
    ("list_type", "a list"),
    ("tuple_type", "a list"),
    ("path_type", "a path"),
)
#: what pydantic and click write before what they expect
_PREFIX = re.compile(r"^(?:Input should be |Value error, )+")


def expected_words(kind: str, message: str) -> str:
    """Return what was expected of a value, by the type and the message of pydantic's error."""
    for beginning, words in _BY_TYPE:
        if kind.startswith(beginning):
            return words
    return _PREFIX.sub("", message)
