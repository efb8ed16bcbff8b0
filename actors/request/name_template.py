"""`NameTemplate`: names of output files with fields of their requests, such as "{id}-{seed}".

A name has no folder: characters that are not letters, digits, dots, underscores or hyphens become hyphens, and it does
not begin with a dot. Which of several outputs gets a name is decided where files are written.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.actors.request.labels import Labelled
from modelpool.pool.values.core.errors import counted, unknown_name, unusable_field

#: bytes of a name in UTF-8 without its end: file systems limit names to 255 bytes
MAX_NAME_BYTES = 180
MAX_TEMPLATE_CHARACTERS = 500
#: names of other files in an output folder
_RESERVED = frozenset({"manifest", "contact_sheet", "report"})
_PADDED = re.compile(r"0?[1-9][0-9]?")


#: what a name can be made of; `index` is the position of the request in the command or call, from 0
NAME_FIELDS = ("id", "index", "line", "seed", "prompt", "model", "width", "height", "steps", "digest")
#: fields that are numbers: they may be padded, as in {index:05}
_NUMBERS = frozenset({"index", "line", "seed", "width", "height", "steps"})
#: fields that a request may lack
_OPTIONAL = ("id", "line")


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A checked template. `parts` are a literal text, the name of a field ("" for none) and its padding each."""

    text: str
    parts: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, text: object, field: str = "name") -> NameTemplate:
        """Parse a template. Raises UserError naming `field`: for a field that does not exist it lists those that do."""
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TEMPLATE_CHARACTERS:
            found = counted(len(text), "character") if isinstance(text, str) else text
            expected = f'a text with fields, such as "{{id}}-{{seed}}", of up to {MAX_TEMPLATE_CHARACTERS} characters'
            raise unusable_field(field, found, expected)
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as problem:
            raise unusable_field(field, text, f'a text with fields, such as "{{id}}-{{seed}}" ({problem})') from None
        parts = []
        for literal, name, padding, conversion in parsed:
            if "/" in literal or "\\" in literal or not literal.isprintable():
                raise unusable_field(field, text, "a file name: it has no folders")
            if name is None:
                parts.append((literal, "", ""))
                continue
            if name not in NAME_FIELDS:
                raise unknown_name(f"field of {field}", name, NAME_FIELDS)
            if conversion or (padding and not (name in _NUMBERS and _PADDED.fullmatch(padding))):
                raise unusable_field(field, text, "fields without a format, or numbers with a width, as in {index:05}")
            parts.append((literal, name, padding or ""))
        if not any(name for _, name, _ in parts):
            raise unusable_field(field, text, f"at least one field: {', '.join(NAME_FIELDS)}")
        return cls(text, tuple(parts))

    def missing(self, request: Labelled) -> str:
        """Return the first field of this template that a request lacks; "" if it has all."""
        used = {name for _, name, _ in self.parts}
        return next((name for name in _OPTIONAL if name in used and getattr(request, name) is None), "")

    def check(self, request: Labelled, what: str) -> None:
        """Raise UnusableField if the request `what` lacks a field of this template."""
        if missing := self.missing(request):
            raise unusable_field("name", self.text, f"fields that every request has; {what} has no {missing}")

    def stem(self, values: Mapping[str, str | int | None]) -> str:
        """Return the name of a file without its end, from the values of `NAME_FIELDS`. It is safe in every folder, and
        not empty.
        """
        return safe_stem("".join(literal + _text(values.get(name), padding) for literal, name, padding in self.parts))


def safe_stem(text: str) -> str:
    """Return a text as the name of a file, without its end."""
    composed = unicodedata.normalize("NFC", text)
    safe = re.sub(r"[^\w.\-+=@,]+", "-", composed).strip("-. ")
    cut = safe.encode("utf-8", "ignore")[:MAX_NAME_BYTES].decode("utf-8", "ignore").strip("-. ")
    if not cut or cut.lower() in _RESERVED:
        return f"output-{cut}".rstrip("-")
    return cut


def _text(value: str | int | None, padding: str) -> str:
    return "" if value is None else format(value, padding)
