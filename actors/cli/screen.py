"""Where the command line writes: people read stderr, programs read stdout.

Knows terminals and text. On anything but a terminal: plain lines, no control codes, nothing cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

#: control characters, halves of characters, ends of lines and of paragraphs
_OBEYED = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: what turns the direction of the text that follows, and the marks that do it in passing
_DIRECTIONS = frozenset({"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"})
_MARKS = "\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}\N{ARABIC LETTER MARK}"

#: tables on something that is no terminal; wide enough that no cell of ours wraps
PLAIN_WIDTH = 160


def people_console(file: TextIO | None = None) -> Console:
    """A console for people on stderr (or `file`)."""
    stream = file or sys.stderr
    width = None if stream.isatty() else PLAIN_WIDTH
    plain = not stream.isatty()
    return Console(
        file=stream, width=width, highlight=False, emoji=False, force_terminal=False if plain else None, no_color=plain
    )


def say(console: Console, text: str, style: str = "") -> None:
    """Print `text` as it is: no markup is read, nothing in it is obeyed (`visible`), long lines are not broken where
    nobody can see the edge."""
    console.print(Text(visible(text), style=style), soft_wrap=not console.is_terminal)


def visible(text: str, kept: str = "\n\t") -> str:
    """`text` with the characters that a terminal obeys, and those that turn the direction of others, written as codes:
    names and metadata in files are written by strangers. Of those, `kept` stay."""
    if text.isprintable():  # none of these is
        return text
    return "".join(char if char in kept or not _is_obeyed(char) else ascii(char)[1:-1] for char in text)


def _is_obeyed(char: str) -> bool:
    return unicodedata.category(char) in _OBEYED or unicodedata.bidirectional(char) in _DIRECTIONS or char in _MARKS


def show(console: Console, table: RenderableType) -> None:
    """Print a table after a blank line; without the blanks that pad it where nobody sees its edge."""
    console.print()
    if console.is_terminal:
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        console.print(Text("\n".join(line.rstrip() for line in captured.get().splitlines())), soft_wrap=True)


@contextlib.contextmanager
def json_on_stdout() -> Iterator[TextIO]:
    """The real stdout, to the caller alone: what anything else in this process prints there goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    stream = os.fdopen(os.dup(kept), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        with stream, contextlib.redirect_stdout(sys.stderr):
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_json(stream: TextIO, value: Any) -> None:
    """One line of JSON, at once: whoever reads it may be waiting."""
    stream.write(json.dumps(value, allow_nan=False) + "\n")
    stream.flush()


def duration(seconds: float) -> str:
    """'4.2 s', '3:07', '2:05:09'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(count: int, noun: str) -> str:
    """'1 image', '8 images'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
