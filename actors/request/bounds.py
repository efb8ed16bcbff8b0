"""Bounds of texts and lists in requests, far above what models read: what one request may cost the others.

The table of fields (`field_table`) has them for the fields of a request; parts of a request, and interfaces that build
requests, check their own with the same functions. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.pool.values.core.errors import UnusableField, UserError, counted, unusable_field

#: of a prompt, or a text for a part of the image; and of callers of a server, by default. Text encoders read up to some
#: thousand tokens of about four characters, CLIP any number of them; to tokenize 65,536 characters takes up to 0.5 s
MAX_PROMPT_CHARACTERS, CALLER_PROMPT_CHARACTERS = 1 << 17, 1 << 16
#: of all texts of one request together: of its prompt, its negative prompt, and the texts for parts of the image
MAX_TEXT_CHARACTERS = 2 * MAX_PROMPT_CHARACTERS
#: of names of models and files, and of other short texts
MAX_NAME_CHARACTERS = 4096
#: of a LoRA with its strengths in one text, which has a factor for each of up to 200 blocks
MAX_LORA_CHARACTERS = 8192
#: of one request: each is looked up, and takes a part of the weights' update
MAX_LORAS = 100
#: of a list in a request that has no bound of its own
MAX_ENTRIES = 1000

#: decoded pixels, of three bytes each, of callers of a server, by default: of all images of a call; and of the images
#: of all calls and jobs of a user. Videos of 81 frames in 720p have 75 million
CALLER_CALL_PIXELS, CALLER_HELD_PIXELS = 100_000_000, 400_000_000


class OverBound(UnusableField):
    """A field with more than a request may have of it: servers count these apart from other mistakes."""


def over_bound(name: str, found: str, most: str) -> OverBound:
    """An `OverBound` that names the field, the amount found in it and the bound."""
    return OverBound(str(unusable_field(name, found, most)))


def reworded(problem: UserError, message: str) -> UserError:
    """An error with another message than `problem`, which servers count as they count `problem`."""
    return OverBound(message) if isinstance(problem, OverBound) else UserError(message)


def check_characters(name: str, text: str, most: int) -> None:
    """Raise OverBound for a text in the field `name` of more than `most` characters, and as `check_complete`."""
    if len(text) > most:
        raise over_bound(name, counted(len(text), "character"), f"up to {most} characters")
    check_complete(name, text)


def check_complete(name: str, text: str) -> None:
    """Raise UnusableField for a text, or the path of a file, in the field `name` with half a character: no UTF-8 has
    it, so that no recipe and no list of outputs could."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a character at {error.start} (a lone surrogate, U+{ord(text[error.start]):04X})"
        raise unusable_field(name, found, "complete characters, which UTF-8 can express") from None


def check_entries(name: str, value: Any, most: int) -> None:
    """Raise OverBound for a list or a mapping in the field `name` with more than `most` entries."""
    if isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > most:
        raise over_bound(name, counted(len(value), "entry", "entries"), f"up to {most}")
