"""`read_rows`: the rows of a job file, one after the other, without keeping them.

Knows files and the names of fields; not their values. A row is its number with its fields, or with its problem.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from modelpool.actors.request.job_files.columns import NO_CHOICE, ColumnChoice
from modelpool.actors.request.job_files.dataset_folder import dataset_rows
from modelpool.actors.request.job_files.job_source import JobSource, job_source
from modelpool.actors.request.job_files.table_rows import arrow_rows, parquet_rows
from modelpool.actors.request.job_files.text_rows import BYTE_ORDER_MARK, Row, csv_rows, json_rows, prompt_rows
from modelpool.pool.values.core.errors import unusable_field

#: address of the standard input
STANDARD_INPUT = "-"
_Reader: TypeAlias = Callable[[str, BinaryIO, ColumnChoice], Iterator[Row]]


def _tsv(name: str, file: BinaryIO, choice: ColumnChoice) -> Iterator[Row]:
    return csv_rows(name, file, choice, delimiter="\t")


READERS: dict[str, _Reader] = {
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".csv": csv_rows,
    ".tsv": _tsv,
    ".txt": prompt_rows,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}


def read_rows(address: str | Path, choice: ColumnChoice = NO_CHOICE) -> Iterator[Row]:
    """Yield the number of each row of a job file, with its fields or its problem. `choice` says which fields columns
    are.

    `address` is a path, the URL of an fsspec library, a folder of a Hugging Face dataset, or "-" for the standard
    input: JSON lines if it starts with "{", otherwise one prompt per line. Numbers count lines of a text, and rows of a
    table, from 1. Memory is bounded by the longest line or the largest row group.

    Raises UserError if the whole file is unusable, before the first row: missing, of another kind, with an unknown
    column, or without the library that reads it.
    """
    if str(address) == STANDARD_INPUT:
        yield from _standard_input(choice)
        return
    source = job_source(str(address))
    if source.is_folder():
        yield from dataset_rows(source, choice)
        return
    reader = _reader(source)
    with source.opened() as file:
        yield from reader(source.name, file, choice)


def _reader(source: JobSource) -> _Reader:
    reader = READERS.get(source.ending)
    if reader is None:
        expected = f"a name that ends in {', '.join(READERS)}, the folder of a dataset, or - for the standard input"
        raise unusable_field("job file", source.name, expected)
    return reader


def _standard_input(choice: ColumnChoice) -> Iterator[Row]:
    """Yield the rows of the standard input. Its first line with a character decides what it is."""
    before: list[bytes] = []
    for line in sys.stdin.buffer:
        before.append(line)
        if line.strip():
            break
    is_json = bool(before) and before[-1].removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")
    reader = json_rows if is_json else prompt_rows
    yield from reader("standard input", _Continued(b"".join(before), sys.stdin.buffer), choice)


class _Continued:
    """A stream with `start`, which was read already."""

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        self._start, self._rest = io.BytesIO(start), rest

    def readline(self, size: int = -1) -> bytes:
        """Return the next line."""
        return self._start.readline(size) or self._rest.readline(size)
