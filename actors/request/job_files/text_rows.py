"""Rows of text files: JSON lines, CSV with a header of field names, and one prompt per line."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from modelpool.actors.request.job_files.columns import LIST_FIELDS, NO_CHOICE, ColumnChoice
from modelpool.actors.request.json_text import MAX_BYTES, NotJson, parse_json
from modelpool.pool.values.core.errors import UserError, counted

#: the number of a row, and its fields or its problem
Row: TypeAlias = tuple[int, dict[str, Any] | str]
#: between the LoRAs, ControlNets, regions or references of a CSV cell: "light:0.8; outline:1"
LIST_SEPARATOR = ";"
_DELIMITERS = ",;\t"
#: what spreadsheets write at the start of a text
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineSource(Protocol):
    """A file of bytes, as far as text is read from it."""

    def readline(self, size: int = -1, /) -> bytes:
        """Return the next line, with its end, or its next `size` bytes; b"" at the end."""


def json_rows(_name: str, file: LineSource, choice: ColumnChoice = NO_CHOICE) -> Iterator[Row]:
    """Yield the objects of JSON lines. Empty lines count, and are no rows. A named column that no line has is a problem
    of the last line: until then, it may still come."""
    number, named = 0, set[str]()
    for number, line in _lines(file):
        if line.strip():
            found = _json_row(line)
            if isinstance(found, str):
                yield number, found
                continue
            named |= choice.named_in(found)
            yield number, choice.row(found)
    if number and (problem := choice.missing(named)):
        yield number, problem


def prompt_rows(name: str, file: LineSource, choice: ColumnChoice = NO_CHOICE) -> Iterator[Row]:
    """Yield a prompt per line, without spaces around it. Empty lines count, and are no rows. Raises UserError for a
    named column: there are none.
    """
    if choice.missing(()):
        raise UserError(f"{name}: {choice.missing(())}: each line is a prompt")
    for number, line in _lines(file):
        try:
            prompt = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            yield number, f"not UTF-8 text (byte {error.start} of the line)"
            continue
        if "\r" in prompt:  # line ends of old programs, or several prompts of a table in one
            yield number, "found a carriage return within the line, expected a prompt per line"
        elif prompt:
            yield number, {"prompt": prompt}


def csv_rows(name: str, file: LineSource, choice: ColumnChoice = NO_CHOICE, delimiter: str = "") -> Iterator[Row]:
    """Yield the rows of a CSV file; empty cells are fields that are not set. Cells are separated by commas, semicolons
    or tabs: whichever the header has most of. Field names may be in any case. Metadata that are an object or a list of
    JSON are read as that.

    Raises UserError for an unknown column, and for bytes that are not UTF-8.
    """
    lines = _TextLines(name, file)
    names: list[str] = []
    number = 0
    header = next((line for line in lines if line.strip()), "")
    skipped = lines.count - 1
    delimiter = delimiter or max(_DELIMITERS, key=lambda each: (header.count(each), each == ","))
    reader = csv.reader(lines.starting_with(header), strict=True, delimiter=delimiter)
    try:
        for cells in reader:
            number = reader.line_num + skipped
            if not any(cell.strip() for cell in cells):
                continue
            if not names:
                names = choice.field_names(f"{name}: header", [cell.strip() for cell in cells])
            elif len(cells) > len(names):
                yield number, f"found {counted(len(cells), 'cell')}, expected at most the {len(names)} of the header"
            elif len(cells) < len(names) and lines.is_cut:  # what the last cell was meant to be is not known
                found = f"found {counted(len(cells), 'cell')} and no line end after the last one"
                expected = f"{counted(len(names), 'cell')}, or a line end"
                yield number, f"{found}, expected {expected}: the file may be incomplete"
            else:
                yield number, _csv_row(names, cells)
    except csv.Error as error:
        yield reader.line_num + skipped, f"not CSV: {error}; later lines are not read"


def _lines(file: LineSource) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers. Of a line that is too long for JSON only the start is kept, and one byte more."""
    number, start = 0, True
    while line := file.readline(MAX_BYTES + 1):
        number += 1
        kept = line.removeprefix(BYTE_ORDER_MARK) if start else line
        start = False
        while not line.endswith(b"\n") and (line := file.readline(MAX_BYTES + 1)):
            pass
        yield number, kept.removesuffix(b"\n") if len(kept) <= MAX_BYTES else kept


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        fields = parse_json(line)
    except NotJson as error:
        return str(error)
    if not isinstance(fields, dict):
        return f"found {type(fields).__name__}, expected an object such as " + '{"model": "shapes", "prompt": "..."}'
    return fields


class _TextLines:
    """The lines of a text in UTF-8, with their line ends, one after the other; `count` of them were read. `is_cut`:
    the latest one, which is then the last, has no line end."""

    def __init__(self, name: str, file: LineSource) -> None:
        self.count = 0
        self.is_cut = False
        self._name, self._file, self._read_bytes = name, file, 0
        self._pending: str | None = None

    def starting_with(self, line: str) -> _TextLines:
        """Return these lines, with one that was read already before the others."""
        self._pending = line
        return self

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        if self._pending is not None:
            line, self._pending = self._pending, None
            return line
        content = self._file.readline(MAX_BYTES + 1)
        if not content:
            raise StopIteration
        if len(content) > MAX_BYTES:
            raise UserError(f"{self._name}, line {self.count + 1}: found more than {MAX_BYTES} bytes in a line")
        if not self._read_bytes:
            content = content.removeprefix(BYTE_ORDER_MARK)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{self._name}: not UTF-8 text (byte {self._read_bytes + error.start})") from error
        self._read_bytes += len(content)
        self.count += 1
        self.is_cut = not text.endswith(("\n", "\r"))
        return text


def _csv_row(names: list[str], cells: list[str]) -> dict[str, Any]:
    """Return the fields of one row; an empty cell is a field that is not set."""
    fields: dict[str, Any] = {n: cell for n, cell in zip(names, cells, strict=False) if n and cell.strip()}
    metadata = fields.get("metadata", "").strip()
    if metadata.startswith(("{", "[")):
        with contextlib.suppress(NotJson):  # then it is a text
            fields["metadata"] = parse_json(metadata.encode())
    return with_lists(fields)


def with_lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with the texts of those that are lists split at `LIST_SEPARATOR`."""
    return {
        name: [part.strip() for part in value.split(LIST_SEPARATOR) if part.strip()]
        if name in LIST_FIELDS and isinstance(value, str)
        else value
        for name, value in fields.items()
    }
