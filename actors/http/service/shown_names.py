"""Names of uploaded files as callers see them, and the safe names under which they are on disk. Pure.

A name may have any character that files have on the machines of callers. Characters that separate folders or control
the display are refused; those that some file systems refuse are written as %XX on disk.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath
from urllib.parse import unquote

from modelpool.pool.values.core.errors import counted, unusable_field

#: of a name on disk; file systems permit 255, and a file that is being written has a longer name
MOST_BYTES = 240
#: subfolders in each other
MOST_FOLDERS = 8
#: characters that a name has not: control characters, halves of pairs, ends of lines, and marks that turn the direction
#: of what follows, which hide the ending of a name
_REFUSED_CATEGORIES = frozenset(("Cc", "Cs", "Zl", "Zp"))
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SEPARATORS = frozenset("/\\")
#: characters that Windows refuses, and the one that marks an escape
_ESCAPED = re.compile(r'[<>:"|?*%]|[. ]$')
#: names that Windows reserves for devices, with any ending
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)")
#: what ComfyUI writes behind the name of an uploaded image in a workflow: it is no part of the name
INPUT_MARK = " [input]"
_EXPECTED = (
    f"a name of up to {MOST_BYTES} bytes, not with a dot first or{INPUT_MARK} last, without / \\ and control characters"
)
#: characters of an ending, with its dot; a longer one is a part of the name
_LONGEST_ENDING = 10


def shown_name(name: str) -> str:
    """Return a name in the form in which it is kept and compared. macOS writes a letter and its accent as two
    characters; others as one."""
    return unicodedata.normalize("NFC", name)


def name_on_disk(field: str, name: str) -> str:
    """Return the name on disk of the file or folder that callers see as `name`. Raises UnusableField naming `field`."""
    shown = shown_name(name)
    is_marked = shown.endswith(INPUT_MARK)
    if not shown.strip() or shown.startswith(".") or is_marked or any(map(_is_refused, shown)):
        raise unusable_field(field, name[:100].encode(errors="replace").decode(), _EXPECTED)
    stored = _escaped(shown)
    if len(stored.encode()) > MOST_BYTES:
        raise unusable_field(field, f"{name[:100]}... ({counted(len(stored.encode()), 'byte')})", _EXPECTED)
    return stored


def numbered_name(name: str, number: int) -> str:
    """Return a name for another image with the same name: with a number, and shortened if it would be too long."""
    stem, ending = PurePosixPath(name).stem, PurePosixPath(name).suffix
    if len(ending) > _LONGEST_ENDING:
        stem, ending = name, ""
    tail = f" ({number}){ending}"
    while stem and len(_escaped(stem + tail).encode()) > MOST_BYTES:
        stem = stem[:-1]
    return stem + tail


def folders_on_disk(field: str, subfolder: str) -> tuple[str, ...]:
    """Return the names on disk of a folder and of those around it, from "a/b"; () for "". Raises UnusableField."""
    names = subfolder.rstrip("/").split("/") if subfolder else []
    if len(names) > MOST_FOLDERS:
        raise unusable_field(field, subfolder[:100], f"up to {MOST_FOLDERS} folders in each other")
    return tuple(name_on_disk(field, name) for name in names)


def name_of_disk(stored: str) -> str:
    """Return the name that callers see, from the one on disk."""
    return unquote(stored)


def _escaped(shown: str) -> str:
    stored = _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", shown)
    return f"%{ord(stored[0]):02X}{stored[1:]}" if _RESERVED.match(stored) else stored


def _is_refused(character: str) -> bool:
    return (
        character in _SEPARATORS or character in _DIRECTIONS or unicodedata.category(character) in _REFUSED_CATEGORIES
    )
