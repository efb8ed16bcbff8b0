"""Parses the command-line option for options of a run, one word for each. Imports no pydantic."""

from __future__ import annotations

from typing import Any

from modelpool.pool.values.core.errors import unusable_field


def option_words(words: list[str]) -> dict[str, Any]:
    """Return the options of command-line words such as "freeu=on" and "pag.scale=3", as fields of a request. Raises
    UserError."""
    options: dict[str, Any] = {}
    for word in words:
        name, sign, value = (part.strip() for part in word.partition("="))
        if not name or (sign and not value):
            raise unusable_field("--option", word, "NAME, NAME=VALUE or NAME.SETTING=VALUE, such as pag.scale=3")
        if name in options:
            raise unusable_field("--option", word, f"{name} once")
        options[name] = value if sign else "on"
    return {"options": options}
