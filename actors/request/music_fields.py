"""Checks of the fields that describe music: its lyrics, and facts that become a part of the prompt's text."""

from __future__ import annotations

from typing import Any

from modelpool.pool.values.core.errors import counted, unusable_field

#: far above what music has
MAX_BPM = 1000
#: models read some thousand tokens of lyrics
MAX_LYRICS = 100_000
_MAX_WORD = 64


def checked_lyrics(value: Any) -> str:
    """Return `value`, which has to be a text. Raises UnusableField."""
    if not isinstance(value, str) or len(value) > MAX_LYRICS:
        found = counted(len(value), "character") if isinstance(value, str) else value
        raise unusable_field("lyrics", found, f"a text of up to {MAX_LYRICS} characters")
    return value


def music_word(name: str, value: Any) -> str:
    """Return the value of the field `name`, which becomes a part of one line. Raises UnusableField."""
    word = value.strip() if isinstance(value, str) else ""
    if not word or len(word) > _MAX_WORD or not word.isprintable() or set(word) & set("()[]{}<>\\"):
        raise unusable_field(name, value, f"a word or a few, up to {_MAX_WORD} characters without brackets")
    return word
