"""Consoles and printing: stderr for users, stdout for programs.

Knows terminals and text. Without a terminal: plain lines, no control codes, nothing truncated.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from modelpool.actors.cli.terminal.standard_streams import for_programs
from modelpool.pool.values.core.errors import counted as counted

#: categories: control characters, surrogates, line and paragraph separators
_OBEYED = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: bidirectional controls, and the marks that act like them
_DIRECTIONS = frozenset({"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"})
_MARKS = "\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}\N{ARABIC LETTER MARK}"

#: width of tables without a terminal; wide enough that no cell of ours wraps
PLAIN_WIDTH = 160


def user_console(file: TextIO | None = None) -> Console:
    """Return a console for users on stderr (or `file`)."""
    stream = file or sys.stderr
    width = None if stream.isatty() else PLAIN_WIDTH
    plain = not stream.isatty()
    return Console(
        file=stream,
        width=width,
        highlight=False,
        emoji=False,
        markup=False,  # texts name sections of files, "[cluster]", and files have any name
        force_terminal=False if plain else None,
        no_color=plain,
    )


def say(console: Console, text: str, style: str = "") -> None:
    """Print `text` literally: no markup, control characters escaped (`visible`), no wrapping without a terminal."""
    console.print(Text(visible(text), style=style), soft_wrap=not console.is_terminal)


@contextlib.contextmanager
def spinner(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` literally, with a spinner, if `console` is a terminal; yield the function that changes it."""

    def literal(text: str) -> Text:
        return Text(visible(text, kept=""))  # a string would be markup, whatever the console does

    with console.status(literal(text)) as status:
        yield lambda text: status.update(literal(text))


def visible(text: str, kept: str = "\n\t") -> str:
    """Escape the characters in `text` that control a terminal or change text direction, except `kept`: names and
    metadata in files are untrusted.
    """
    if text.isprintable():  # then it contains none of these
        return text
    return "".join(char if char in kept or not _is_obeyed(char) else ascii(char)[1:-1] for char in text)


def _is_obeyed(char: str) -> bool:
    return unicodedata.category(char) in _OBEYED or unicodedata.bidirectional(char) in _DIRECTIONS or char in _MARKS


def show(console: Console, table: RenderableType) -> None:
    """Print a table after a blank line; without a terminal, strip trailing blanks."""
    console.print()
    if console.is_terminal:
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        console.print(Text("\n".join(line.rstrip() for line in captured.get().splitlines())), soft_wrap=True)


@contextlib.contextmanager
def json_on_stdout() -> Iterator[TextIO]:
    """Yield the real stdout for the caller alone; everything else that this process prints there goes to stderr. A
    write that fails raises StdoutFailed."""
    sys.stdout.flush()
    kept = os.dup(1)
    stream = for_programs(os.fdopen(os.dup(kept), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        with stream, contextlib.redirect_stdout(sys.stderr):
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_json(stream: TextIO, value: Any) -> None:
    """Write one line of JSON and flush it: the reader may be waiting."""
    stream.write(json.dumps(value, allow_nan=False) + "\n")
    stream.flush()


def duration(seconds: float) -> str:
    """Format seconds: '4.2 s', '3:07', '2:05:09'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
