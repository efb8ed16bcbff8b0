"""Messages for callers: bounded, and without the folders of the server. Pure.

Errors of the pool name files by their paths, which help who runs the pool. Callers know files by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: characters of a message; it may have several values of up to 500, or a list of names
MOST_CHARACTERS = 2000
#: first parts of the addresses of this server, which messages name, too
_ROUTES = "api|v1|sdapi|controlnet|files|page"
#: a path in quotes, which may have spaces; one before a colon, with which messages about files begin, likewise; and any
#: other. To the last slash, so that the name stays. Not the path of a URL, nor a fraction or a list of words
_QUOTED = re.compile(rf"""(?<=['"])(?:file://)?/(?!(?:{_ROUTES})/)[^'"\n]*/""")
_LEADING = re.compile(rf"""(?:^|(?<=[:;] ))(?:file://)?/(?!(?:{_ROUTES})/)[^:;\n]*/(?=[^/:;\n]*:)""")
_PLAIN = re.compile(rf"""(?<![\w.:/~\]}}-])(?:file://)?/(?!(?:{_ROUTES})/)(?:[^\s/'"`,;:()<>\[\]]+/)+""")


def shown_message(message: str) -> str:
    """Return a message without the folders of absolute paths, and only its beginning if it is long."""
    if "/" in message:
        message = message[: 4 * MOST_CHARACTERS]
        for folder in (_LEADING, _QUOTED, _PLAIN):
            message = folder.sub("", message)
    return bounded_message(message)


def bounded_message(message: str) -> str:
    """Return a message, or its beginning if it is long: it may have the largest value that a caller can send, and half
    characters (lone surrogates), which become question marks: an answer in UTF-8 has none."""
    message = message[: MOST_CHARACTERS + 1].encode("utf-8", "replace").decode()
    return message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]}..."


def shown_values(value: Any) -> Any:
    """Return JSON values with every text as `shown_message` returns it."""
    if isinstance(value, str):
        return shown_message(value)
    if isinstance(value, Mapping):
        return {key: shown_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown_values(each) for each in value]
    return value
